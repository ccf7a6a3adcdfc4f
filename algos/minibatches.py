"""From a rollout `[T, B, ...]` to minibatches that leave a split of the environments a split of the samples.

Samples are kept *environment-major*: `[B, T]` flattened, those of one environment side by side. A sample may
be one step, or a sequence of several (`per_env` of them an environment).
"""

from typing import Any

import jax


def shuffled_rows(key: jax.Array, count: int, num_epochs: int, num_minibatches: int) -> jax.Array:
    """Which of `count` rows each update takes; every epoch takes each row once.

    Returns:
      `[num_epochs * num_minibatches, count / num_minibatches]` int32.
    """
    epochs = jax.random.split(key, num_epochs)
    rows = jax.vmap(lambda key: jax.random.permutation(key, count))(epochs)
    return rows.reshape(num_epochs * num_minibatches, -1)


def take(samples: Any, rows: jax.Array) -> Any:
    """The samples of some rows: `[B * per_env, ...]` to `[rows, ...]`."""
    return jax.tree.map(lambda x: x[rows], samples)


def take_of_every_env(samples: Any, rows: jax.Array, num_envs: int) -> Any:
    """The same rows of each environment, all of them in `[0, per_env)`: `[B * rows, ...]`."""

    def take(x):
        by_env = x.reshape(num_envs, -1, *x.shape[1:])[:, rows]
        return by_env.reshape(-1, *x.shape[1:])

    return jax.tree.map(take, samples)
