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

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.families import family
from envs.gymnasium_worker import kind
from envs.spaces import Box, Discrete, MultiDiscrete, Space, bound
from fdg.errors import FdgError

# The highest code of each channel of a map: object type; colour; state, or an agent's direction
# (Chevalier-Boisvert et al. 2023, arXiv 2306.13831; minigrid's core/constants.py).
_MINIGRID_CODES = (10, 5, 3)
_MIN_IMAGE_SIZE = 36  # smaller arrays are maps of cells, larger ones images that a wrapper renders

_INTEGER_KINDS = "biu"  # NumPy's kinds of dtypes for categorical actions: bool, signed, unsigned

_MAX_CATEGORIES = 2**20  # of one observation, or of one action

_TEXTS = ("Text", "MissionSpace")  # kinds of spaces of texts
UNLIMITED_TEXT_LENGTH = 96  # bytes of a text whose space has no limit


def observation_box(name: str, space: Any) -> Box:
    """The `Box` of an encoded observation; `space` has no parts."""
    if _is_bytes(space):
        low, high = (_channels_last(np.asarray(limit), 0) for limit in (space.low, space.high))
        if family(name) == "minigrid" and low.shape[2:] == (3,) and min(low.shape[:2]) < _MIN_IMAGE_SIZE:
            high = np.minimum(high, _MINIGRID_CODES)
        return Box(bound(low), bound(high), low.shape, "uint8")
    if kind(space) in _TEXTS:
        return Box(0.0, 255.0, (text_length(space),), "uint8")
    if _is_codes(space):
        return Box(bound(space.low), bound(space.high), tuple(space.shape), "int32")
    if kind(space) == "Box":
        return Box(bound(_low(space)), bound(space.high), tuple(space.shape))
    if (counts := _num_categories(space)) is None:
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


def encode(space: Any, batch: Any) -> Any:
    """Encodes a batch of observations as `[B, *observation_box.shape]` in that box's dtype, always a copy.

    JAX arrays (with texts as bytes) become a JAX array, also in a compiled program; anything else becomes a
    NumPy array.
    """
    if _is_bytes(space):
        return _copy_as(
            _channels_last(batch if isinstance(batch, jax.Array) else np.asarray(batch), 1), np.uint8
        )
    if kind(space) in _TEXTS:
        return batch if isinstance(batch, jax.Array) else encode_texts(batch, text_length(space))
    if kind(space) == "Box":
        array = _copy_as(batch, np.int32 if _is_codes(space) else np.float32)
        return array.reshape(array.shape[0], *space.shape)
    if kind(space) == "MultiBinary":
        return _copy_as(batch, np.float32).reshape(len(batch), -1)
    columns = subtract_start(space, batch).reshape(len(batch), -1)
    counts = enumerate(_num_categories(space) or ())
    one_hots = [columns[:, m, None] == np.arange(n, dtype=np.int32)[None] for m, n in counts]
    return (jnp if isinstance(columns, jax.Array) else np).concatenate(one_hots, 1).astype(np.float32)


def subtract_start(space: Any, batch: Any) -> Any:
    """Subtracts `start` from categories `[B, *space.shape]` of a `Discrete` or `MultiDiscrete`; int32."""
    start = np.asarray(space.start)[None]
    if isinstance(batch, jax.Array):  # int32 wraps around on overflow, so the difference is still right
        return batch.astype(jnp.int32) - start.astype(np.int32)
    return (np.array(batch, np.int64) - start).astype(np.int32)


def _copy_as(batch: Any, dtype: Any) -> Any:
    """A copy in `dtype`: a JAX array of a JAX array, else a NumPy array."""
    return batch.astype(dtype) if isinstance(batch, jax.Array) else np.array(batch, dtype, order="C")


def action_space(name: str, space: Any) -> Space:
    """The space of actions for `decode`: the concatenated parts of a `Dict` or `Tuple`."""
    parts = [part for part, _ in leaves(space)]
    part_counts = [_num_categories(part) for part in parts]
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


