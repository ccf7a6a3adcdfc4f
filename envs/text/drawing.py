"""What problems of all kinds share: checks of their fields, and numbers drawn at random."""

from typing import Any

import jax
import jax.numpy as jnp

from fdg.errors import FdgError

_FEWEST = 64  # problems there have to be, so that an eighth can be held out


def whole_number(problem: Any, field: str, low: int, high: int) -> int:
    """The value of a field, which has to be an integer within bounds.

    Raises:
      FdgError: it is not.
    """
    value = getattr(problem, field)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FdgError(
            f"task 'text:{problem.name}': {field}={value!r} must be an integer from {low} to {high}"
        )
    return value


def enough(problem: Any, count: float, fix: str) -> None:
    """Raises an `FdgError` where there are too few problems to hold some out."""
    if count < _FEWEST:
        raise FdgError(
            f"task 'text:{problem.name}': there are only {int(count)} such problems, too few to hold"
            f" some out: {fix}"
        )


def uniform(key: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Integers from `low` to `high`, both included, `[*shape] int32`."""
    count = high + 1 - low
    if count > 2**16:
        return jax.random.randint(key, shape, low, high + 1, jnp.int32)
    # One draw of bits, where `randint` makes two: the bias, below 2e-5, is nothing to notice.
    return low + (jax.random.bits(key, shape, jnp.uint32) % count).astype(jnp.int32)
