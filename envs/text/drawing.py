"""Helpers of text problems: checks of fields, random integers, the held-out split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError

_MIN_PROBLEMS = 64  # smallest number of problems that can be split
_SPLIT_RATIO = 8  # one in this many problems is held out


def check_integer(problem: Any, field: str, low: int, high: int, value: Any = ...) -> int:
    """Checks that a field, or `value` in its place, is an integer within bounds; returns it."""
    value = getattr(problem, field) if value is ... else value
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FdgError(
            f"task 'text:{problem.name}': {field}={value!r} must be an integer from {low} to {high}"
        )
    return value


def check_num_problems(problem: Any, count: float, fix: str, min_problems: int = _MIN_PROBLEMS) -> None:
    """Raises an `FdgError` if there are too few problems to hold some out."""
    if count < min_problems:
        raise FdgError(
            f"task 'text:{problem.name}': there are only {int(count)} such problems, too few to hold"
            f" some out: {fix}"
        )


def uniform(key: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Uniform integers from `low` to `high` inclusive, `[*shape] int32`."""
    count = high + 1 - low
    if count > 2**16:
        return jax.random.randint(key, shape, low, high + 1, jnp.int32)
    # `randint` draws bits twice; this draws them once, with a bias below 2e-5.
    return low + (jax.random.bits(key, shape, jnp.uint32) % count).astype(jnp.int32)


def is_held_out(identity: jax.Array) -> jax.Array:
    """True for the eighth of the problems that is held out, by a hash of their numbers (murmur3's mixing)."""
    size = identity.shape[0]
    odd_factors = (np.arange(1, size + 1, dtype=np.uint64) * 0x9E3779B1 % 2**32).astype(np.uint32) | 1
    mixed = _mix(identity.astype(jnp.uint32) + jnp.uint32(0x85EBCA6B))
    return _mix(jnp.sum(mixed * odd_factors, dtype=jnp.uint32)) % _SPLIT_RATIO == 0


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
