"""Linen, NNX and Equinox modules as networks, compared with direct calls of their libraries."""

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

SPACE, ACTIONS = Box(-1.0, 1.0, (3,)), Discrete(2)


class Linen(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(2)(x), nn.Dense(1)(x)[:, 0]


class LinenOfList(nn.Module):
    widths: list  # does not hash

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(2)(x), nn.Dense(1)(x)[:, 0]


class Nnx(nnx.Module):
    def __init__(self, width=4, *, rngs):
        self.scale = jnp.array([[1.0, 2.0, 3.0]])  # a constant, which is not trained
        self.layers = nnx.List([nnx.Linear(3, width, rngs=rngs)])
        self.policy, self.value = nnx.Linear(width, 2, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.layers[0](x * self.scale))
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


class LinenWithDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))


class EquinoxWithDropout(equinox.Module):
    dropout: equinox.nn.Dropout = equinox.nn.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(x)


def for_spaces(observation_space, action_space):
    assert (observation_space, action_space) == (SPACE, ACTIONS)
    return functools.partial(Equinox, 5)


NOTHING = 3
X = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
KEY = jax.random.key(7)
CASES = {  # the `network` argument; the module made by its library; the library's call of it
    "linen": (lambda: Linen(), lambda: Linen().init(KEY, X), lambda v, x: Linen().apply(v, x)),
    "linen of a list": (
        lambda: LinenOfList([4, 5]),
        lambda: LinenOfList([4, 5]).init(KEY, X),
        lambda v, x: LinenOfList([4, 5]).apply(v, x),
    ),
    "linen partial of a list": (
        lambda: functools.partial(LinenOfList, [4]),
        lambda: LinenOfList([4]).init(KEY, X),
        lambda v, x: LinenOfList([4]).apply(v, x),
    ),
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


@pytest.mark.parametrize("name", CASES)
def test_module_matches_its_library(name):
    given, make, apply = CASES[name]
    given = foreign.make_hashable(given())
    network = resolve_network(given, SPACE, ACTIONS)
    parameters = network.init(KEY, X)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_results(parameters):
        policy, value = network.apply(parameters, X)
        return value.sum() + policy.std(), (policy, value)

    gradient, results = gradient_and_results(parameters)
    for ours, theirs in zip(results, apply(make(), X), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert jax.tree.structure(gradient) == jax.tree.structure(parameters)
    pickle.dumps(jax.tree.map(np.asarray, parameters))  # checkpoints store plain dictionaries


@pytest.mark.parametrize("name", CASES)
def test_algorithm_accepts_module(name):
    class Env(envs.probe.Value):
        observation_space, action_space = SPACE, ACTIONS

        def reset(self, key):
            return (), jnp.ones(3)

        def step(self, key, state, action):
            return (), jnp.ones(3), jnp.float32(1), jnp.bool_(True), jnp.bool_(False)

    fields = {"env": envs.vectorize(Env()), "num_envs": 2, "num_steps": 2, "network": CASES[name][0]()}
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
def test_invalid_network(network, message):
    with pytest.raises(FdgError, match=message):
        resolve_network(network, SPACE, ACTIONS).init(KEY, X)


@pytest.mark.parametrize(
    ("network", "fix"),
    [(LinenWithDropout(), "deterministic=True"), (EquinoxWithDropout(), "inference=True")],
    ids=["linen", "equinox"],
)
def test_dropout_is_refused_with_the_fix(network, fix):
    network = resolve_network(foreign.make_hashable(network), SPACE, ACTIONS)
    with pytest.raises(FdgError, match=f"network .*WithDropout: .* leave out dropout .*{fix}"):
        network.apply(network.init(KEY, X), X)


class LinenWithFlag(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(2)(x)


class NnxWithFlag(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x, train):
        return self.dense(x)


class EquinoxWithFlag(equinox.Module):
    dense: equinox.nn.Linear

    def __init__(self, key):
        self.dense = equinox.nn.Linear(3, 2, key=key)

    def __call__(self, x, train):
        return self.dense(x)


@pytest.mark.parametrize("network", [LinenWithFlag(), NnxWithFlag, EquinoxWithFlag], ids=str)
def test_further_arguments_of_a_call_are_refused_with_the_fix(network):
    network = resolve_network(network, SPACE, ACTIONS)
    message = "network .*WithFlag: its __call__ does not take .*'train'\\): give further arguments defaul"
    with pytest.raises(FdgError, match=message):
        network.apply(network.init(KEY, X), X)


def test_actor_does_not_see_privileged_observations():
    space = envs.Dict({"a": Box(0.0, 1.0, (1,)), "b": Box(0.0, 1.0, (1,))}, privileged=("b",))
    network = algos.Network(
        lambda key, *x: (), lambda p, x, *action: (x["a"] + 10 * x["b"], (x["a"] + 10 * x["b"])[:, 0])
    )
    observation = {"a": jnp.ones((2, 1)), "b": jnp.ones((2, 1))}

    def applied(sees):
        return resolve_network(network, space, ACTIONS, sees=sees).apply((), observation)

    assert applied("both")[0].max() == applied("actor")[0].max() == 1
    assert applied("both")[1].min() == applied("critic")[0].min() == 11
