"""Gymnasium's spaces, which several libraries speak, as spaces of ours; and batches of their elements.

A batch of elements is an array `[B, ...]`, or a dictionary or tuple of such for a space that has parts.

- Bytes stay uint8, which networks scale: images (two or three axes), their channels moved last where the
  shortest axis is first; and any array of them whose range is all of 0 to 255, such as a console's memory.
- Integers of few values stay integers, for they are codes (`envs.Box.codes`), which networks see one-hot. The
  maps of MiniGrid and BabyAI, whose spaces say bytes, get the range that their codes have.
- Any other array is float32.
- A text is its bytes, zeros behind.
- A category, several of them, or bits, are one-hot, `[n]` float32.
- What has parts is one vector, `[sum of sizes]` float32: the parts in the space's order. (`gymnasium_parts`
  keeps them apart.)
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from envs.families import family
from envs.spaces import Box, Discrete, MultiDiscrete, Space, bound
from fdg.errors import FdgError

# Of each cell the kind of thing, its colour, and its state, or an agent's direction (Chevalier-Boisvert et
# al. 2023, arXiv 2306.13831; the highest of each in minigrid's core/constants.py).
_MINIGRID_CODES = (10, 5, 3)
_PICTURE = 36  # pixels: a wrapper's, of what else is a map

_TEXTS = ("Text", "MissionSpace")
_TEXT_LENGTH = 96  # bytes, of a text whose space does not say


class Facts(NamedTuple):
    """What is known of a library's environment before it runs."""

    library_observation_space: Any
    library_action_space: Any
    observation_space: Box
    action_space: Space
    max_episode_steps: int | None


def facts(name: str, observed: Any, acting: Any, max_episode_steps: int | None) -> Facts:
    """Facts about environment `name`, given Gymnasium's spaces of observations and of actions.

    Raises:
      FdgError: as `observation_box` and `action_space`.
    """
    return Facts(
        observed, acting, observation_box(name, observed), action_space(name, acting), max_episode_steps
    )


def observation_box(name: str, space: Any) -> Box:
    """The box of an encoded observation.

    Raises:
      FdgError: the space of environment `name` has a part that is no array of fixed shape, such as a text.
    """
    if _is_bytes(space):
        low, high = (_channels_last(np.asarray(b), 0) for b in (space.low, space.high))
        if family(name) == "minigrid" and low.shape[2:] == (3,) and min(low.shape[:2]) < _PICTURE:
            high = np.minimum(high, _MINIGRID_CODES)
        return Box(bound(low), bound(high), low.shape, "uint8")
    if _kind(space) in _TEXTS:
        return Box(0.0, 255.0, (_text_length(space),), "uint8")
    if _is_codes(space):
        return Box(bound(space.low), bound(space.high), tuple(space.shape), "int32")
    if _kind(space) == "Box":
        return Box(bound(_low(space)), bound(space.high), tuple(space.shape))
    bounds = [_bounds(name, part) for part, _ in _parts(space, None)]
    low, high = (np.concatenate(side) for side in zip(*bounds, strict=True))
    return Box(bound(low), bound(high), low.shape)


def encode(space: Any, batch: Any) -> np.ndarray:
    """A batch of observations as `[B, *observation_box.shape]`, always a copy."""
    if _is_bytes(space):
        return np.array(_channels_last(np.asarray(batch), 1), np.uint8, order="C")
    if _kind(space) in _TEXTS:
        return _as_bytes(batch, _text_length(space))
    if _kind(space) == "Box":
        array = np.array(batch, np.int32 if _is_codes(space) else np.float32)
        return array.reshape(len(array), *space.shape)
    return np.concatenate([_vectors(part, np.asarray(values)) for part, values in _parts(space, batch)], 1)


def action_space(name: str, space: Any) -> Space:
    """The space of actions that `decode` takes: the parts of a `Dict` or `Tuple` side by side.

    Raises:
      FdgError: actions of environment `name` are neither categories nor numbers, or both together.
    """
    parts = [part for part, _ in _parts(space, None)]
    choices = [_choices(part) for part in parts]
    if all(choices):
        numbers = [n for part in choices for n in part or ()]
        return Discrete(numbers[0]) if _kind(space) == "Discrete" else MultiDiscrete(tuple(numbers))
    if any(_kind(part) != "Box" and not numbers for part, numbers in zip(parts, choices, strict=True)):
        raise FdgError(
            f"environment '{name}': its actions are {space}: give categories, or arrays of numbers"
        )
    if any(choices):
        raise FdgError(
            f"environment '{name}': its actions are {space}, categories and floats together: wrap it so that"
            " they are all one or the other, say with the floats in bins"
        )
    if len(parts) == 1 and _kind(space) == "Box":
        return Box(bound(_low(space)), bound(space.high), tuple(space.shape))
    low, high = (
        np.concatenate(side) for side in zip(*[(_low(p).ravel(), p.high.ravel()) for p in parts], strict=True)
    )
    return Box(bound(low), bound(high), low.shape)


