"""Minibatches: flattening and its inverse, random permutations, and selection of rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy  # imports `scipy.stats` lazily

from algos.on_policy import environment_major
from algos.optimizers import permutations, shuffled_rows, take, take_of_every_env
from algos.rings import time_major
from fdg.batch.follow import follow


def test_environment_major():
    rollout = jnp.arange(8)[:, None] + 100 * jnp.arange(3)[None]  # [T, B]: 100 b + t
    flat = environment_major(rollout)
    assert flat.reshape(3, 8)[1].tolist() == list(range(100, 108))
    np.testing.assert_array_equal(time_major(flat, 8), rollout)
    features = jnp.ones((8, 3, 2, 5))
    assert environment_major(features).shape == (24, 2, 5)
    assert time_major(environment_major(features), 8).shape == features.shape


def test_epochs_use_every_row_once():
    rows = shuffled_rows(jax.random.key(0), 8, num_epochs=4, num_minibatches=4, blocks=3)
    assert rows.shape == (16, 3, 2)
    epochs = np.asarray(rows).reshape(4, 4, 3, 2).swapaxes(1, 2).reshape(12, 8)  # one row per epoch and block
    for epoch in epochs:
        assert sorted(epoch) == list(range(8))
    assert len({tuple(epoch) for epoch in epochs}) == 12  # all different


def test_large_permutations():
    """From 2^16 rows on the number of rounds grows; counts need not be powers of two."""
    for count in (65_536, 70_001):
        order = np.asarray(permutations(jax.random.key(1), count, 1))[0]
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(count))
        # Positions do not correlate with the order or with its steps.
        assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.02
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


def _p_value(found: np.ndarray, kinds: int) -> float:
    """The p-value of a chi-squared test for `kinds` equally probable outcomes."""
    counts = np.bincount(np.unique(found, return_inverse=True)[1].ravel(), minlength=kinds)
    assert len(counts) == kinds
    return float(scipy.stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("count", [3, 5])
def test_permutations_are_uniform(count):
    orders = np.asarray(permutations(jax.random.key(count), count, 60_000))
    assert _p_value(orders @ count ** np.arange(count), math.factorial(count)) > 1e-3


def test_taken_rows():
    samples = {"t": jnp.array([0, 1, 2, 100, 101, 102])}  # 2 environments, 3 samples each
    assert take(samples, jnp.array([[4, 0]]))["t"].tolist() == [101, 0]
    assert take(samples, jnp.array([[2, 0], [1, 2]]))["t"].tolist() == [2, 0, 101, 102]
    assert take_of_every_env(samples, jnp.array([[2, 0]]), num_envs=2)["t"].tolist() == [2, 0, 102, 100]


def test_shuffle_is_split_over_devices():
    traced = jax.make_jaxpr(lambda key: shuffled_rows(key, 32, 4, 4, 16))(jax.random.key(0))
    flow = follow(traced, [None], 4, [1])
    rows = [each for each in flow.equations if each.eqn.outvars[0].aval.size >= 16 * 32]
    replicated = [each.eqn.primitive.name for each in rows if None in each.results]
    assert len(rows) > 24 and replicated == ["broadcast_in_dim"]  # the initial order is replicated
