"""Actions in parts side by side: the one array that algorithms act by, for environments that take several."""

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
    """A `SingleEnvironment` whose actions are one array, of one whose actions are a `Dict` or `Tuple`.

    `envs.vectorize` makes one by itself. Categories become one `MultiDiscrete`, arrays of floats one `Box` of
    one axis, the parts in the order of `composite.parts`; the environment within gets them in its own parts.

    Raises:
      FdgError: (when its space is asked for) there are categories and floats.
    """

    single: Any

    @property
    def action_space(self) -> Space:
        """Of all parts together."""
        parts = [part for _, part in composite.parts(self.parts_of_action)]
        boxes = [part for part in parts if isinstance(part, Box)]
        if not boxes:
            numbers = (
                part.nvec if isinstance(part, MultiDiscrete) else (getattr(part, "n", 0),) for part in parts
            )
            return MultiDiscrete(tuple(n for nvec in numbers for n in nvec))
        if len(boxes) < len(parts):
            raise FdgError(
                f"environment '{self.single.name}': its actions are {self.parts_of_action!r:.200}, categories"
                " and floats together: make them all one or the other, say with the floats in bins"
            )
        low, high = (
            np.concatenate([end.ravel() for end in ends])
            for ends in zip(*((box.low_array, box.high_array) for box in boxes), strict=True)
        )
        return Box(bound(low), bound(high), low.shape)

    @property
    def parts_of_action(self) -> ObservationSpace:
        """The space of actions of the environment within."""
        return self.single.action_space

    def apart(self, action: jax.Array) -> Any:
        """Actions `[..., n]` as the environment within takes them, each part `[..., *shape]`."""
        leaves, structure = jax.tree.flatten(composite.tree(self.parts_of_action))
        ends = np.cumsum([math.prod(part.shape) for part in leaves])[:-1].tolist()
        pieces = [
            piece.reshape(*action.shape[:-1], *part.shape).astype(part.dtype)
            for part, piece in zip(leaves, jnp.split(action, ends, axis=-1), strict=True)
        ]
        return jax.tree.unflatten(structure, pieces)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        """Take one step; `action [(A,) n]`."""
        return self.single.step(key, state, self.apart(action))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "single":
            raise AttributeError(name)
        return getattr(self.single, name)
