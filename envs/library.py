"""The base class of adapters to other packages' environments."""

import dataclasses
from typing import ClassVar

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
    """Base class: spaces, time limit and number of agents are those of `facts`.

    A subclass defines `facts`; reading it may import the library and make its environment.
    """

    _forwards_to: ClassVar[str] = "facts"
