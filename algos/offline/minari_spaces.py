"""Spaces of data sets in Minari's format: descriptions, and conversion to and from an environment's spaces.

Minari stores values of the spaces of an environment's library, some of which fdg does not have: `Discrete`
with a start, `MultiBinary`, texts, actions in parts. `envs.gymnasium_spaces` and `envs.gymnasium_parts`
convert these to fdg's spaces when the library's environment runs. The same functions convert stored data
here, so that data and environment agree.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from envs import (
    Box,
    Discrete,
    MultiDiscrete,
    composite,
    features_and_mask,
    gymnasium_codec,
    gymnasium_parts,
    gymnasium_spaces,
)
from envs.composite import ObservationSpace
from envs.native import native
from envs.spaces import Space
from fdg.errors import FdgError

_MAX_SIZE = 1 << 24  # largest number of numbers in an element of a stored space, with one-hot categories
_WHOLE_KINDS = "biu"  # NumPy's kinds of dtypes: booleans, integers


class Leaf(NamedTuple):
    """One array of an episode in the file, `[T, *shape]`.

    Attributes:
      name: the space, for messages.
      shape: of one element; None for texts.
      dtype: the dtype that the values must fit.
      low: the lowest category (an array if there are several); None for numbers.
      high: the highest category, likewise.
      is_picture: Minari stores it as encoded pictures.
      is_codes: its numbers are categories, so lossy compression is not allowed.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    low: Any = None
    high: Any = None
    is_picture: bool = False
    is_codes: bool = False


class Stored(NamedTuple):
    """How a space is stored: the arrays in the file, and functions to and from the environment's space."""

    description: dict[str, Any]  # in Minari's format
    leaves: Any  # nested dictionaries and tuples of `Leaf`
    to_env: Callable[[Any], Any] = lambda tree: tree
    from_env: Callable[[Any], Any] = lambda tree: tree


# --- descriptions ---


def description(space: ObservationSpace) -> dict[str, Any]:
    """A space in Minari's metadata format.

    >>> description(Discrete(3))
    {'type': 'Discrete', 'dtype': 'int64', 'start': 0, 'n': 3}
    """
    match space:
        case composite.Dict(spaces=spaces):
            return {"type": "Dict", "subspaces": {name: description(part) for name, part in spaces}}
        case composite.Tuple(spaces=parts):
            return {"type": "Tuple", "subspaces": [description(part) for part in parts]}
        case Discrete(n=n):
            return {"type": "Discrete", "dtype": "int64", "start": 0, "n": n}
        case MultiDiscrete(nvec=nvec):
            numbers = {"nvec": list(nvec), "start": [0] * len(nvec)}
            return {"type": "MultiDiscrete", "dtype": "int64", **numbers}
        case Box(shape=shape, dtype=dtype):
            bounds = {"low": space.low_array.tolist(), "high": space.high_array.tolist()}
            return {"type": "Box", "dtype": dtype, "shape": list(shape), **bounds}


def _library_description(entry: dict[str, Any]) -> dict[str, Any]:
    """Minari's description of a library's space, from its description by `envs.native`."""
    parts = entry.get("parts")
    if isinstance(parts, dict):
        return {"type": "Dict", "subspaces": {name: _library_description(x) for name, x in parts.items()}}
    if parts is not None:
        return {"type": "Tuple", "subspaces": [_library_description(x) for x in parts]}
    kind, shape, dtype = entry["kind"], entry["shape"][1:], entry["dtype"]
    match kind:
        case "Discrete":
            return {"type": kind, "dtype": "int64", "start": entry["start"], "n": entry["n"]}
        case "MultiDiscrete":
            return {"type": kind, "dtype": dtype, "nvec": entry["nvec"], "start": entry["start"]}
        case "MultiBinary":
            return {"type": kind, "n": shape[0] if len(shape) == 1 else shape}
    bounds = {}
    for end, infinite in (("low", -math.inf), ("high", math.inf)):
        finite = np.frompyfunc(lambda x, infinite=infinite: infinite if x is None else x, 1, 1)
        bounds[end] = np.broadcast_to(finite(np.asarray(entry[end], object)), shape).tolist()
    return {"type": "Box", "dtype": dtype, "shape": shape, **bounds}


# --- how spaces are stored ---


def stored_observation(space: ObservationSpace) -> Stored:
    """How `fdg collect` stores observations: unchanged, in fdg's space."""
    return Stored(description(space), _leaves_of(space))


