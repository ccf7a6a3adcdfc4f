"""Errors in traced code: the user's line, what JAX cannot do there, and the fix."""

import contextlib
import dataclasses
import linecache
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg.arguments import quoted
from fdg.errors import FdgError, GraphError, NoAttributeError, one_line, text_of, user_frame

# By type of error, specific types first: the mistake, and an alternative that can be traced.
_BY_TYPE: Mapping[type[Exception], tuple[str, str]] = {
    jax.errors.TracerBoolConversionError: (
        "Python's if, while, and, or, not (or bool, min, max) needs the unknown number of a traced value",
        "use jnp.where, jax.lax.cond or jax.lax.while_loop, and &, |, ~ for and, or, not",
    ),
    jax.errors.TracerArrayConversionError: (
        "NumPy was given a traced value, whose numbers are not known yet",
        "use jax.numpy (jnp) there",
    ),
    jax.errors.TracerIntegerConversionError: (
        "a traced value is used as a Python integer, say to index a list or as a length",
        "index an array (jnp.stack the list), and take lengths from shapes",
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "an array is indexed by a traced mask, so its length is not known",
        "use jnp.where(mask, x, other), or a sum weighted by the mask",
    ),
    jax.errors.ConcretizationTypeError: (
        "Python needs the number of a traced value (float, int, range, or a shape made from it)",
        "keep it an array (jnp); a size has to be a Python integer: store it in a field",
    ),
    jax.errors.UnexpectedTracerError: (
        "a traced value was stored outside the traced function, and used after its trace",
        "return it, or carry it in the state; assign nothing to self or to globals while tracing",
    ),
    dataclasses.FrozenInstanceError: (
        "a field of a frozen dataclass is assigned",
        "put values that change into the state, which the method takes and returns; constants into fields",
    ),
}

_NOT_AN_ARRAY = (  # the mistake, and an alternative
    "JAX was given a value that is not an array",
    "keep strings, functions and objects elsewhere: in fields of the class, or in globals",
)
# Errors that JAX raises as a plain TypeError, by words of their message; comments name the user's code.
_BY_WORDS: Mapping[str, tuple[str, str]] = {
    "concrete values of integer type": _BY_TYPE[jax.errors.ConcretizationTypeError],  # in a shape
    "Only integer scalar arrays can be converted": _BY_TYPE[jax.errors.TracerIntegerConversionError],  # range
    "Error interpreting argument to": _NOT_AN_ARRAY,
    "is not a valid JAX": _NOT_AN_ARRAY,
    "but was given a PRNG key": (
        "a random key is in the place of a seed",
        "use the key as it is, or jax.random.split it",
    ),
}


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """A context that turns errors in traced code into a one-line `GraphError`.

    `what` is the name of the traced function, such as `Mine.iterate`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FdgError | MemoryError) and not isinstance(error, NoAttributeError):
            raise
        matches = [entry for error_type, entry in _BY_TYPE.items() if isinstance(error, error_type)]
        matches += [entry for words, entry in _BY_WORDS.items() if words in text_of(error)]
        if not matches:
            text = one_line(error) + _space_text(error)
            raise GraphError(f"{what}{line_of(error)} raises {text}") from error
        cause, fix = matches[0]
        raise GraphError(f"{what}{line_of(error)}: {cause}: {fix}") from error


def line_of(error: BaseException) -> str:
    """The innermost line of user code that led to an error, such as `, line 3 of maze.py (...)`."""
    position = user_frame(error)
    if position is None:
        return ""
    frame, number = position
    return line_text(frame.f_code.co_filename, number, frame.f_globals)


def line_text(file: str, number: int, names: dict[str, Any] | None = None) -> str:
    """A line of a file for messages; `names` are the globals of code without a file."""
    line = linecache.getline(file, number, names).strip()
    return f", line {number} of {Path(file).name}" + (f" (`{line:.100}`)" if line else "")


def _space_text(error: Exception) -> str:
    """The end of a message about an attribute that an environment's space lacks; "" for other errors."""
    space = (
        getattr(error, "owner", getattr(error, "obj", None)) if isinstance(error, AttributeError) else None
    )
    if not type(space).__module__.startswith("envs.") or isinstance(space, type):
        return ""
    return f": it is {space!r:.200}, and the code is for another kind of space"


def check_arrays(what: str, tree: Any, name: str = "state") -> None:
    """Raises `GraphError` unless all leaves of a pytree, which messages call `name`, are arrays.

    `what` is the name of the function that returned it, such as `Mine.init`.
    """
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
    except Exception as error:  # a user's container may raise anything
        raise GraphError(
            f"{what}{line_of(error)} returns a {name} that JAX cannot flatten: {one_line(error)}: use dict"
            " keys of one type, and no container that contains itself"
        ) from error
    for path, leaf in leaves:
        where = f"{what} returns {name}{jax.tree_util.keystr(path)}"
        if not is_array(leaf):
            kind = "an array of" if isinstance(leaf, np.ndarray) else "the"
            type_text = leaf.dtype if isinstance(leaf, np.ndarray) else type(leaf).__name__
            raise GraphError(
                f"{where} as {kind} {type_text} {quoted(leaf)}, which is not a JAX array: leave it out, or"
                " make it a field of the algorithm"
            )
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            try:
                jnp.asarray(leaf)
            except OverflowError:
                raise GraphError(
                    f"{where} as {leaf}, which does not fit 32 bits: use a smaller number, or a float"
                ) from None


def is_array(value: Any) -> bool:
    """Whether a leaf is an array, or a Python number, which becomes one."""
    if isinstance(value, bool | int | float | complex):
        return True
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return False
    try:
        jax.typeof(value)
    except (TypeError, ValueError):  # arrays of strings, objects or dates; masked arrays
        return False
    return True
