"""Hoisting of random draws out of loops: the same numbers, and no random bits left in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import algos
import envs
import fdg
from fdg import jaxprs
from fdg.lowering import draws

KEYS = jax.random.split(jax.random.key(0), (5, 3))  # trips, batch


def walk(x, keys):
    """One trip of a random walk; the scale of the second draw is carried."""
    step = jax.vmap(jax.random.normal)(keys)
    return x + step, jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))(keys) * x


def loop(x, keys):
    return jax.lax.scan(walk, x, keys)


def reversed_loop(x, keys):
    return jax.lax.scan(walk, x, keys, reverse=True)


def in_calls(x, keys):
    """A fragment and a jitted function that draw, among other operations."""

    @fdg.fragment("actor", in_axes=(0, 0))
    def act(x, keys):
        return jax.jit(walk)(x, keys)[0]

    return jax.lax.scan(lambda x, k: (act(x, k), x), x, keys)


def nested(x, keys):
    return jax.lax.scan(lambda x, k: jax.lax.scan(walk, x, jnp.stack([k, k])), x, keys)


def split_keys(x, keys):
    """Keys that are split; what is not hoisted uses them again."""

    def trip(x, keys):
        first, second = jax.vmap(lambda k: jax.random.split(k), out_axes=1)(keys)
        return x + jax.vmap(jax.random.uniform)(first), second

    return jax.lax.scan(trip, x, keys)


def with_constants(x, keys):
    shift = jax.random.split(jax.random.key(7), 3)
    return jax.lax.scan(lambda x, k: (x + jax.vmap(jax.random.uniform)(shift), k), x, keys)


def in_calls_with_constants(x, keys):
    """Jitted functions that capture arrays, for keys and for operations on draws."""
    number, scale = np.arange(3), np.array([1.0, 2.0, 3.0], np.float32)

    @jax.jit
    def step(x, keys):
        own = jax.vmap(jax.random.fold_in)(keys, number)
        return x + scale * jax.vmap(jax.random.normal)(own)

    return jax.lax.scan(lambda x, k: (step(x, k), x), x, keys)


def drawn_in_loops(jaxpr, inside=False):
    """Number of random draws in the bodies of scans."""
    count = 0
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        count += inside and eqn.primitive.name == "random_bits"
        within = inside or eqn.primitive.name == "scan"
        count += sum(drawn_in_loops(body.jaxpr, within) for body in jaxprs.bodies(eqn))
    return count


def values(results):
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in results]


@pytest.mark.parametrize(
    ("function", "remaining"),
    [
        (loop, 0),
        (reversed_loop, 0),
        (in_calls, 0),
        (nested, 0),
        (split_keys, 0),
        (with_constants, 1),
        (in_calls_with_constants, 0),
    ],
    ids=lambda f: getattr(f, "__name__", str(f)),
)
def test_hoisted_draws_match_the_loop(function, remaining):
    x = jnp.arange(3.0)
    jaxpr = jax.make_jaxpr(function)(x, KEYS)
    hoisted = draws.hoist_draws(jaxpr)
    assert drawn_in_loops(jaxpr) > 0 and drawn_in_loops(hoisted) == remaining
    results, expected = (values(core.jaxpr_as_fun(each)(x, KEYS)) for each in (hoisted, jaxpr))
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_calls_keep_the_constants_that_they_read():
    x = jnp.arange(3.0)

    def constants(jaxpr):
        here = [np.shape(c) for closed in bodies(jaxpr) for c in jaxprs.constants_of(closed)]
        return here + [c for closed in bodies(jaxpr) for c in constants(closed)]

    def bodies(jaxpr):
        return [c for eqn in jaxprs.open_jaxpr(jaxpr).eqns for c in jaxprs.closed_bodies(eqn)]

    jaxpr = jax.make_jaxpr(in_calls_with_constants)(x, KEYS)
    assert constants(jaxpr) == [(3,), (3,)]
    assert constants(draws.hoist_draws(jaxpr)) == [(3,), (3,)]  # one for the draws, one for the rest


@pytest.mark.parametrize("name", ["Breakout-MinAtar", "overcooked"])
def test_rollouts_draw_nothing_in_loops(name):
    if "MinAtar" not in name:
        pytest.importorskip("jaxmarl")
    make = algos.IPPO if envs.num_agents(envs.make(name)) else algos.PPO
    graph = fdg.trace(make(env=envs.make(name), num_envs=2, num_steps=4, num_minibatches=2, hidden=(8,)))
    assert drawn_in_loops(graph.jaxpr) > 2
    assert drawn_in_loops(draws.hoist_draws(graph.jaxpr)) == 0


def test_unroll_is_kept():
    jaxpr = jax.make_jaxpr(lambda x, keys: jax.lax.scan(walk, x, keys, unroll=5))(jnp.arange(3.0), KEYS)
    made = [eqn for eqn in jaxprs.open_jaxpr(draws.hoist_draws(jaxpr)).eqns if eqn.primitive.name == "scan"]
    assert [eqn.params["unroll"] for eqn in made] == [5]


def test_draw_from_a_carried_key_is_not_hoisted():
    def trip(key, _):
        return jax.random.split(key)[0], jax.random.uniform(key)

    jaxpr = jax.make_jaxpr(lambda key: jax.lax.scan(trip, key, None, length=4))(jax.random.key(0))
    assert draws.hoist_draws(jaxpr) is jaxpr


def host_seed(t, key):
    return jax.pure_callback(lambda t: np.int32(3 * t), jax.ShapeDtypeStruct((), jnp.int32), t)


def printed_seed(t, key):
    jax.debug.print("{}", t)
    return t


@jax.custom_batching.custom_vmap
def own_rule(t):
    return t + 1


@own_rule.def_vmap
def _(size, _, t):
    return t - 1, True


def chosen_loop(t, key):
    """The loop of the branch that is not taken would never end."""
    down = lambda t: jax.lax.while_loop(lambda i: i != 0, lambda i: i - 2, 2 * t + 2)  # noqa: E731
    return jax.lax.cond(t % 2 == 0, down, lambda t: t, t)


unbatched_p = core.Primitive("unbatched")
unbatched_p.def_impl(lambda t: t)
unbatched_p.def_abstract_eval(lambda t: t)
jax.interpreters.mlir.register_lowering(
    unbatched_p, jax.interpreters.mlir.lower_fun(lambda t: t + 1, multiple_results=False)
)


@pytest.mark.parametrize(
    "seed_of",
    [
        host_seed,
        jax.jit(host_seed),
        printed_seed,
        lambda t, key: own_rule(t),
        jax.checkpoint(lambda t, key: own_rule(t)),
        chosen_loop,
        lambda t, key: unbatched_p.bind(t),
        lambda t, key: jax.lax.cond(t > 1, host_seed, lambda t, key: t, t, key),
    ],
)
def test_seed_that_cannot_be_batched_is_not_hoisted(seed_of):
    def trip(x, t):
        key = jax.random.fold_in(jax.random.key(0), seed_of(t, None))
        return x + jax.random.uniform(key), None

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(trip, x, jnp.arange(3))[0])(0.0)
    results, expected = (core.jaxpr_as_fun(each)(0.0) for each in (draws.hoist_draws(jaxpr), jaxpr))
    np.testing.assert_allclose(results, expected, rtol=1e-6)
    assert drawn_in_loops(draws.hoist_draws(jaxpr)) == 1


def test_batched_rbg_draws_are_not_hoisted():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), (5, 3))
    jaxpr = jax.make_jaxpr(loop)(jnp.arange(3.0), keys)
    assert draws.hoist_draws(jaxpr) is jaxpr


def test_program_without_draws_is_unchanged():
    for function in (jnp.sin, lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x)):
        jaxpr = jax.make_jaxpr(function)(1.0)
        assert draws.hoist_draws(jaxpr) is jaxpr


def test_draws_above_the_memory_limit_are_not_hoisted(monkeypatch):
    monkeypatch.setattr(draws, "MAX_BYTES", 8)
    unseen = lambda x, keys: loop(x, keys)  # noqa: E731 (results are cached by jaxpr)
    jaxpr = jax.make_jaxpr(unseen)(jnp.arange(3.0), KEYS)
    assert draws.hoist_draws(jaxpr) is jaxpr


def test_fragments_keep_their_names():
    hoisted = draws.hoist_draws(jax.make_jaxpr(in_calls)(jnp.arange(3.0), KEYS))
    assert str(hoisted).count("name=fdg:actor:act") == 2  # the draws, and the rest
