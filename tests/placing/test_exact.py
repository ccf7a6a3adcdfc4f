"""What several groups keep stays the same bits: integers and keys are computed by each, floats by one."""

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


ALIKE, MIXED = devices_of("gpu", "gpu", "gpu"), devices_of("gpu", "gpu", "cpu")


def copied(found, name):
    return name in primitives(found, "left") & primitives(found, "right")


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x: x * 0.9, False),
        (lambda x: jnp.mean(x), False),
        (lambda x: jnp.argmax(jnp.exp(x)), False),  # an integer that floats decide
        (lambda x: jax.jit(jnp.tanh)(x), False),
        (lambda x: x[::2].reshape(2, 2), True),
        (lambda x: jnp.where(x > 0, x, -x), True),
        (lambda x: jnp.argmax(x), True),
        (lambda x: jnp.arange(8) * 3 + jnp.sum(jnp.arange(4)), True),
        (lambda x: jax.random.split(jax.random.key(0), 4), True),
        (lambda x: jnp.zeros((4, 4)), True),
    ],
)
def test_what_is_exact(function, exact):
    equations = jaxprs.open_jaxpr(jax.make_jaxpr(function)(X)).eqns
    assert all(map(is_exact, equations)) == exact


@pytest.mark.parametrize(("devices", "twice"), [(ALIKE, True), (MIXED, False)])
def test_floats_are_copied_within_a_platform_alone(devices, twice):
    """Nobody keeps exp(z): on one platform its copies differ by ulps at most, and are gone at the end."""

    def iterate(x):
        z = jnp.exp(here(x))
        return {"x": here2(z)}, {"m": jnp.sum(there(z))}

    assert copied(schedule(iterate, devices, x=X), "exp") == twice


@pytest.mark.parametrize("devices", [ALIKE, MIXED])
def test_integers_and_keys_are_computed_by_each(devices):
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
@pytest.mark.parametrize("devices", [ALIKE, MIXED])
def test_a_float_that_both_keep_is_computed_by_one(devices, looped):
    """Each program would round in its own way, and the copies would part more with every iteration."""

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
    # In the loop it crosses for the next step; what comes out of the last one is then on both sides.
    assert ("step" if looped else "iteration", [()]) in moves, moves


def test_sums_over_groups_of_two_sizes_do_not_part():
    """`left` adds up two halves, `right` all at once: another order, other bits."""

    def iterate(x, y, mean):
        a = here(x, mean * jnp.ones(8))
        return {"x": a, "y": there(y, mean * jnp.ones(8)), "mean": jnp.mean(a)}, {}

    found = schedule(iterate, ALIKE, x=X, y=X, mean=jnp.float32(0.0))
    assert {value.group for value in found.leaves[0]} == {"left", "right"}
    assert not copied(found, "reduce_sum")


def test_copies_are_the_same_bits_after_a_run(devices):
    """Two leaves that follow the copy of either side: they agree to the last bit."""

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
