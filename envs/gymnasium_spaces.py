"""Converts Gymnasium's spaces, which several libraries use, and batches of their elements to ours.

A batch of elements is an array `[B, ...]`, or a dictionary or tuple of arrays for a space with parts.

- Bytes stay uint8, which networks scale. They are images (two or three axes; channels are moved last if the
shortest axis is first), or uint8 arrays with the range 0 to 255, such as a console's memory.
- Integers with few values stay integers: they are codes (`envs.Box.codes`), which networks see one-hot. Maps
of MiniGrid and BabyAI, declared as bytes, get the range of their codes.
- Any other array is float32.
- A text becomes its bytes, zero-padded.
- Categories become one-hot, and bits a vector, `[n]` float32.

`gymnasium_parts` converts observations with parts.
"""

from typing import Any

import numpy as np

from envs.families import family
from envs.gymnasium_codec import (
    TEXTS,
    channels_last,
    is_bytes,
    is_codes,
    kind,
    leaves,
    num_categories,
    text_length,
)
from envs.gymnasium_codec import UNLIMITED_TEXT_LENGTH as UNLIMITED_TEXT_LENGTH
from envs.gymnasium_codec import decode as decode
from envs.gymnasium_codec import encode as encode
from envs.gymnasium_codec import encode_texts as encode_texts
from envs.gymnasium_codec import exact as exact
from envs.gymnasium_codec import jax_dtype as jax_dtype
from envs.gymnasium_codec import select as select
from envs.spaces import Box, Discrete, MultiDiscrete, Space, bound
from fdg.errors import FdgError

# The highest code of each channel of a map: object type; colour; state, or an agent's direction
# (Chevalier-Boisvert et al. 2023, arXiv 2306.13831; minigrid's core/constants.py).
_MINIGRID_CODES = (10, 5, 3)
_MIN_IMAGE_SIZE = 36  # smaller arrays are maps of cells, larger ones images that a wrapper renders

_MAX_CATEGORIES = 2**20  # of one observation, or of one action


def observation_box(name: str, space: Any) -> Box:
    """The `Box` of an encoded observation; `space` has no parts."""
    if is_bytes(space):
        low, high = (channels_last(np.asarray(limit), 0) for limit in (space.low, space.high))
        if family(name) == "minigrid" and low.shape[2:] == (3,) and min(low.shape[:2]) < _MIN_IMAGE_SIZE:
            high = np.minimum(high, _MINIGRID_CODES)
        return Box(bound(low), bound(high), low.shape, "uint8")
    if kind(space) in TEXTS:
        return Box(0.0, 255.0, (text_length(space),), "uint8")
    if is_codes(space):
        return Box(bound(space.low), bound(space.high), tuple(space.shape), "int32")
    if kind(space) == "Box":
        return Box(bound(_low(space)), bound(space.high), tuple(space.shape))
    if (counts := num_categories(space)) is None:
        raise FdgError(
            f"environment '{name}': its observations hold a {space}, which is not an array of numbers:"
            " wrap it to give arrays of numbers"
        )
    size = len(counts) if kind(space) == "MultiBinary" else sum(counts)
    _check_categories(f"environment '{name}': its observations hold a {space}", "input", size)
    return Box(0.0, 1.0, (size,))


def _check_categories(subject: str, end: str, count: int) -> None:
    """Raises an `FdgError` if there are too many categories; `end` is "input" or "output"."""
    if count > _MAX_CATEGORIES:
        raise FdgError(
            f"{subject}, whose {count:,} categories would each be an {end} of the network (at most"
            f" {_MAX_CATEGORIES:,}): wrap it to give digits, or a Box of floats"
        )


def action_space(name: str, space: Any) -> Space:
    """The space of actions for `decode`: the concatenated parts of a `Dict` or `Tuple`."""
    parts = [part for part, _ in leaves(space)]
    part_counts = [num_categories(part) for part in parts]
    if all(part_counts):
        counts = [n for part in part_counts for n in part or ()]
        _check_categories(f"environment '{name}': its actions are {space}", "output", sum(counts))
        return Discrete(counts[0]) if kind(space) == "Discrete" else MultiDiscrete(tuple(counts))
    if any(kind(part) != "Box" and not counts for part, counts in zip(parts, part_counts, strict=True)):
        raise FdgError(
            f"environment '{name}': its actions are {space}, neither categories nor arrays of numbers: wrap"
            " it to take Discrete, MultiDiscrete, MultiBinary or Box actions"
        )
    if any(part_counts):
        raise FdgError(
            f"environment '{name}': its actions are {space}, categories and floats together: wrap it so that"
            " all are discrete or all are floats, for example by discretising the floats"
        )
    if len(parts) == 1 and kind(space) == "Box":
        return Box(bound(_low(space)), bound(space.high), tuple(space.shape))
    low, high = (
        np.concatenate(side) for side in zip(*[(_low(p).ravel(), p.high.ravel()) for p in parts], strict=True)
    )
    return Box(bound(low), bound(high), low.shape)


def encode_action(space: Any, action: Any) -> np.ndarray:
    """The inverse of `decode` for NumPy arrays: the library's actions as those of `action_space`."""
    parts = [(part, np.asarray(values)) for part, values in leaves(space, action)]
    columns = []
    for part, values in parts:
        lowest = part.low if kind(part) == "Box" else getattr(part, "start", 0)
        is_integer = num_categories(part) is not None
        columns.append((values.astype(np.int64) - lowest).astype(np.int32) if is_integer else values)
    if kind(space) == "Discrete" or (kind(space) == "Box" and num_categories(space) is None):
        return columns[0]
    return np.concatenate([values.reshape(len(values), -1) for values in columns], axis=1)


def _low(space: Any) -> np.ndarray:
    """Lower bounds. EnvPool uses the smallest positive number (C++'s `numeric_limits::min`) for no bound."""
    if not np.issubdtype(space.dtype, np.floating):
        return space.low
    return np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)