def decode(space: Any, action: np.ndarray) -> Any:
    """Actions `[B, ...]` of `action_space` as the library takes them: arrays `[B, ...]`, in parts if it has.

    A bound that float32 cannot hold is the library's own again.
    """
    if _kind(space) in ("Dict", "Tuple"):
        sizes = [math.prod(part.shape) for part, _ in _parts(space, None)]
        columns = np.split(action, np.cumsum(sizes)[:-1], axis=1)
        return _rebuilt(space, iter(columns))
    action = action.reshape(len(action), *space.shape)
    match _kind(space):
        case "Discrete" | "MultiDiscrete":
            return (action + space.start).astype(space.dtype)
        case "Box" if np.issubdtype(space.dtype, np.integer):
            return (action.astype(np.int64) + space.low).astype(space.dtype)
        case "Box" if space.dtype == np.float64:
            for end in (space.low, space.high):
                action = np.where(action == end.astype(np.float32), end, action)
    return action.astype(space.dtype)


def rows(batch: Any, chosen: Any) -> Any:
    """Rows of a batch of `decode`; a number for `chosen` gives one element."""
    if isinstance(batch, dict):
        return {key: rows(part, chosen) for key, part in batch.items()}
    return tuple(rows(part, chosen) for part in batch) if isinstance(batch, tuple) else batch[chosen]


def _choices(space: Any) -> tuple[int, ...] | None:
    """The number of categories of each component of a space without parts; None where they are floats."""
    match _kind(space):
        case "Discrete":
            return (int(space.n),)
        case "MultiDiscrete":
            return tuple(map(int, space.nvec.ravel()))
        case "MultiBinary":
            return (2,) * math.prod(space.shape)
        case "Box" if np.issubdtype(space.dtype, np.integer):
            ends = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
            return tuple(high - low + 1 for low, high in ends)
    return None


def _rebuilt(space: Any, columns: Iterator[np.ndarray]) -> Any:
    """The parts of a space's elements `[B, ...]` from columns `[B, size]`, one for each."""
    if _kind(space) == "Dict":
        return {key: _rebuilt(part, columns) for key, part in space.spaces.items()}
    if _kind(space) == "Tuple":
        return tuple(_rebuilt(part, columns) for part in space.spaces)
    return decode(space, next(columns))


def _kind(space: Any) -> str:
    """The name of a space's class; by name, so that no library need be imported."""
    return type(space).__name__


def _is_bytes(space: Any) -> bool:
    if _kind(space) != "Box" or space.dtype != np.uint8:
        return False
    return len(space.shape) in (2, 3) or bool((space.low == 0).all() and (space.high == 255).all())


def _is_codes(space: Any) -> bool:
    """Whether these are integers of few values (`Box.codes`)."""
    if _kind(space) != "Box" or not np.issubdtype(space.dtype, np.integer) or _is_bytes(space):
        return False
    limits = np.iinfo(np.int32)
    if not space.low.size or space.low.min() < limits.min or space.high.max() > limits.max:
        return False
    return Box(bound(space.low), bound(space.high), tuple(space.shape), "int32").codes is not None


def _text_length(space: Any) -> int:
    return int(getattr(space, "max_length", _TEXT_LENGTH))


def _as_bytes(texts: Any, length: int) -> np.ndarray:
    """Texts `[B]` as `[B, length]` uint8."""
    rows = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        written = np.frombuffer(str(text).encode()[:length], np.uint8)
        row[: len(written)] = written
    return rows


def _channels_last(image: np.ndarray, first: int) -> np.ndarray:
    """Axes from `first` on are those of an image: `[C, H, W]` becomes `[H, W, C]`, others stay."""
    shape = image.shape[first:]
    return np.moveaxis(image, first, -1) if len(shape) == 3 and shape[0] < min(shape[1:]) else image


def _parts(space: Any, batch: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a space that have none, each with its part of a batch (None: of no batch)."""
    if _kind(space) not in ("Dict", "Tuple"):
        yield space, batch
        return
    inner = space.spaces.items() if _kind(space) == "Dict" else enumerate(space.spaces)
    for key, part in inner:
        yield from _parts(part, None if batch is None else batch[key])


def _low(space: Any) -> np.ndarray:
    """Lower bounds. The smallest positive number (C++'s `numeric_limits::min`) is EnvPool's for no bound."""
    if not np.issubdtype(space.dtype, np.floating):
        return space.low
    return np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)


def _bounds(name: str, space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest components of the vector of a part."""
    match _kind(space):
        case "Box":
            return _low(space).reshape(-1), space.high.reshape(-1)
        case "Text" | "MissionSpace":
            return np.zeros(_text_length(space)), np.full(_text_length(space), 255.0)
        case "Discrete" | "MultiDiscrete" | "MultiBinary":
            counts = _choices(space) or ()
            size = len(counts) if _kind(space) == "MultiBinary" else sum(counts)
            return np.zeros(size), np.ones(size)
    raise FdgError(f"environment '{name}': its observations hold a {space}, which is no array of numbers")


def _vectors(space: Any, values: np.ndarray) -> np.ndarray:
    """The part of a batch that belongs to a part of a space, as vectors `[B, size]` float32."""
    if _kind(space) in _TEXTS:
        return _as_bytes(values, _text_length(space)).astype(np.float32)
    values = values.reshape(len(values), -1)
    match _kind(space):
        case "Discrete":
            return np.eye(int(space.n), dtype=np.float32)[values[:, 0] - int(space.start)]
        case "MultiDiscrete":
            sizes, starts = space.nvec.reshape(-1), np.asarray(space.start).reshape(-1)
            columns = zip(values.T, sizes, starts, strict=True)
            return np.concatenate([np.eye(n, dtype=np.float32)[column - s] for column, n, s in columns], 1)
    return values.astype(np.float32)
