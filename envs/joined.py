"""Concatenates actions with several parts (`Dict`, `Tuple`) into the one array that algorithms use."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite
from envs.composite import ObservationSpace
from envs.spaces import Box, MultiDiscrete, Space, bound
from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Joined:
    """Wraps a `SingleEnvironment` with `Dict` or `Tuple` actions as one with a single action array.

    `envs.vectorize` applies it. Discrete parts become one `MultiDiscrete`, float parts one `Box` with one
    axis, in the order of `composite.parts`. `step` splits the array into the parts of the inner environment.
    """

    single: Any

    @property
    def action_space(self) -> Space:
        """The space of the concatenated actions."""
        parts = [part for _, part in composite.parts(self.parts_of_action)]
        boxes = [part for part in parts if isinstance(part, Box)]
        if not boxes:
            counts = (
                part.nvec if isinstance(part, MultiDiscrete) else (getattr(part, "n", 0),) for part in parts
            )
            return MultiDiscrete(tuple(n for nvec in counts for n in nvec))
        if len(boxes) < len(parts):
            raise FdgError(
                f"environment '{self.single.name}': its actions are {self.parts_of_action!r:.200}, categories"
                " and floats together: make all discrete or all floats, for example by discretising the"
                " floats"
            )
        low, high = (
            np.concatenate([limit.ravel() for limit in limits])
            for limits in zip(*((box.low_array, box.high_array) for box in boxes), strict=True)
        )
        return Box(bound(low), bound(high), low.shape)

    @property
    def parts_of_action(self) -> ObservationSpace:
        """The action space of the inner environment."""
        return self.single.action_space

    def split(self, action: jax.Array) -> Any:
        """Splits actions `[..., n]` into the parts of the inner environment, each `[..., *shape]`."""
        leaves, structure = jax.tree.flatten(composite.tree(self.parts_of_action))
        ends = np.cumsum([math.prod(part.shape) for part in leaves])[:-1].tolist()
        pieces = [
            piece.reshape(*action.shape[:-1], *part.shape).astype(part.dtype)
            for part, piece in zip(leaves, jnp.split(action, ends, axis=-1), strict=True)
        ]
        return jax.tree.unflatten(structure, pieces)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        """Takes one step; `action [(A,) n]`."""
        return self.single.step(key, state, self.split(action))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "single":
            raise AttributeError(name)
        return getattr(self.single, name)
