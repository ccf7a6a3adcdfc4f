"""Compiled programs in which devices wait in one collective at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fdg
import policies
from fdg.lowering import ordering, rewriting
from tests.running.order import is_in_order


@fdg.fragment("learner", in_axes=(0, None), out_axes=None)
def two_loops_and_a_sum(x, w):
    """Two loops and a sum that do not depend on each other."""

    def trip(w, _):
        return w * 0.5 + jnp.mean(jnp.tanh(x * w)), jnp.var(x + w)

    first, spread = lax.scan(trip, w[0], None, length=3)
    second, _ = lax.scan(trip, w[1], None, length=4)
    return jnp.stack([first, second, jnp.mean(x)]), spread.sum()


class IndependentLoops:
    def init(self, key):
        return jax.random.normal(key, (8, 3)), jnp.arange(3.0)

    def iterate(self, state):
        x, w = state
        w, spread = two_loops_and_a_sum(x, w)
        return (x, w), {"spread": spread}


@fdg.fragment("learner", in_axes=(0, 0), out_axes=(None, None, 0))
def keys_and_counts(keys, x):
    """Exchanges of keys before a loop whose count starts at zero, and in a loop over keys only."""

    def is_low(carry):
        return (carry[0] < 3) & (jnp.mean(carry[1]) < 9)

    count, _ = lax.while_loop(is_low, lambda carry: (carry[0] + 1, carry[1] + 1), (0, x))
    drawn = lax.fori_loop(0, 2, lambda _, k: jax.vmap(jax.random.split)(k)[:, 0], keys)
    return keys, count + jnp.sort(x[:, 0])[0], drawn


class OfKeys:
    def init(self, key):
        return jax.random.split(jax.random.key(3, impl="unsafe_rbg"), 8), jax.random.normal(key, (8, 3))

    def iterate(self, state):
        shared, count, drawn = keys_and_counts(*state)
        return (drawn, state[1] + jax.random.uniform(shared[0])), {"count": count}


@fdg.fragment("actor", in_axes=(0, None, 0), out_axes=0)
def centred(x, count, unread):
    return lax.while_loop(
        lambda c: c[1] < count, lambda c: (c[0] - jnp.mean(c[0]), c[1] + 1), (x, 0 * count)
    )[0]


class OfRows:
    """A loop with collectives that only stacks results: its carry does not change."""

    def init(self, key):
        return jax.random.normal(key, (8,)), jax.random.normal(key, (8, 3)), 5

    def iterate(self, state):
        x, rows, row = state
        _, taken = lax.scan(lambda c, x: (c, jnp.take(x, c, axis=0)), row, jnp.stack([rows, 2 * rows]))
        x = centred(x, row, rows)
        return (x, rows + jnp.tanh(jnp.mean(x)), row), {"taken": jnp.mean(taken)}


@fdg.fragment("learner", in_axes=(0, 0), out_axes=(0, 0))
def both(x, y):
    return x, y


class OfCalls:
    """A loop over gathered rows follows a call; only the call's other result depends on an earlier loop."""

    def init(self, key):
        return jax.random.normal(key, (12,)), 5

    def iterate(self, state):
        x, row = state
        x, before = both(centred(x, row, x), x)
        summed = lax.fori_loop(1, 12, lambda r, y: y.at[r].add(jnp.sin(y[r - 1])), before)
        return (x, row), {"summed": jnp.mean(summed)}


class OfLiterals:
    """Loops that pass a literal through: the initial value of a carry, and the carry of an unrolled trip."""

    def init(self, key):
        return jax.random.normal(key, (8,)), 5

    def iterate(self, state):
        x, count = state
        x = centred(x, count, x)
        x, half = lax.while_loop(lambda c: jnp.mean(c[0]) > 9, lambda c: (c[0] * c[1], c[1]), (x + 1, 0.5))
        (_, x), means = lax.scan(lambda c, _: ((0.0, x + c[0]), jnp.mean(c[1])), (half, x), None, length=1)
        return (centred(x, count, x), count), {"mean": jnp.sum(means)}


@jax.custom_jvp
def only_first(x, unread):
    return jnp.sin(x)


only_first.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]))


class WithDeadLoop:
    """Nothing reads the results of a loop over gathered rows, although they are operands of a later call."""

    def init(self, key):
        return jax.random.normal(key, (12,)), 5

    def iterate(self, state):
        x, count = state
        summed = lax.fori_loop(1, 12, lambda r, y: y.at[r].add(jnp.sin(y[r - 1])), x)
        return (only_first(centred(x, count, x), summed), count), {"mean": jnp.mean(x)}


@fdg.fragment("learner", in_axes=(0, None), out_axes=None, name="printing")
def two_loops_and_a_print(x, w):
    jax.debug.print("{}", w)
    return two_loops_and_a_sum.__wrapped__(x, w)


class WithEffect(IndependentLoops):
    """The same loops in a fragment with a side effect."""

    def iterate(self, state):
        x, w = state
        w, spread = two_loops_and_a_print(x, w)
        return (x, w), {"spread": spread}


@pytest.mark.parametrize("algorithm", [IndependentLoops(), OfKeys(), OfRows(), OfCalls(), WithEffect()])
def test_loops_are_ordered_and_numbers_are_unchanged(algorithm, devices, monkeypatch):
    def compiled():
        return fdg.compile(algorithm, policies.GPUOnly(), devices[:2])

    engine = compiled()
    assert is_in_order(engine)
    state, metrics = engine.run(engine.init(0), 3)
    monkeypatch.setattr(rewriting, "order_collectives", lambda jaxpr, *_: jaxpr)
    unordered = compiled()
    assert not is_in_order(unordered)
    expected = unordered.run(unordered.init(0), 3)
    for a, b in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves(expected), strict=True):
        is_key = jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*map(jax.random.key_data, (a, b)) if is_key else (a, b))


def test_loops_that_pass_literals_through_are_ordered(devices):
    engine = fdg.compile(OfLiterals(), policies.GPUOnly(), devices[:2])
    assert is_in_order(engine) and not engine.unexplained()


def test_nothing_waits_for_dead_code(devices):
    engine = fdg.compile(WithDeadLoop(), policies.GPUOnly(), devices[:2])
    assert is_in_order(engine) and not engine.unexplained()


@pytest.mark.parametrize("sign", [jnp.float32(jnp.nan), jnp.arange(4), jnp.array([True]), jnp.float32(-0.0)])
def test_wait_for_returns_its_operand(sign):
    for x in jnp.array([-0.0, jnp.inf, 3.5]), jnp.arange(3), jnp.array([True, False]):
        result = jax.jit(ordering.wait_for)(x, sign, jnp.ones((2, 3)))
        assert result.dtype == x.dtype and result.tobytes() == x.tobytes()
