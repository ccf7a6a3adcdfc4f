"""Rows of a batch, and what operations ask of their numbers."""

import jax
import jax.numpy as jnp

B, F = 8, 6


def matrix(row):
    """A well-conditioned [F, F] of a row, symmetric and positive."""
    return jnp.outer(row, row) + F * jnp.eye(F)


def square(row):
    """A matrix [F, F] without symmetry, near the identity."""
    return jnp.outer(row, jnp.roll(row, 1)) * 0.1 + jnp.eye(F) + jnp.diag(jnp.arange(F) * 0.1)


def whole(row):
    """Integers 0..7 of a row, int32 [F]."""
    return jnp.abs(row * 4).astype(jnp.int32) % 8


def unit(row):
    """Numbers within (0.05, 0.95) of a row."""
    return 0.05 + 0.9 * jax.nn.sigmoid(row)


def positive(row):
    """Numbers above 0.3 of a row."""
    return jnp.abs(row) + 0.3