def stored_action(env: Any) -> Stored:
    """How `fdg collect` stores actions: in the space of the environment's library."""
    stored = _library_action(_library_description(native(env).action), env.action_space)
    return stored or Stored(description(env.action_space), _leaves_of(env.action_space))


def find_action(stored: Any, space: Space) -> Stored | None:
    """How stored actions are converted to those of an environment; None if they are of another space."""
    if fits(stored, description(space), True):
        return Stored(stored, _leaves_of(space))
    return _library_action(stored, space)


def find_observation(stored: Any, stored_actions: Any, space: ObservationSpace, name: str) -> Stored | None:
    """How stored observations are converted to those of environment `name`; None for other spaces.

    `stored` and `stored_actions` are descriptions, `space` the environment's observation space.
    """
    expected = description(space)
    if fits(stored, expected, False):
        return Stored(stored, _leaves_of(space))
    library_space = _library_space(stored)
    if library_space is None:
        return None
    _map_spaces(_widen_text, library_space, space)
    check_bounds = type(library_space).__name__ not in ("Box", "Dict", "Tuple")
    # Pairs of functions that convert the library's space, and its observations.
    candidates: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (gymnasium_parts.observation_space, gymnasium_codec.encode_parts)
    ]
    if gymnasium_parts.has_parts(library_space):
        candidates.append(_without_mask(name, _library_space(stored_actions)))
    else:
        candidates.append((gymnasium_spaces.observation_box, gymnasium_spaces.encode))
    for convert, encode in candidates:
        try:
            if fits(description(convert(name, library_space)), expected, check_bounds):
                leaves = _map_spaces(_observation_leaf, library_space, space)
                return Stored(stored, leaves, functools.partial(encode, library_space))
        except FdgError:  # the environment could not have this space
            continue
    return None


