"""Checks of what a user's functions give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError


def check_same(what: str, before: Any, after: Any, how: str = "", dtypes: bool = True) -> None:
    """Refuses what a user's function gives where structure, shape or dtype are not those of a value.

    Args:
      what: the start of the message, the value's name at its end: "transform gives rows".
      before: arrays, or their shapes, that are as they should be.
      after: what the function gives.
      how: the fix where the structure is another; empty: the structure that is expected.
      dtypes: whether dtypes count.

    Raises:
      FdgError: they differ; names the first leaf that does.

    >>> check_same("it gives x", jnp.zeros(2), jnp.zeros(3))
    Traceback (most recent call last):
    fdg.errors.FdgError: it gives x of shape (3,) and dtype float32: give shape (2,) and dtype float32
    """
    one, other = jax.tree.structure(before), jax.tree.structure(after)
    if str(one) != str(other):
        raise FdgError(f"{what} as {other!s:.200}: give {how or f'the structure {one!s:.200}'}")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        found, expected = ((np.shape(leaf), jnp.result_type(leaf)) for leaf in (y, x))
        if found != expected and (dtypes or found[0] != expected[0]):
            raise FdgError(
                f"{what}{jax.tree_util.keystr(path)} of shape {found[0]} and dtype {found[1]}:"
                f" give shape {expected[0]} and dtype {expected[1]}"
            )
