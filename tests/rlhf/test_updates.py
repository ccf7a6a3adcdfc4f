"""`updates.epochs`: the flag of the first update, and how measures are reduced."""

import jax
import jax.numpy as jnp
import pytest

from algos.rlhf import updates


def step(carry, minibatch, is_first):
    """Counts updates; its measures are `is_first`, the count, and the sum of the minibatch."""
    info = {"first": is_first.astype(jnp.float32), "at": carry, "at_max": carry, "sum": jnp.sum(minibatch)}
    return carry + 1.0, info


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_measures_are_means_over_updates(num_minibatches):
    samples, number = jnp.arange(8.0), 3 * num_minibatches
    carry, measures = updates.epochs(step, jnp.float32(0), samples, jax.random.key(0), 3, num_minibatches, 4)
    assert float(carry) == number
    assert float(measures["first"]) == pytest.approx(1 / number)
    assert float(measures["at"]) == pytest.approx((number - 1) / 2)
    assert float(measures["at_max"]) == number - 1
    assert float(measures["sum"]) == pytest.approx(28 / num_minibatches)


def test_is_first():
    seen = []

    def record(carry, minibatch, is_first):
        jax.debug.callback(lambda x: seen.append(bool(x)), is_first, ordered=True)
        return carry, {}

    for num_minibatches in (1, 2):
        seen.clear()
        updates.epochs(record, 0, jnp.arange(4.0), jax.random.key(0), 2, num_minibatches, 2)
        jax.effects_barrier()
        assert seen == [True] + [False] * (2 * num_minibatches - 1)
