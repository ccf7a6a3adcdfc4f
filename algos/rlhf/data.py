"""Which problem comes when: fresh ones for ever, or a fixed set in another order each epoch.

Both follow from a run's key and its iteration alone: who goes on from a checkpoint meets the same problems in
the same order, at the border of an epoch too.
"""

from typing import Any

import jax
import jax.numpy as jnp


def problems_of(
    env: Any, key: jax.Array, iteration: jax.Array, count: int, size: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """What a task draws the problems of an iteration from: keys, and for a file its rows.

    Args:
      env: a task; `num_rows` says how many rows its file has.
      key: of the run's data.
      iteration: `[]` int32.
      count: problems of an iteration.
      size: problems that there are; None: all rows of a file, else fresh ones.

    Returns:
      Keys `[count]`, and `(numbers [count] int32,)` of rows, or `()`.
    """
    rows = getattr(env, "num_rows", None)
    size = size or (rows if rows is not None and rows >= count else None)
    keys = problem_keys(key, iteration, count, size)
    return keys, () if rows is None or size is None else (problem_numbers(key, iteration, count, size),)


def problem_keys(key: jax.Array, iteration: jax.Array, count: int, size: int | None) -> jax.Array:
    """Keys `[count]` of an iteration's problems.

    Args:
      key: of the run's data.
      iteration: `[]` int32.
      count: problems of an iteration.
      size: problems that there are, each met once an epoch; None for fresh ones.

    >>> key = jax.random.key(0)
    >>> words = lambda i: {tuple(w) for w in jax.random.key_data(problem_keys(key, i, 2, 4)).tolist()}
    >>> words(0) | words(1) == words(2) | words(3), len(words(0) | words(1))
    (True, 4)
    """
    if size is None:
        return jax.random.split(jax.random.fold_in(key, iteration), count)
    of_problems = jax.random.split(key)[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(of_problems, problem_numbers(key, iteration, count, size))


def problem_numbers(key: jax.Array, iteration: jax.Array, count: int, size: int) -> jax.Array:
    """Which of `size` problems an iteration has, `[count] int32`; arguments as for `problem_keys`.

    >>> key = jax.random.key(0)
    >>> sorted(n for i in (0, 1) for n in problem_numbers(key, i, 2, 4).tolist())
    [0, 1, 2, 3]
    """
    first = iteration * count
    epoch, within = first // size, first % size + jnp.arange(count)

    def order(epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), size)

    # A batch ends at most in the epoch after the one that it begins in.
    return jnp.concatenate([order(epoch), order(epoch + 1)])[within]