def _without_mask(name: str, actions: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that convert spaces and observations, and drop the part that is an action mask."""

    def facts(library_space: Any) -> gymnasium_parts.Facts:
        if actions is None:
            raise FdgError("the actions are not known")
        return gymnasium_parts.facts(name, library_space, actions, None)

    def convert(name: str, library_space: Any) -> ObservationSpace:
        return facts(library_space).observation_space

    def encode(library_space: Any, batch: Any) -> Any:
        encoded = gymnasium_codec.encode_parts(library_space, batch)
        return features_and_mask(gymnasium_parts.split_mask(facts(library_space), encoded))[0]

    return convert, encode


def _library_action(stored: Any, space: Space) -> Stored | None:
    """How actions are stored in a library's space; None if it is not the space of these actions."""
    library_space = _library_space(stored)
    if library_space is None:
        return None
    try:
        if not fits(description(gymnasium_spaces.action_space("", library_space)), description(space), True):
            return None
    except FdgError:
        return None
    return Stored(
        stored,
        _map_spaces(_action_leaf, library_space, None),
        functools.partial(gymnasium_spaces.encode_action, library_space),
        functools.partial(gymnasium_spaces.decode, library_space),
    )


def _leaves_of(space: Any) -> Any:
    """The arrays of one of fdg's spaces."""

    def leaf(part: Any) -> Leaf:
        match part:
            case Discrete(n=n):
                return Leaf(repr(part), (), part.dtype, 0, n - 1)
            case MultiDiscrete(nvec=nvec):
                return Leaf(repr(part), part.shape, part.dtype, 0, np.asarray(nvec) - 1)
        is_codes = part.codes is not None
        return Leaf(repr(part), part.shape, part.dtype, is_picture=_is_picture(part), is_codes=is_codes)

    return composite.map_parts(leaf, space)


def _is_picture(space: Box) -> bool:
    """Whether Minari expects encoded pictures (`is_image_space` in its `minari_storage.py`)."""
    shape = space.shape
    if space.dtype != "uint8" or len(shape) not in (2, 3) or min(shape[:2]) < 32 or shape[2:] not in _MODES:
        return False
    return bool((space.low_array == 0).all() and (space.high_array == 255).all())


_MODES = {(): "L", (3,): "RGB", (4,): "RGBA"}  # Pillow's modes, by the axis of channels


def picture_mode(shape: tuple[int, ...]) -> str | None:
    """Pillow's mode of a picture `[H, W]`, `[H, W, 3]` or `[H, W, 4]`; None for another shape."""
    return _MODES.get(shape[2:]) if len(shape) in (2, 3) else None


def _library_leaf(part: Any) -> Leaf | None:
    """The stored array of a library's space, if it has categories or texts; else None."""
    match type(part).__name__:
        case "Discrete":
            return Leaf(summary(part.stored), (), "int64", part.start, part.start + part.n - 1)
        case "MultiDiscrete":
            return Leaf(summary(part.stored), part.shape, "int64", part.start, part.start + part.nvec - 1)
        case "MultiBinary":
            return Leaf(summary(part.stored), part.shape, "int8", 0, 1)
        case "Text":
            return Leaf(summary(part.stored), None, "uint8")
    return None


def _observation_leaf(part: Any, space: Any) -> Leaf:
    """The stored array of a part of a library's observations; `space` is the environment's, or None."""
    if leaf := _library_leaf(part):
        return leaf
    box = space if isinstance(space, Box) else gymnasium_spaces.observation_box("", part)
    return Leaf(summary(part.stored), part.shape, box.dtype, is_codes=box.codes is not None)


def _widen_text(part: Any, space: Any) -> None:
    """Sets a text space's length to the longest, if the environment's texts are unlimited (MiniGrid)."""
    length = gymnasium_spaces.UNLIMITED_TEXT_LENGTH
    unlimited = isinstance(space, Box) and space.shape == (length,)
    if type(part).__name__ == "Text" and unlimited and gymnasium_spaces.text_length(part) < length:
        part.max_length, part.character_set = length, frozenset()


def _action_leaf(part: Any, _: Any) -> Leaf:
    if leaf := _library_leaf(part):
        return leaf
    if part.dtype.kind in _WHOLE_KINDS:
        return Leaf(summary(part.stored), part.shape, "int64", part.low, part.high)
    return Leaf(summary(part.stored), part.shape, "float32")


def _map_spaces(function: Callable[[Any, Any], Any], library_space: Any, space: Any) -> Any:
    """Applies a function to each part of a library's space, and the environment's part (None without one)."""
    match type(library_space).__name__:
        case "Dict":
            by_name = dict(space.spaces) if isinstance(space, composite.Dict) else {}
            return {
                name: _map_spaces(function, part, by_name.get(name))
                for name, part in library_space.spaces.items()
            }
        case "Tuple":
            elements = dict(enumerate(space.spaces)) if isinstance(space, composite.Tuple) else {}
            return tuple(
                _map_spaces(function, part, elements.get(i)) for i, part in enumerate(library_space.spaces)
            )
    return function(library_space, space)


# --- spaces of the library, from untrusted descriptions ---

# Classes with the names and attributes of Gymnasium's, which need not be installed.
_CLASSES = {
    name: type(name, (types.SimpleNamespace,), {})
    for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict", "Tuple")
}


def _library_space(stored: Any) -> Any:
    """The library's space of a stored description; None if the description is not valid."""
    try:
        return _parse(stored)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _parse(stored: Any) -> Any:
    """The library's space of a stored description; any exception means that it is not valid."""
    kind = stored["type"]
    make_space = functools.partial(_CLASSES[kind], stored=stored)
    match kind:
        case "Dict":
            return make_space(spaces={str(name): _parse(part) for name, part in stored["subspaces"].items()})
        case "Tuple":
            return make_space(spaces=tuple(_parse(part) for part in stored["subspaces"]))
        case "Text":
            length = _checked_size(stored["max_length"])
            return make_space(max_length=length, character_set=frozenset(stored["charset"]))
        case "MultiBinary":
            n = stored["n"]
            return make_space(shape=_checked_shape(n if isinstance(n, list) else [n]), dtype=np.dtype("int8"))
    dtype = np.dtype(stored.get("dtype", "int64"))
    if dtype.kind not in ("biuf" if kind == "Box" else "iu"):
        raise ValueError(f"dtype {dtype}")
    if kind == "Discrete":
        start: Any = np.array(stored.get("start") or 0, np.int64)
        return make_space(n=_checked_size(stored["n"]), start=start, shape=(), dtype=dtype)
    if kind == "MultiDiscrete":
        nvec = np.asarray(stored["nvec"], np.int64)
        if nvec.size == 0 or nvec.min() < 1 or nvec.max() > _MAX_SIZE or nvec.sum() > _MAX_SIZE:
            raise ValueError("nvec")
        start = np.broadcast_to(np.asarray(stored.get("start") or 0, np.int64), nvec.shape)
        return make_space(nvec=nvec, start=start, shape=nvec.shape, dtype=dtype)
    shape = _checked_shape(stored["shape"])
    low, high = (np.broadcast_to(np.asarray(stored[end], dtype), shape) for end in ("low", "high"))
    return make_space(shape=shape, dtype=dtype, low=low, high=high)


def _checked_shape(shape: list[int]) -> tuple[int, ...]:
    sizes = tuple(map(_checked_size, shape))
    _checked_size(math.prod(sizes))
    return sizes


def _checked_size(size: Any) -> int:
    if type(size) is not int or not 1 <= size <= _MAX_SIZE:
        raise ValueError(f"size {size}")
    return size


# --- comparison ---


def fits(stored: Any, expected: dict[str, Any], check_bounds: bool) -> bool:
    """Whether a stored description has the expected type, parts and shapes (dtypes are not compared)."""
    if not isinstance(stored, dict) or stored.get("type") != expected["type"]:
        return False
    if "subspaces" in expected:
        stored_parts, parts = _by_name(stored.get("subspaces")), _by_name(expected["subspaces"])
        return stored_parts.keys() == parts.keys() and all(
            fits(stored_parts[name], part, check_bounds) for name, part in parts.items()
        )
    if "n" in expected:
        return stored.get("n") == expected["n"] and stored.get("start", 0) == expected.get("start", 0)
    if "nvec" in expected:
        start = _numbers(stored.get("start") or 0)
        return stored.get("nvec") == expected["nvec"] and bool(np.all(start == _numbers(expected["start"])))
    if stored.get("shape") != expected["shape"]:
        return False
    return not check_bounds or all(_is_close(stored.get(name), expected[name]) for name in ("low", "high"))


def difference(stored: Any, expected: Any, check_bounds: bool, where: str) -> tuple[str, str]:
    """The first part that differs, as two texts for a message: the stored part, and the expected part."""
    stored_parts, parts = ({}, {})
    if isinstance(stored, dict) and stored.get("type") == expected["type"] and "subspaces" in expected:
        stored_parts, parts = _by_name(stored.get("subspaces")), _by_name(expected["subspaces"])
    if stored_parts.keys() == parts.keys():
        for name, part in parts.items():
            if not fits(stored_parts[name], part, check_bounds):
                return difference(stored_parts[name], part, check_bounds, f"{where}/{name}")
    stored_text, expected_text = summary(stored), summary(expected)
    bounds = " with other bounds" if stored_text == expected_text else ""
    return f"{where} {stored_text}", f"{expected_text}{bounds}"


def _by_name(parts: Any) -> dict[Any, Any]:
    """Parts of a space by name or, in a list, by position; empty for anything else."""
    if isinstance(parts, dict):
        return parts
    return dict(enumerate(parts)) if isinstance(parts, list) else {}


def _is_close(stored: Any, expected: Any) -> bool:
    """Whether nested lists hold the expected numbers, or one number for all of them."""
    stored, expected = _numbers(stored), _numbers(expected)
    if stored.size == 1:
        stored = np.broadcast_to(stored, expected.shape)
    return stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-4)


