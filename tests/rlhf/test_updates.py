"""Epochs over samples: which update is the first, what their measures come to."""

import jax
import jax.numpy as jnp
import pytest

from algos.rlhf import updates


def step(carry, minibatch, is_first):
    """Counts updates; says which was the first, and what it saw."""
    says = {"first": is_first.astype(jnp.float32), "at": carry, "at_max": carry, "sum": jnp.sum(minibatch)}
    return carry + 1.0, says


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_the_first_update_is_known_and_measures_are_means_of_all(num_minibatches):
    samples, number = jnp.arange(8.0), 3 * num_minibatches
    carry, measures = updates.epochs(step, jnp.float32(0), samples, jax.random.key(0), 3, num_minibatches, 4)
    assert float(carry) == number
    assert float(measures["first"]) == pytest.approx(1 / number)
    assert float(measures["at"]) == pytest.approx((number - 1) / 2)
    assert float(measures["at_max"]) == number - 1
    assert float(measures["sum"]) == pytest.approx(28 / num_minibatches)


def test_only_the_first_is():
    seen = []

    def noted(carry, minibatch, is_first):
        jax.debug.callback(lambda x: seen.append(bool(x)), is_first, ordered=True)
        return carry, {}

    for num_minibatches in (1, 2):
        seen.clear()
        updates.epochs(noted, 0, jnp.arange(4.0), jax.random.key(0), 2, num_minibatches, 2)
        jax.effects_barrier()
        assert seen == [True] + [False] * (2 * num_minibatches - 1)
