"""Encodes observations and decodes actions of Gymnasium's spaces; imports neither JAX nor this package.

So workers, which do not import JAX, encode and decode with the same functions as compiled programs. NumPy
arrays become NumPy arrays, JAX arrays JAX arrays. `gymnasium_spaces` describes the encoding.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

_INTEGER_KINDS = "biu"  # NumPy's kinds of dtypes for categorical actions: bool, signed, unsigned

_MAX_CODES = 64  # integers with more possible values are quantities, not codes of categories (`Box.codes`)

TEXTS = ("Text", "MissionSpace")
UNLIMITED_TEXT_LENGTH = 96  # bytes of a text whose space has no limit


_KINDS = ("Box", "Dict", "Discrete", "MissionSpace", "MultiBinary", "MultiDiscrete", "Text", "Tuple")


def kind(space: Any) -> str:
    """The class of `_KINDS` that a space's class is or derives from, or its own name; imports nothing."""
    cls: Any = type(space)
    return _kind_of_class(cls)


@functools.cache
def _kind_of_class(cls: type) -> str:
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in _KINDS), cls.__name__)


def _is_jax(array: Any) -> bool:
    """True for JAX arrays, also while they are traced."""
    return hasattr(array, "aval")


def has_parts(space: Any) -> bool:
    """True for Gymnasium's `Dict` and `Tuple` spaces."""
    return kind(space) in ("Dict", "Tuple")


def encode(space: Any, batch: Any) -> Any:
    """Encodes a batch of observations as `[B, *observation_box.shape]` in that box's dtype, always a copy.

    JAX arrays (with texts as bytes) become a JAX array, also in a compiled program; anything else becomes a
    NumPy array.
    """
    if is_bytes(space):
        return _copy_as(channels_last(batch if _is_jax(batch) else np.asarray(batch), 1), np.uint8)
    if kind(space) in TEXTS:
        return batch if _is_jax(batch) else encode_texts(batch, text_length(space))
    if kind(space) == "Box":
        array = _copy_as(batch, np.int32 if is_codes(space) else np.float32)
        return array.reshape(array.shape[0], *space.shape)
    if kind(space) == "MultiBinary":
        return _copy_as(batch, np.float32).reshape(len(batch), -1)
    columns = subtract_start(space, batch).reshape(len(batch), -1)
    counts = enumerate(num_categories(space) or ())
    one_hots = [columns[:, m, None] == np.arange(n, dtype=np.int32)[None] for m, n in counts]
    return columns.__array_namespace__().concatenate(one_hots, 1).astype(np.float32)


def subtract_start(space: Any, batch: Any) -> Any:
    """Subtracts `start` from categories `[B, *space.shape]` of a `Discrete` or `MultiDiscrete`; int32."""
    start = np.asarray(space.start)[None]
    if _is_jax(batch):  # int32 wraps around on overflow, so the difference is still right
        return batch.astype(np.int32) - start.astype(np.int32)
    return (np.array(batch, np.int64) - start).astype(np.int32)


def _copy_as(batch: Any, dtype: Any) -> Any:
    """A copy in `dtype`: a JAX array of a JAX array, else a NumPy array."""
    return batch.astype(dtype) if _is_jax(batch) else np.array(batch, dtype, order="C")


def encode_parts(space: Any, batch: Any) -> Any:
    """Encodes a batch of a space with parts, or of one of its parts; categories stay integers, from zero."""
    match kind(space):
        case "Dict":
            return {str(key): encode_parts(part, batch[key]) for key, part in space.spaces.items()}
        case "Tuple":
            return tuple(encode_parts(part, batch[i]) for i, part in enumerate(space.spaces))
        case "Discrete":
            return subtract_start(space, batch)
        case "MultiDiscrete":
            return subtract_start(space, batch).reshape(len(batch), math.prod(space.shape))
        case "MultiBinary":
            return batch.astype(np.float32) if _is_jax(batch) else np.array(batch, np.float32)
    return encode(space, batch)


def encode_observation(space: Any, batch: Any) -> Any:
    """Encodes a batch of observations, with parts or without; always a copy."""
    return (encode_parts if has_parts(space) else encode)(space, batch)


def encode_row(space: Any, batch: Any) -> np.ndarray:
    """Encodes a batch of observations as rows of one array `[B, *wire]`; parts become bytes `[B, bytes]`."""
    encoded = encode_observation(space, batch)
    if not has_parts(space):
        return encoded
    rows = [np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in _arrays(encoded)]
    return np.concatenate(rows, axis=1)


def _arrays(encoded: Any) -> Iterator[np.ndarray]:
    """The arrays of an encoded observation, in the order of `jax.tree.leaves`."""
    if not isinstance(encoded, dict | tuple):
        yield encoded
        return
    for part in encoded if isinstance(encoded, tuple) else (encoded[key] for key in sorted(encoded)):
        yield from _arrays(part)


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
    if _is_jax(action):
        if lowest is not None:
            action = action.astype(np.int32) + np.asarray(lowest)[None].astype(np.int32)
        return action.astype(jax_dtype(space.dtype))
    if lowest is not None:  # in the library's dtype, where a sum that wraps around is still right
        return action.astype(space.dtype) + np.asarray(lowest, space.dtype)
    return exact(action, space.dtype, getattr(space, "low", None), getattr(space, "high", None))


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


def num_categories(space: Any) -> tuple[int, ...] | None:
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


def is_bytes(space: Any) -> bool:
    """True for images in uint8, and for other uint8 arrays with the range 0 to 255."""
    if kind(space) != "Box" or space.dtype != np.uint8:
        return False
    return len(space.shape) in (2, 3) or bool((space.low == 0).all() and (space.high == 255).all())


def is_codes(space: Any) -> bool:
    """True for integers with few values (`Box.codes`)."""
    if kind(space) != "Box" or not np.issubdtype(space.dtype, np.integer) or is_bytes(space):
        return False
    limits = np.iinfo(np.int32)
    if not space.low.size or space.low.min() < limits.min or space.high.max() > limits.max:
        return False
    return codes(space.low, space.high) is not None


def codes(low: np.ndarray, high: np.ndarray) -> tuple[tuple[int, int], ...] | None:
    """`envs.Box.codes` for integers with these bounds."""
    if not low.size:
        return None
    channels = low.shape[-1] if low.ndim == 3 else 1
    lowest = low.astype(np.int64).reshape(-1, channels).min(axis=0)
    highest = high.astype(np.int64).reshape(-1, channels).max(axis=0)
    counts = (highest - lowest + 1).tolist()
    return tuple(zip(lowest.tolist(), counts, strict=True)) if max(counts) <= _MAX_CODES else None


def text_length(space: Any) -> int:
    """The most bytes that a text can have: its longest length, in the characters with most bytes."""
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


def channels_last(image: Any, first: int) -> Any:
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
