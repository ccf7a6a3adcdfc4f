"""Gymnasium's `Dict` and `Tuple` observations as `envs.Dict` and `envs.Tuple`, packed for pools.

Worker pools transfer one array for each batch. So `pack` turns an observation with parts into one row of
bytes, and `unpack` restores the parts in the compiled program, bit for bit. An image (uint8, two or three
axes) stays uint8 with its channels last, categories start from zero, and all other arrays are float32.

A part `action_mask` with a bit for each action becomes the mask of an `envs.MaskedObservation`, as in the
games of PettingZoo and Jumanji.
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
from envs.native import Native, describe, rebuilt
from envs.observations import MaskedObservation
from envs.spaces import Box, Discrete, MultiDiscrete, Space

_MASK = "action_mask"


class LibrarySource:
    """Base class of sources whose library uses Gymnasium's spaces: `facts` gives what `pools.Source` needs.

    A subclass is a frozen dataclass with a `name`, and defines `facts`.
    """

    name: str

    @property
    def facts(self) -> gymnasium_spaces.Facts:
        """The spaces and the time limit that the library reports."""
        raise NotImplementedError

    @property
    def observation_space(self) -> ObservationSpace:
        """One array as in `gymnasium_spaces`, or parts; without the mask."""
        parts = _parts_of(self)
        return parts.without_mask if parts else self._box

    @property
    def _box(self) -> Box:
        """The space of an observation that is one array."""
        box = self.facts.observation_space
        assert box is not None
        return box

    @property
    def wire_space(self) -> Space:
        """The space of one row of a pool's array, `[*wire]`; `unpack` restores observations from rows."""
        parts = _parts_of(self)
        return packed_space(parts.all) if parts else self._box

    def unpack(self, rows: jax.Array) -> Any:
        """Restores observations `[B, ...]` from rows `[B, *wire]`, in a compiled program."""
        parts = _parts_of(self)
        return split_mask(self.facts, unpack(parts.all, rows)) if parts else rows

    def encode(self, batch: Any) -> np.ndarray:
        """Encodes a batch of the library's observations as rows `[B, *wire]`."""
        encode = pack if _parts_of(self) else gymnasium_spaces.encode
        return encode(self.facts.library_observation_space, batch)

    @property
    def native(self) -> Native:
        """The library's own observations and actions."""
        return _native_of(self)

    @property
    def action_space(self) -> Space:
        """The action space, as in `gymnasium_spaces`."""
        return self.facts.action_space

    @property
    def max_episode_steps(self) -> int | None:
        """The library's time limit."""
        return self.facts.max_episode_steps


@functools.cache
def _native_of(source: LibrarySource) -> Native:
    """The descriptions and conversions for the library's spaces."""
    facts = source.facts
    library_space, actions = facts.library_observation_space, facts.library_action_space
    observation = describe("observation", library_space)

    def encode_batch(arrays: Sequence[jax.Array], mask: Any) -> Any:
        batch = rebuilt(observation, iter(arrays))
        encoded = split_mask(facts, encode_observation(library_space, batch))
        return encoded if mask is None else MaskedObservation(encoded, mask)

    def decode(action: jax.Array) -> Sequence[jax.Array]:
        return [*_arrays(gymnasium_spaces.decode(actions, action))]

    return Native(observation, describe("action", actions), encode_batch, decode)


