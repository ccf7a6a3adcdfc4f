"""From a rollout `[T, B, ...]` to minibatches that leave a split of the environments a split of the samples.

Samples are kept *environment-major*: `[B, T]` flattened, those of one environment side by side. A sample may
be one step, or a sequence of several (`per_env` of them an environment).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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


def updated(
    gradient: Callable[[Any, Any], tuple[Any, Any]],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    parameters: Any,
    optimizer_state: Any,
    rows: jax.Array,
    take: Callable[[jax.Array], Any],
) -> tuple[Any, Any, Any]:
    """One update after another, each on its own minibatch: the epochs of PPO and of PQN.

    Args:
      gradient: `(parameters, minibatch) -> (gradient, losses)`.
      update: `(gradient, optimizer_state, parameters) -> (parameters, optimizer_state)`.
      parameters, optimizer_state: before the first update.
      rows: `[updates, rows]` int32, as of `shuffled_rows`.
      take: the minibatch of some rows, `[rows] -> minibatch`.

    Returns:
      Parameters and optimiser state after the last update, and the means over all updates of the losses.

    >>> gradient = lambda w, x: (x.sum(), {"loss": w})
    >>> update = lambda gradient, count, w: (w + gradient, count + 1)
    >>> rows, samples = jnp.array([[0], [2]]), jnp.array([1.0, 2.0, 4.0])
    >>> w, count, losses = updated(gradient, update, jnp.float32(0), jnp.int32(0), rows, lambda r: samples[r])
    >>> float(w), int(count), float(losses["loss"])  # 0, then 0 + 1, then 1 + 4
    (5.0, 2, 0.5)
    """

    def one_update(carry, some):
        parameters, optimizer_state = carry
        direction, losses = gradient(parameters, take(some))
        return update(direction, optimizer_state, parameters), losses

    (parameters, optimizer_state), losses = jax.lax.scan(one_update, (parameters, optimizer_state), rows)
    return parameters, optimizer_state, jax.tree.map(jnp.mean, losses)
