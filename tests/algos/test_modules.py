"""Networks of Linen, NNX and Equinox in the place of the default ones."""

import functools
import pickle

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import algos
import envs
import fdg
from algos.networks import resolve_network
from envs.spaces import Box, Discrete
from fdg.errors import FdgError
from fdg.settings import foreign

SEEN, ACTIONS = Box(-1.0, 1.0, (3,)), Discrete(2)


class Linen(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(2)(x), nn.Dense(1)(x)[:, 0]


class Nnx(nnx.Module):
    def __init__(self, width=4, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, width, rngs=rngs)])
        self.policy, self.value = nnx.Linear(width, 2, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.layers[0](x))
        return self.policy(x), self.value(x)[:, 0]


class Equinox(equinox.Module):
    layers: list
    activation: object

    def __init__(self, width=4, *, key):
        keys = list(jax.random.split(key, 3))
        self.activation = jax.nn.tanh
        self.layers = [
            equinox.nn.Linear(n, m, key=k)
            for n, m, k in zip((3, width, width), (width, 2, 1), keys, strict=True)
        ]

    def __call__(self, x):
        x = self.activation(self.layers[0](x))
        return self.layers[1](x), self.layers[2](x)[0]


class Counting(nnx.Module):
    def __init__(self, *, rngs):
        self.count = nnx.Variable(jnp.zeros(()))


class Normalising(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(x)


def for_spaces(observation_space, action_space):
    assert (observation_space, action_space) == (SEEN, ACTIONS)
    return functools.partial(Equinox, 5)


NOTHING = 3
X = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
KEY = jax.random.key(7)
GIVEN = {  # what is given, when it is asked for; how its own library makes it; how that calls it
    "linen": (lambda: Linen(), lambda: Linen().init(KEY, X), lambda v, x: Linen().apply(v, x)),
    "nnx": (lambda: Nnx, lambda: Nnx(rngs=nnx.Rngs(KEY)), lambda module, x: module(x)),
    "nnx partial": (
        lambda: functools.partial(Nnx, 6),
        lambda: Nnx(6, rngs=nnx.Rngs(KEY)),
        lambda module, x: module(x),
    ),
    "nnx instance": (*[lambda: Nnx(rngs=nnx.Rngs(3))] * 2, lambda module, x: module(x)),
    "equinox": (lambda: Equinox, lambda: Equinox(key=KEY), lambda module, x: jax.vmap(module)(x)),
    "equinox instance": (*[lambda: Equinox(key=KEY)] * 2, lambda module, x: jax.vmap(module)(x)),
    "a name": (
        lambda: f"{__name__}:for_spaces",
        lambda: Equinox(5, key=KEY),
        lambda module, x: jax.vmap(module)(x),
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_it_computes_what_its_own_library_does(name):
    given, make, apply = GIVEN[name]
    given = foreign.make_hashable(given())
    network = resolve_network(given, SEEN, ACTIONS)
    parameters = network.init(KEY, X)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_results(parameters):
        policy, value = network.apply(parameters, X)
        return value.sum() + policy.std(), (policy, value)

    gradient, results = gradient_and_results(parameters)
    for mine, theirs in zip(results, apply(make(), X), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert jax.tree.structure(gradient) == jax.tree.structure(parameters)
    pickle.dumps(jax.tree.map(np.asarray, parameters))  # plain dictionaries: a checkpoint knows them


@pytest.mark.parametrize("name", GIVEN)
def test_an_algorithm_takes_it(name):
    class Observed(envs.probe.Value):
        observation_space, action_space = SEEN, ACTIONS

        def reset(self, key):
            return (), jnp.ones(3)

        def step(self, key, state, action):
            return (), jnp.ones(3), jnp.float32(1), jnp.bool_(True), jnp.bool_(False)

    fields = {"env": envs.vectorize(Observed()), "num_envs": 2, "num_steps": 2, "network": GIVEN[name][0]()}
    algorithm = algos.A2C(**fields)
    assert hash(algorithm) == hash(algorithm) and algorithm == algorithm
    assert {f.role for f in fdg.trace(algorithm).fragments} >= {"actor", "learner"}


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Counting, "the module has state besides its parameters \\(count\\)"),
        (Normalising(), "the module has state besides its parameters \\(batch_stats\\)"),
        (f"{__name__}:NOTHING", "is of type int: give a module of Linen, NNX or Equinox"),
        (f"{__name__}:Equinoks", "unknown --network in .*'Equinoks': did you mean 'Equinox'"),
        ("no_such_module:Net", "--network 'no_such_module:Net': there is no module"),
    ],
)
def test_what_is_no_network_is_said(network, message):
    with pytest.raises(FdgError, match=message):
        resolve_network(network, SEEN, ACTIONS).init(KEY, X)


def test_an_actor_does_not_see_what_is_privileged():
    space = envs.Dict({"a": Box(0.0, 1.0, (1,)), "b": Box(0.0, 1.0, (1,))}, privileged=("b",))
    total = algos.Network(
        lambda key, *x: (), lambda p, x, *action: (x["a"] + 10 * x["b"], (x["a"] + 10 * x["b"])[:, 0])
    )
    observation = {"a": jnp.ones((2, 1)), "b": jnp.ones((2, 1))}

    def applied(sees):
        return resolve_network(total, space, ACTIONS, sees=sees).apply((), observation)

    assert applied("both")[0].max() == applied("actor")[0].max() == 1
    assert applied("both")[1].min() == applied("critic")[0].min() == 11