def _numbers(nested: Any) -> np.ndarray:
    """Flattens nested lists of numbers to an array; empty for anything else."""
    try:
        return np.asarray(nested, float).ravel()
    except (TypeError, ValueError):
        return np.zeros(0)


def summary(stored: Any) -> str:
    """A stored description, shortened for a message."""
    match stored:
        case {"type": "Discrete", "n": count} | {"type": "MultiDiscrete", "nvec": count}:
            start = stored.get("start") or 0
            start_text = f", start={start!r:.40}" if np.any(_numbers(start)) else ""
            return f"{stored['type']}({count!r:.40}{start_text})"
        case {"type": "MultiBinary", "n": n}:
            return f"MultiBinary({n!r:.40})"
        case {"type": "Text", "max_length": length}:
            return f"Text({length!r:.20})"
        case {"type": "Dict", "subspaces": dict(parts)}:
            return f"Dict({', '.join(map(str, parts)):.60})"
        case {"type": kind, "shape": shape, "low": low, "high": high}:
            lows, highs = _numbers(low), _numbers(high)
            limits = f" from {lows.min():g} to {highs.max():g}" if lows.size and highs.size else ""
            return f"{kind!s:.20}{shape!s:.40}{limits}"
        case {"type": kind}:
            return f"{kind!s:.20}"
    return "of an unknown space"
