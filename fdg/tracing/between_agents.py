"""What agents of one program take over from each other: an algorithm's own, carried out by the engine.

An algorithm with an attribute `between_agents` (None, or a value with these methods) is one of a population:
where `num_seeds` agents are trained, the program asks after each iteration whether an exchange is due. All
other agents of one program are independent.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax


class BetweenAgents(Protocol):
    """Pure functions of one agent's state, but for `known`, whose arrays may have an axis of agents.

    Attributes:
      note: when agents exchange what, a sentence for the plan.
    """

    note: str

    def due(self, state: Any) -> jax.Array:
        """Whether agents exchange now: `[]` bool, the same for every agent."""

    def known(self, state: Any) -> Any:
        """What all others see of an agent: arrays, made without looking along their axes."""

    def source(self, everyone: Any, agent: jax.Array, state: Any) -> jax.Array:
        """The agent that agent number `agent` takes over from, maybe itself: `[]` int32.

        Args:
          everyone: what is `known` of all agents, `[agents, ...]`.
          agent: `[]` int32.
          state: its own.
        """

    def taken(self, state: Any, axes: Sequence[int | None]) -> list[bool]:
        """Of each leaf of the state whether it is taken over; `axes` are the leaves' batch axes."""

    def after(self, state: Any, source: jax.Array, agent: jax.Array) -> Any:
        """The state to go on with, once the leaves have been taken over from `source`."""
