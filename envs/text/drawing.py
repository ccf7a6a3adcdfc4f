"""Helpers of the problems of text tasks: checks of fields, random integers, held-out problems."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError

_MIN_PROBLEMS = 64  # problems needed to hold out an eighth
_HELD_OUT_DIVISOR = 8  # one in this many problems is held out


def check_integer(problem: Any, field: str, low: int, high: int, value: Any = ...) -> int:
    """A field's value, by default the problem's own; raises unless it is an integer from `low` to `high`."""
    value = getattr(problem, field) if value is ... else value
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FdgError(
            f"task 'text:{problem.name}': {field}={value!r} must be an integer from {low} to {high}"
        )
    return value


def check_num_problems(problem: Any, count: float, fix: str, fewest: int = _MIN_PROBLEMS) -> None:
    """Raises an `FdgError`, which ends with `fix`, if there are too few problems to hold some out."""
    if count < fewest:
        raise FdgError(
            f"task 'text:{problem.name}': there are only {int(count)} such problems, too few to hold"
            f" some out: {fix}"
        )


def uniform(key: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Uniform integers from `low` to `high` inclusive, `[*shape] int32`."""
    count = high + 1 - low
    if count > 2**16:
        return jax.random.randint(key, shape, low, high + 1, jnp.int32)
    # This draws random bits once; `randint` draws them twice. The bias is below 2e-5.
    return low + (jax.random.bits(key, shape, jnp.uint32) % count).astype(jnp.int32)


def is_held_out(identity: jax.Array) -> jax.Array:
    """Whether a problem is in the held-out eighth, `[]` bool, by a hash of its identity (murmur3's mixing).

    `identity` are integers `[P]` that are equal for equal problems (`identity` of a problem class).
    """
    count = identity.shape[0]
    multipliers = (np.arange(1, count + 1, dtype=np.uint64) * 0x9E3779B1 % 2**32).astype(np.uint32) | 1
    mixed = _mix_bits(identity.astype(jnp.uint32) + jnp.uint32(0x85EBCA6B))
    return _mix_bits(jnp.sum(mixed * multipliers, dtype=jnp.uint32)) % _HELD_OUT_DIVISOR == 0


def _mix_bits(x: jax.Array) -> jax.Array:
    """The finalizer of murmur3's 32-bit hash."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
