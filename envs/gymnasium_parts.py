"""Gymnasium's observations in parts, as `envs.Dict` and `envs.Tuple`; and their way into compiled programs.

Pools work on one array a batch, so an observation in parts travels as one row of bytes (`packed`), of which
the program makes its parts again (`unpacked`), bit for bit. In the parts an image (uint8, two or three axes)
stays uint8 with its channels last, categories are categories from zero on, all other arrays are float32.

A part `action_mask` of a dictionary that has a bit for each action is no part of ours but the mask of
`envs.MaskedObservation`, as PettingZoo's games, and Jumanji's, have it.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite, gymnasium_spaces
from envs.composite import ObservationSpace
from envs.native import Native, described, rebuilt
from envs.observations import MaskedObservation
from envs.spaces import Box, Discrete, MultiDiscrete, Space

_MASK = "action_mask"


class LibrarySource:
    """Base of sources whose library speaks Gymnasium's spaces: what of a `host.Source` follows from these.

    A subclass is a frozen dataclass with a `name`, and `facts`.
    """

    name: str

    @property
    def facts(self) -> gymnasium_spaces.Facts:
        """What the library says."""
        raise NotImplementedError

    @property
    def observation_space(self) -> ObservationSpace:
        """As `gymnasium_spaces` has it, or in parts."""
        parts = _parts_of(self)
        return parts.shown if parts else self.facts.observation_space

    @property
    def wire_space(self) -> Space:
        """Space of one row of the arrays that a pool gives; `unpacked` makes observations of them."""
        parts = _parts_of(self)
        return wire(parts.all) if parts else self.facts.observation_space

    def unpacked(self, rows: jax.Array) -> Any:
        """Observations `[B, ...]` of rows `[B, *wire]`, in a compiled program."""
        parts = _parts_of(self)
        return shown(self.facts, unpacked(parts.all, rows)) if parts else rows

    def encoded(self, batch: Any) -> np.ndarray:
        """A batch of the library's observations as rows `[B, *wire]`."""
        encode = packed if _parts_of(self) else gymnasium_spaces.encode
        return encode(self.facts.library_observation_space, batch)

    @property
    def native(self) -> Native:
        """Observations and actions as the library has them."""
        return _native_of(self)

    @property
    def action_space(self) -> Space:
        """See `gymnasium_spaces`."""
        return self.facts.action_space

    @property
    def max_episode_steps(self) -> int | None:
        """The library's time limit."""
        return self.facts.max_episode_steps


@functools.cache
def _native_of(source: LibrarySource) -> Native:
    facts = source.facts
    observed, acting = facts.library_observation_space, facts.library_action_space
    observation = described("observation", observed)

    def encode_(arrays: Sequence[jax.Array], mask: Any) -> Any:
        batch = rebuilt(observation, iter(arrays))
        if has_parts(observed):
            seen = shown(facts, encode(observed, batch))
        else:
            seen = gymnasium_spaces.encode(observed, batch)
        return seen if mask is None else MaskedObservation(seen, mask)

    def decode(action: jax.Array) -> Sequence[jax.Array]:
        return [*_arrays(gymnasium_spaces.decode(acting, action))]

    return Native(observation, described("action", acting), encode_, decode)


