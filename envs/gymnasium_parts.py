"""Gymnasium's observations in parts, as `envs.Dict` and `envs.Tuple`; and their way into compiled programs.

Pools work on one array a batch, so an observation in parts travels as one row of bytes (`packed`), of which
the program makes its parts again (`unpacked`), bit for bit. In the parts an image (uint8, two or three axes)
stays uint8 with its channels last, categories are categories from zero on, all other arrays are float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite, gymnasium_spaces
from envs.composite import ObservationSpace
from envs.spaces import Box, Discrete, MultiDiscrete, Space


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
    """A batch of Gymnasium's observations as one of ours: NumPy arrays `[B, ...]`, always copies."""
    match type(theirs).__name__:
        case "Dict":
            return {str(key): encode(part, batch[key]) for key, part in theirs.spaces.items()}
        case "Tuple":
            return tuple(encode(part, batch[i]) for i, part in enumerate(theirs.spaces))
        case "Discrete" | "MultiDiscrete":
            categories = np.array(batch, np.int64) - theirs.start
            return categories.astype(np.int32).reshape(len(categories), *_flat(theirs))
        case "MultiBinary":
            return np.array(batch, np.float32)
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
