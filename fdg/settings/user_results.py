"""Checks that a result of a user's function has the expected structure, shapes and dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError, structure_of


def check_same(what: str, before: Any, after: Any, how: str = "", dtypes: bool = True) -> None:
    """Raises `FdgError` unless `after`, a user's result, has the structure, shapes and dtypes of `before`.

    With `dtypes=False`, dtypes may differ. `what` begins the message. `how` ends it if the structure differs,
    and says what to give ("": the structure of `before`).

    >>> check_same("it gives x", jnp.zeros(2), jnp.zeros(3))
    Traceback (most recent call last):
    fdg.errors.FdgError: it gives x of shape (3,) and dtype float32: give shape (2,) and dtype float32
    """
    structure_before, structure_after = jax.tree.structure(before), jax.tree.structure(after)
    if str(structure_before) != str(structure_after):
        fix = how or f"the structure {structure_of(before):.200}"
        raise FdgError(f"{what} as {structure_of(after):.200}: give {fix}")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        actual, expected = ((np.shape(leaf), jnp.result_type(leaf)) for leaf in (y, x))
        if actual != expected and (dtypes or actual[0] != expected[0]):
            raise FdgError(
                f"{what}{jax.tree_util.keystr(path)} of shape {actual[0]} and dtype {actual[1]}:"
                f" give shape {expected[0]} and dtype {expected[1]}"
            )
