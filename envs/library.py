"""The base class of adapters to other packages' environments."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs.composite import ObservationSpace
from envs.environment import Forwarding
from envs.spaces import Space


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a library's environment, known before it runs."""

    observation_space: ObservationSpace
    action_space: Space
    max_episode_steps: int | None


class LibraryEnvironment(Forwarding):
    """Base class of adapters: spaces, time limit and number of agents are those of `facts`.

    A subclass defines `facts`; reading it may import the library and make its environment.
    """

    _forwards_to: ClassVar[str] = "facts"


def with_dtypes_of(new: Any, old: Any) -> Any:
    """Casts a state to the previous state's dtypes: libraries' sums with Python numbers change dtypes."""
    new, old = jax.tree.map(jnp.asarray, (new, old))
    return jax.tree.map(lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), new, old)
