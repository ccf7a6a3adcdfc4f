"""Minibatches: what is flattened comes back, and an epoch takes each row once."""

import jax
import jax.numpy as jnp
import numpy as np

from algos.minibatches import shuffled_rows, take, take_of_every_env
from algos.rollout import environment_major, time_major


def test_environment_major_keeps_an_environment_together():
    rollout = jnp.arange(8)[:, None] + 100 * jnp.arange(3)[None]  # [T, B]: 100 b + t
    flat = environment_major(rollout)
    assert flat.reshape(3, 8)[1].tolist() == list(range(100, 108))
    np.testing.assert_array_equal(time_major(flat, 8), rollout)
    features = jnp.ones((8, 3, 2, 5))
    assert environment_major(features).shape == (24, 2, 5)
    assert time_major(environment_major(features), 8).shape == features.shape


def test_each_epoch_takes_every_row_once():
    rows = shuffled_rows(jax.random.key(0), 8, num_epochs=4, num_minibatches=4)
    assert rows.shape == (16, 2)
    epochs = np.asarray(rows).reshape(4, 8)
    for epoch in epochs:
        assert sorted(epoch) == list(range(8))
    assert len({tuple(epoch) for epoch in epochs}) == 4  # no two alike


def test_taken_rows():
    samples = {"t": jnp.array([0, 1, 2, 100, 101, 102])}  # 2 environments, 3 samples each
    assert take(samples, jnp.array([4, 0]))["t"].tolist() == [101, 0]
    assert take_of_every_env(samples, jnp.array([2, 0]), num_envs=2)["t"].tolist() == [2, 0, 102, 100]