def _arrays(batch: Any) -> Iterator[Any]:
    """The arrays of a batch in the order of its space, which is also the order of dictionaries."""
    if isinstance(batch, dict | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _arrays(part)
    else:
        yield batch


class _Parts(NamedTuple):
    """Spaces of the parts of observations, with and without the mask."""

    all: ObservationSpace
    without_mask: ObservationSpace


@functools.cache
def _parts_of(source: LibrarySource) -> _Parts | None:
    """The parts of a source's observations; None if an observation is one array."""
    facts = source.facts
    if not has_parts(facts.library_observation_space):
        return None
    space = observation_space(source.name, facts.library_observation_space)
    return _Parts(space, without_mask(facts, space))


def without_mask(facts: gymnasium_spaces.Facts, space: ObservationSpace) -> ObservationSpace:
    """A space from `observation_space`, without the part that is the mask, if there is one."""
    if not _has_mask(facts):
        return space
    assert isinstance(space, composite.Dict)
    return composite.Dict({name: part for name, part in space.spaces if name != _MASK})


def split_mask(facts: gymnasium_spaces.Facts, observation: Any) -> Any:
    """Splits the mask off an observation `[...]`: a `MaskedObservation` if one of the parts is the mask.

    A mask that forbids everything becomes one that allows everything: such an observation has no next action.
    """
    if not _has_mask(facts):
        return observation
    features = {name: part for name, part in observation.items() if name != _MASK}
    bits = observation[_MASK]
    leading = bits.ndim - len(facts.library_observation_space.spaces[_MASK].shape)
    mask = bits.reshape(*bits.shape[:leading], -1) > 0
    return MaskedObservation(features, mask | ~mask.any(-1, keepdims=True))


def _has_mask(facts: gymnasium_spaces.Facts) -> bool:
    """True if one part is a mask with a bit for each action."""
    library_space, actions = facts.library_observation_space, facts.action_space
    if (
        type(library_space).__name__ != "Dict"
        or _MASK not in library_space.spaces
        or len(library_space.spaces) == 1
    ):
        return False
    part = library_space.spaces[_MASK]
    if type(part).__name__ not in ("MultiBinary", "Box"):
        return False
    match actions:
        case Discrete(n):
            return math.prod(part.shape) == n
        case MultiDiscrete(nvec):  # a row for each choice; a square array is ambiguous, so not a mask
            table = (len(nvec), nvec[0])
            may_be_table = len(set(nvec)) == 1 and table[0] != table[1]
            return tuple(part.shape) == (sum(nvec),) or (may_be_table and tuple(part.shape) == table)
    return False


def has_parts(space: Any) -> bool:
    """True for Gymnasium's `Dict` and `Tuple` spaces."""
    return type(space).__name__ in ("Dict", "Tuple")


def observation_space(name: str, space: Any) -> ObservationSpace:
    """Converts an observation space of Gymnasium's to ours, part by part."""
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


def packed_space(space: ObservationSpace) -> Box:
    """The space of a packed observation: a row of bytes."""
    return Box(0.0, 255.0, (sum(_num_bytes(part) for _, part in composite.parts(space)),), "uint8")


def encode_observation(library_space: Any, batch: Any) -> Any:
    """Converts a batch of Gymnasium's observations, with parts or without, to ours; always copies."""
    return (encode if has_parts(library_space) else gymnasium_spaces.encode)(library_space, batch)


def encode(library_space: Any, batch: Any) -> Any:
    """Converts a batch of a space with parts, or of one of its parts, to ours: arrays `[B, ...]`.

    NumPy arrays become NumPy arrays, JAX arrays JAX arrays: see `gymnasium_spaces.encode`.
    """
    match type(library_space).__name__:
        case "Dict":
            return {str(key): encode(part, batch[key]) for key, part in library_space.spaces.items()}
        case "Tuple":
            return tuple(encode(part, batch[i]) for i, part in enumerate(library_space.spaces))
        case "Discrete":
            return gymnasium_spaces.subtract_start(library_space, batch)
        case "MultiDiscrete":
            categories = gymnasium_spaces.subtract_start(library_space, batch)
            return categories.reshape(len(batch), math.prod(library_space.shape))
        case "MultiBinary":
            return batch.astype(jnp.float32) if isinstance(batch, jax.Array) else np.array(batch, np.float32)
    return gymnasium_spaces.encode(library_space, batch)


def pack(library_space: Any, batch: Any) -> np.ndarray:
    """Packs a batch of Gymnasium's observations into rows of bytes, `[B, bytes]`."""
    parts = jax.tree.leaves(encode(library_space, batch))
    return np.concatenate([_as_byte_rows(part) for part in parts], axis=1)


def unpack(space: ObservationSpace, rows: jax.Array) -> Any:
    """Restores an observation `[B, ...]` from rows of `pack`, `[B, bytes]`, in a compiled program."""
    leaves, structure = jax.tree.flatten(composite.tree(space))
    arrays, start = [], 0
    for part in leaves:
        size = _num_bytes(part)
        arrays.append(_part_from_bytes(part, rows[:, start : start + size]))
        start += size
    return jax.tree.unflatten(structure, arrays)


def _part_from_bytes(part: Space, rows: jax.Array) -> jax.Array:
    """Restores one part, `[B, *part.shape]`, from its bytes `[B, bytes]`."""
    width = np.dtype(part.dtype).itemsize
    if width > 1:
        rows = jax.lax.bitcast_convert_type(rows.reshape(len(rows), -1, width), jnp.dtype(part.dtype))
    return rows.reshape(len(rows), *part.shape)


def _num_bytes(part: Space) -> int:
    return math.prod(part.shape) * np.dtype(part.dtype).itemsize


def _as_byte_rows(part: np.ndarray) -> np.ndarray:
    """The bytes of an array `[B, ...]`, as `[B, bytes]`."""
    return np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8)
