"""Gymnasium's `Dict` and `Tuple` observations as `envs.Dict` and `envs.Tuple`, packed for pools.

Worker pools transfer one array for each batch. So `pack` turns an observation with parts into one row of
bytes, and `unpack` restores the parts in the compiled program, bit for bit. An image (uint8, two or three
axes) stays uint8 with its channels last, categories start from zero, and all other arrays are float32.

A part `action_mask` with a bit for each action becomes the mask of an `envs.MaskedObservation`, as in the
games of PettingZoo and Jumanji.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite, gymnasium_spaces
from envs.composite import ObservationSpace
from envs.gymnasium_codec import encode_observation, encode_row, has_parts, kind
from envs.library import LibraryEnvironment
from envs.native import Native, describe, rebuilt
from envs.observations import MaskedObservation
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.errors import FdgError

_MASK = "action_mask"  # name of the part that may be a mask


class Facts(NamedTuple):
    """Properties of a library's environment, known before it runs."""

    library_observation_space: Any  # Gymnasium's space
    library_action_space: Any  # Gymnasium's space
    encoded_space: ObservationSpace  # one array as in `gymnasium_spaces`, or parts
    observation_space: ObservationSpace  # the same without the part that is the mask, if there is one
    action_space: Space
    max_episode_steps: int | None


def facts(name: str, observations: Any, actions: Any, max_episode_steps: int | None) -> Facts:
    """Properties of environment `name`, from Gymnasium's spaces of observations and actions."""
    for what, space in (("observations", observations), ("actions", actions)):
        if not any(gymnasium_spaces.leaves(space)):
            raise FdgError(f"environment '{name}': its {what} are {space}, which has no parts: add a part")
    boxes = [
        gymnasium_spaces.observation_box(name, part) for part, _ in gymnasium_spaces.leaves(observations)
    ]
    action_space = gymnasium_spaces.action_space(name, actions)
    encoded = observation_space(name, observations) if has_parts(observations) else boxes[0]
    visible = encoded
    if isinstance(encoded, composite.Dict) and _has_mask(observations, action_space):
        visible = composite.Dict({part: space for part, space in encoded.spaces if part != _MASK})
    return Facts(observations, actions, encoded, visible, action_space, max_episode_steps)


class LibrarySource(LibraryEnvironment):
    """Base class of sources whose library uses Gymnasium's spaces: `facts` gives what `pools.Source` needs.

    A subclass is a frozen dataclass with a `name`, and defines `facts`.
    """

    @property
    def facts(self) -> Facts:
        """The spaces and the time limit that the library reports."""
        raise NotImplementedError

    @property
    def wire_space(self) -> Space:
        """The space of one row of a pool's array, `[*wire]`; `unpack` restores observations from rows."""
        space = self.facts.encoded_space
        return packed_space(space) if isinstance(space, composite.Dict | composite.Tuple) else space

    def unpack(self, rows: jax.Array) -> Any:
        """Restores observations `[B, ...]` from rows `[B, *wire]`, in a compiled program."""
        space = self.facts.encoded_space
        return split_mask(self.facts, unpack(space, rows)) if composite.is_composite(space) else rows

    def encode(self, batch: Any) -> np.ndarray:
        """Encodes a batch of the library's observations as rows `[B, *wire]`."""
        return encode_row(self.facts.library_observation_space, batch)

    @property
    def native(self) -> Native:
        """The library's own observations and actions."""
        return _native_of(self)


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
        return [
            part for _, part in gymnasium_spaces.leaves(actions, gymnasium_spaces.decode(actions, action))
        ]

    return Native(observation, describe("action", actions), encode_batch, decode)


def split_mask(facts: Facts, observation: Any) -> Any:
    """Splits the mask off an observation `[...]`: a `MaskedObservation` if one of the parts is the mask.

    A mask that forbids everything becomes one that allows everything: such an observation has no next action.
    """
    if facts.encoded_space == facts.observation_space:
        return observation
    features = {name: part for name, part in observation.items() if name != _MASK}
    bits = observation[_MASK]
    leading = bits.ndim - len(facts.library_observation_space.spaces[_MASK].shape)
    mask = bits.reshape(*bits.shape[:leading], -1) > 0
    return MaskedObservation(features, mask | ~mask.any(-1, keepdims=True))


def _has_mask(library_space: Any, actions: Space) -> bool:
    """True if a `Dict` has a part `action_mask` with a bit for each action, and other parts."""
    if _MASK not in library_space.spaces or len(library_space.spaces) == 1:
        return False
    part = library_space.spaces[_MASK]
    if kind(part) not in ("MultiBinary", "Box"):
        return False
    match actions:
        case Discrete(n):
            return math.prod(part.shape) == n
        case MultiDiscrete(nvec):  # a row for each choice; a square array is ambiguous, so not a mask
            table = (len(nvec), nvec[0])
            may_be_table = len(set(nvec)) == 1 and table[0] != table[1]
            return tuple(part.shape) == (sum(nvec),) or (may_be_table and tuple(part.shape) == table)
    return False


def observation_space(name: str, space: Any) -> ObservationSpace:
    """Converts an observation space of Gymnasium's to ours, part by part."""
    match kind(space):
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
