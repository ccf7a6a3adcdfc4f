"""The order of problems: fresh ones, or a fixed set shuffled in each epoch.

Both depend only on a run's key and its iteration, so a resumed run gets the same problems in the same order.
"""

from typing import Any

import jax
import jax.numpy as jnp


def problems_of(
    env: Any, key: jax.Array, iteration: jax.Array, count: int, size: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The keys of an iteration's problems, and the rows of a file.

    Args:
      env: a task; `num_rows` is the number of rows of its file.
      key: of the run's data.
      iteration: `[]` int32.
      count: problems of an iteration.
      size: the number of problems; None for all rows of a file, or fresh ones.

    Returns:
      Keys `[count]`, and `(row numbers [count] int32,)` or `()`.
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
      size: the number of problems, each used once in an epoch; None for fresh ones.

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
    """The numbers of an iteration's problems out of `size`, `[count] int32`; arguments as for `problem_keys`.

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