def decode(space: Any, action: Any) -> Any:
    """Converts actions `[B, ...]` of `action_space` to the library's format: arrays `[B, ...]`, or parts.

    A JAX array becomes JAX arrays, in the nearest dtypes that JAX has; see `exact`.
    """
    if kind(space) in ("Dict", "Tuple"):
        ends = np.cumsum([math.prod(part.shape) for part, _ in leaves(space)]).tolist()
        columns = [action[:, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return _rebuild(space, iter(columns))
    action = action.reshape(action.shape[0], *space.shape)
    is_integer = kind(space) == "Box" and space.dtype.kind in _INTEGER_KINDS
    lowest = space.low if is_integer else getattr(space, "start", None)
    if isinstance(action, jax.Array):
        if lowest is not None:
            action = action.astype(jnp.int32) + np.asarray(lowest)[None].astype(np.int32)
        return action.astype(jax_dtype(space.dtype))
    if lowest is not None:  # in the library's dtype, where a sum that wraps around is still right
        return action.astype(space.dtype) + np.asarray(lowest, space.dtype)
    return exact(action, space.dtype, getattr(space, "low", None), getattr(space, "high", None))


def encode_action(space: Any, action: Any) -> np.ndarray:
    """The inverse of `decode` for NumPy arrays: the library's actions as those of `action_space`."""
    parts = [(part, np.asarray(values)) for part, values in leaves(space, action)]
    columns = []
    for part, values in parts:
        lowest = part.low if kind(part) == "Box" else getattr(part, "start", 0)
        is_integer = _num_categories(part) is not None
        columns.append((values.astype(np.int64) - lowest).astype(np.int32) if is_integer else values)
    if kind(space) == "Discrete" or (kind(space) == "Box" and _num_categories(space) is None):
        return columns[0]
    return np.concatenate([values.reshape(len(values), -1) for values in columns], axis=1)


def exact(action: np.ndarray, dtype: Any, low: Any, high: Any) -> np.ndarray:
    """Casts actions to a library's dtype; a bound that float32 has rounded becomes exact again."""
    if dtype == np.float64:
        for end in (low, high):
            action = np.where(action == np.asarray(end, np.float32), end, action)
    return action.astype(dtype)


def jax_dtype(dtype: Any) -> str:
    """The dtype in JAX for another dtype; JAX has no 64 bits unless they are enabled."""
    name = np.dtype(dtype).name
    return name.replace("64", "32") if name in ("int64", "uint64", "float64") else name


def select(batch: Any, index: Any) -> Any:
    """Selects rows of a batch from `decode`; a number as `index` selects one element."""
    if isinstance(batch, dict):
        return {key: select(part, index) for key, part in batch.items()}
    return tuple(select(part, index) for part in batch) if isinstance(batch, tuple) else batch[index]


def _num_categories(space: Any) -> tuple[int, ...] | None:
    """The number of categories of each component of a space without parts; None for floats."""
    match kind(space):
        case "Discrete":
            return (int(space.n),)
        case "MultiDiscrete":
            return tuple(map(int, space.nvec.ravel()))
        case "MultiBinary":
            return (2,) * math.prod(space.shape)
        case "Box" if space.dtype.kind in _INTEGER_KINDS:
            ends = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
            return tuple(high - low + 1 for low, high in ends)
    return None


def _rebuild(space: Any, columns: Iterator[np.ndarray]) -> Any:
    """Rebuilds a batch with the parts of a space, from the columns `[B, size]` of each part."""
    if kind(space) == "Dict":
        return {key: _rebuild(part, columns) for key, part in space.spaces.items()}
    if kind(space) == "Tuple":
        return tuple(_rebuild(part, columns) for part in space.spaces)
    return decode(space, next(columns))


def _is_bytes(space: Any) -> bool:
    """True for images in uint8, and for other uint8 arrays with the range 0 to 255."""
    if kind(space) != "Box" or space.dtype != np.uint8:
        return False
    return len(space.shape) in (2, 3) or bool((space.low == 0).all() and (space.high == 255).all())


def _is_codes(space: Any) -> bool:
    """True for integers with few values (`Box.codes`)."""
    if kind(space) != "Box" or not np.issubdtype(space.dtype, np.integer) or _is_bytes(space):
        return False
    limits = np.iinfo(np.int32)
    if not space.low.size or space.low.min() < limits.min or space.high.max() > limits.max:
        return False
    return Box(bound(space.low), bound(space.high), tuple(space.shape), "int32").codes is not None


def text_length(space: Any) -> int:
    """The most bytes of a text: its greatest length times the most bytes of a character (in UTF-8)."""
    max_bytes = max((len(c.encode()) for c in getattr(space, "character_set", ())), default=1)
    return int(getattr(space, "max_length", UNLIMITED_TEXT_LENGTH)) * max_bytes


def encode_texts(texts: Any, length: int) -> np.ndarray:
    """Texts as bytes, `[..., length]` uint8, zero-padded; longer ones are cut.

    >>> encode_texts("go", 3).tolist(), encode_texts(["go"], 1).tolist()
    ([103, 111, 0], [[103]])
    """
    if isinstance(texts, str):
        return encode_texts([texts], length)[0]
    rows = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        text_bytes = np.frombuffer(str(text).encode()[:length], np.uint8)
        row[: len(text_bytes)] = text_bytes
    return rows


def _channels_last(image: Any, first: int) -> Any:
    """Converts images `[C, H, W]`, from axis `first` on, to `[H, W, C]`; others are unchanged."""
    shape = image.shape[first:]
    if len(shape) != 3 or shape[0] >= min(shape[1:]):
        return image
    return image.transpose(*range(first), first + 1, first + 2, first)


def leaves(space: Any, batch: Any = None) -> Iterator[tuple[Any, Any]]:
    """The leaf spaces of a space, each with its part of a batch (None: without batch)."""
    if kind(space) not in ("Dict", "Tuple"):
        yield space, batch
        return
    parts = space.spaces.items() if kind(space) == "Dict" else enumerate(space.spaces)
    for key, part in parts:
        yield from leaves(part, None if batch is None else batch[key])


def _low(space: Any) -> np.ndarray:
    """Lower bounds. EnvPool uses the smallest positive number (C++'s `numeric_limits::min`) for no bound."""
    if not np.issubdtype(space.dtype, np.floating):
        return space.low
    return np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)
