"""State of several groups stays bitwise equal: each group computes integers and keys, one group floats."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from fdg import jaxprs
from fdg.placing.scheduling.placement import is_exact
from tests.placing.test_partition import Two, X, here, here2, primitives, schedule, there


def devices_of(*platforms):
    return [types.SimpleNamespace(platform=platform) for platform in platforms]


UNIFORM, MIXED = devices_of("gpu", "gpu", "gpu"), devices_of("gpu", "gpu", "cpu")


def copied(found, name):
    return name in primitives(found, "left") & primitives(found, "right")


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x: x * 0.9, False),
        (lambda x: jnp.mean(x), False),
        (lambda x: jnp.argmax(jnp.exp(x)), False),  # an integer computed from floats
        (lambda x: jax.jit(jnp.tanh)(x), False),
        (lambda x: x[::2].reshape(2, 2), True),
        (lambda x: jnp.where(x > 0, x, -x), True),
        (lambda x: jnp.argmax(x), True),
        (lambda x: jnp.arange(8) * 3 + jnp.sum(jnp.arange(4)), True),
        (lambda x: jax.random.split(jax.random.key(0), 4), True),
        (lambda x: jnp.zeros((4, 4)), True),
    ],
)
def test_is_exact(function, exact):
    equations = jaxprs.open_jaxpr(jax.make_jaxpr(function)(X)).eqns
    assert all(map(is_exact, equations)) == exact


@pytest.mark.parametrize(("devices", "expected"), [(UNIFORM, True), (MIXED, False)])
def test_floats_are_copied_only_within_a_platform(devices, expected):
    """exp(z) is not part of the state. On one platform its copies differ by ulps at most."""

    def iterate(x):
        z = jnp.exp(here(x))
        return {"x": here2(z)}, {"m": jnp.sum(there(z))}

    assert copied(schedule(iterate, devices, x=X), "exp") == expected


@pytest.mark.parametrize("devices", [UNIFORM, MIXED])
def test_integers_and_keys_are_computed_by_each_group(devices):
    draw = fdg.fragment("here", in_axes=(0, None), name="draw")(lambda x, n: x + n)
    stir = fdg.fragment("there", in_axes=(0, None), name="stir")(lambda x, n: x - n)

    def iterate(x, n, key):
        key, one = jax.random.split(key)
        n = n + jax.random.bits(one, dtype=jnp.uint32) % 7
        return {"x": stir(draw(x, n), n), "n": n, "key": key}, {}

    found = schedule(iterate, devices, x=X, n=jnp.uint32(0), key=jax.random.key(0))
    assert all(a.dtype == jnp.float32 for move, _ in found.moves() for a, _ in move.pairs)
    assert {value.group for value in found.leaves[0]} == {"left", "right"}  # "key" sorts first


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("devices", [UNIFORM, MIXED])
def test_replicated_float_is_computed_by_one_group(devices, looped):
    """Programs round differently, so copies computed by each would diverge over iterations."""

    def iterate(x, y, scale):
        def one(carry, _):
            x, y, scale = carry
            return (here(x, scale * jnp.ones(8)), there(y, scale * jnp.ones(8)), jnp.tanh(scale) * 0.9), None

        if looped:
            (x, y, scale), _ = jax.lax.scan(one, (x, y, scale), None, length=2)
        else:
            (x, y, scale), _ = one((x, y, scale), None)
        return {"x": x, "y": y, "scale": scale}, {}

    found = schedule(iterate, devices, x=X, y=X, scale=jnp.float32(1.0))
    assert {value.group for value in found.leaves[0]} == {"left", "right"}  # "scale" sorts first
    assert not copied(found, "tanh")
    moves = [(move.delay, [a.shape for a, _ in move.pairs]) for move, _ in found.moves()]
    # In the loop it moves in each trip, for the next one; after the last trip both groups hold it.
    assert ("step" if looped else "iteration", [()]) in moves, moves


def test_sum_is_computed_by_one_group_if_group_sizes_differ():
    """`left` adds two halves, `right` sums at once: another order, other bits."""

    def iterate(x, y, mean):
        a = here(x, mean * jnp.ones(8))
        return {"x": a, "y": there(y, mean * jnp.ones(8)), "mean": jnp.mean(a)}, {}

    found = schedule(iterate, UNIFORM, x=X, y=X, mean=jnp.float32(0.0))
    assert {value.group for value in found.leaves[0]} == {"left", "right"}
    assert not copied(found, "reduce_sum")


def test_replicas_are_bitwise_equal_after_a_run(devices):
    """Two leaves, each computed from the replica of one group, are bitwise equal."""

    class Mine:
        def init(self, key):
            return {"scale": jnp.float32(1.0), "left": jnp.zeros(8), "right": jnp.zeros(8)}

        def iterate(self, state):
            scale = jnp.tanh(jnp.exp(state["scale"]) * 0.37) + 0.11
            seen = fdg.fragment("here", name="see")(lambda x: x)
            also = fdg.fragment("there", name="also")(lambda x: x)
            ones = jnp.ones(8)
            left, right = seen(ones * state["scale"]) + 0, also(ones * state["scale"]) + 0
            return {"scale": scale, "left": left, "right": right}, {}

    engine = fdg.compile(Mine(), Two(), devices[:3])
    state, _ = engine.run(engine.init(0), 20)
    np.testing.assert_array_equal(state["left"], state["right"])
