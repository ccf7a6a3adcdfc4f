"""Epsilon-greedy actions: probabilities, keys, masks, and the schedule of epsilon."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.dqn import epsilon_greedy
from algos.replaying import linear

VALUES = jnp.array([[1.0, 5.0, 2.0, 0.0], [3.0, -jnp.inf, 2.0, -jnp.inf]])


def test_probabilities_by_hand():
    """Epsilon 0.4. Four allowed actions: 0.1 each, plus 0.6 for the best; two: 0.2 each, plus 0.6."""
    probability = jnp.exp(epsilon_greedy(VALUES, 0.4).logits)
    np.testing.assert_allclose(probability, [[0.1, 0.7, 0.1, 0.1], [0.8, 0.0, 0.2, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(("epsilon", "probability"), [(0.0, 1.0), (0.4, 0.7), (1.0, 0.25)])
def test_sampling_frequencies(epsilon, probability):
    keys = jax.random.split(jax.random.key(0), 10_000)
    action = epsilon_greedy(jnp.tile(VALUES[:1], (10_000, 1)), epsilon).sample(keys)
    assert abs(np.mean(np.asarray(action) == 1) - probability) < 5 * np.sqrt(0.25 / 10_000)


def test_masked_actions_are_never_sampled():
    keys = jax.random.split(jax.random.key(0), 1_000)
    for epsilon in (0.0, 1.0):
        action = epsilon_greedy(jnp.tile(VALUES[1:], (1_000, 1)), epsilon).sample(keys)
        assert set(np.asarray(action).tolist()) <= {0, 2}
    assert epsilon_greedy(VALUES, 0.3).mode().tolist() == [1, 0]


def test_parts_of_a_batch_sample_the_same_actions():
    keys = jax.random.split(jax.random.key(0), 2)
    together = epsilon_greedy(VALUES, 0.5).sample(keys)
    parts = [epsilon_greedy(VALUES[i : i + 1], 0.5).sample(keys[i : i + 1]) for i in range(2)]
    np.testing.assert_array_equal(together, jnp.concatenate(parts))


def test_linear_schedule():
    assert [float(linear(1.0, 0.0, 4, jnp.int32(t))) for t in (0, 1, 4, 1_000)] == [1.0, 0.75, 0.0, 0.0]
    assert float(linear(1.0, 0.1, 0, jnp.int32(0))) == pytest.approx(0.1)  # zero steps: the end