def _arrays(batch: Any) -> Iterator[Any]:
    """The arrays of a batch in the order of its space, in which dictionaries keep theirs."""
    if isinstance(batch, dict | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _arrays(part)
    else:
        yield batch


class _Parts(NamedTuple):
    """Parts of observations."""

    all: ObservationSpace
    shown: ObservationSpace  # all but a mask


@functools.cache
def _parts_of(source: LibrarySource) -> _Parts | None:
    """The parts of a source's observations, None where they have none."""
    facts = source.facts
    if not has_parts(facts.library_observation_space):
        return None
    space = observation_space(source.name, facts.library_observation_space)
    if not _has_mask(facts):
        return _Parts(space, space)
    assert isinstance(space, composite.Dict)
    return _Parts(space, composite.Dict({name: part for name, part in space.spaces if name != _MASK}))


def shown(facts: gymnasium_spaces.Facts, observation: Any) -> Any:
    """An observation `[...]` in all its parts as agents see it: with a mask where one of them is that.

    Where nothing is allowed everything is: nobody acts on such an observation.
    """
    if not _has_mask(facts):
        return observation
    rest = {name: part for name, part in observation.items() if name != _MASK}
    bits = observation[_MASK]
    leading = bits.ndim - len(facts.library_observation_space.spaces[_MASK].shape)
    mask = bits.reshape(*bits.shape[:leading], -1) > 0
    return MaskedObservation(rest, mask | ~mask.any(-1, keepdims=True))


def _has_mask(facts: gymnasium_spaces.Facts) -> bool:
    """Whether one part says of each action whether it is allowed."""
    theirs, acting = facts.library_observation_space, facts.action_space
    if type(theirs).__name__ != "Dict" or _MASK not in theirs.spaces or len(theirs.spaces) == 1:
        return False
    part = theirs.spaces[_MASK]
    if type(part).__name__ not in ("MultiBinary", "Box"):
        return False
    match acting:
        case Discrete(n):
            return math.prod(part.shape) == n
        case MultiDiscrete(nvec):  # a row for each choice; of as many rows as columns it may be anything
            rows = (len(nvec), nvec[0])
            alike = len(set(nvec)) == 1 and rows[0] != rows[1]
            return tuple(part.shape) == (sum(nvec),) or (alike and tuple(part.shape) == rows)
    return False


def has_parts(space: Any) -> bool:
    """Whether Gymnasium's space is a dictionary or a tuple of others."""
    return type(space).__name__ in ("Dict", "Tuple")


def observation_space(name: str, space: Any) -> ObservationSpace:
    """The space of ours that a space of Gymnasium's is, part by part.

    Raises:
      FdgError: environment `name` has a part that is no array of fixed shape, such as a text.
    """
    match type(space).__name__:
        case "Dict":
            return composite.Dict({str(k): observation_space(name, part) for k, part in space.spaces.items()})
        case "Tuple":
            return composite.Tuple(tuple(observation_space(name, part) for part in space.spaces))
        case "Discrete":
            return Discrete(int(space.n))
        case "MultiDiscrete":
            return MultiDiscrete(tuple(map(int, space.nvec.reshape(-1))))
        case "MultiBinary":
            return Box(0.0, 1.0, tuple(space.shape))
    return gymnasium_spaces.observation_box(name, space)


def wire(space: ObservationSpace) -> Box:
    """The space of a packed observation: so many bytes."""
    return Box(0.0, 255.0, (sum(_bytes(part) for _, part in composite.parts(space)),), "uint8")


def encode(theirs: Any, batch: Any) -> Any:
    """A batch of Gymnasium's observations as one of ours: arrays `[B, ...]`, always copies.

    NumPy's, or JAX's of JAX's: see `gymnasium_spaces.encode`.
    """
    match type(theirs).__name__:
        case "Dict":
            return {str(key): encode(part, batch[key]) for key, part in theirs.spaces.items()}
        case "Tuple":
            return tuple(encode(part, batch[i]) for i, part in enumerate(theirs.spaces))
        case "Discrete" | "MultiDiscrete":
            categories = gymnasium_spaces.counted(theirs, batch)
            return categories.reshape(categories.shape[0], *_flat(theirs))
        case "MultiBinary":
            return batch.astype(jnp.float32) if isinstance(batch, jax.Array) else np.array(batch, np.float32)
    return gymnasium_spaces.encode(theirs, batch)


def packed(theirs: Any, batch: Any) -> np.ndarray:
    """A batch of Gymnasium's observations as rows of bytes, `[B, *wire.shape]`."""
    parts = jax.tree.leaves(encode(theirs, batch))
    return np.concatenate([_rows(part) for part in parts], axis=1)


def unpacked(space: ObservationSpace, rows: jax.Array) -> Any:
    """What was `packed`, `[B, bytes]`, as an observation `[B, ...]`, in a compiled program."""
    leaves, structure = jax.tree.flatten(composite.tree(space))
    made, start = [], 0
    for part in leaves:
        size = _bytes(part)
        made.append(_of_bytes(part, rows[:, start : start + size]))
        start += size
    return jax.tree.unflatten(structure, made)


def _of_bytes(part: Space, rows: jax.Array) -> jax.Array:
    """One part, `[B, *part.shape]`, of its bytes `[B, bytes]`."""
    width = np.dtype(part.dtype).itemsize
    if width > 1:
        rows = jax.lax.bitcast_convert_type(rows.reshape(len(rows), -1, width), jnp.dtype(part.dtype))
    return rows.reshape(len(rows), *part.shape)


def _bytes(part: Space) -> int:
    return math.prod(part.shape) * np.dtype(part.dtype).itemsize


def _rows(part: np.ndarray) -> np.ndarray:
    """An array `[B, ...]` as its bytes, `[B, bytes]`."""
    return np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8)


def _flat(theirs: Any) -> tuple[int, ...]:
    """Of one category no axis, of several one."""
    return () if type(theirs).__name__ == "Discrete" else (math.prod(theirs.shape),)
