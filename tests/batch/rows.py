"""Rows of a batch, and valid inputs for operations made from a row."""

import jax
import jax.numpy as jnp

B, F = 8, 6


def matrix(row):
    """A well-conditioned matrix [F, F], symmetric and positive definite."""
    return jnp.outer(row, row) + F * jnp.eye(F)


def square(row):
    """A matrix [F, F] without symmetry, near the identity."""
    return jnp.outer(row, jnp.roll(row, 1)) * 0.1 + jnp.eye(F) + jnp.diag(jnp.arange(F) * 0.1)


def integers(row):
    """Integers 0..7, int32 [F]."""
    return jnp.abs(row * 4).astype(jnp.int32) % 8


def unit(row):
    """Numbers within (0.05, 0.95)."""
    return 0.05 + 0.9 * jax.nn.sigmoid(row)


def positive(row):
    """Numbers above 0.3."""
    return jnp.abs(row) + 0.3
