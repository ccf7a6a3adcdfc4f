"""Exchange between the agents of one program: the algorithm defines it, the engine runs it.

An algorithm whose attribute `between_agents` has these methods (and is not None) trains a population of
`num_seeds` agents: after each iteration, the program checks whether an exchange is due. Without it, agents of
one program are independent.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax


class BetweenAgents(Protocol):
    """Pure functions of one agent's state. Only `known` may also get several agents' states, stacked.

    Attributes:
      note: a sentence for the plan: what agents exchange, and when.
    """

    note: str

    def due(self, state: Any) -> jax.Array:
        """Whether agents exchange now: `[]` bool, the same for every agent."""

    def known(self, state: Any) -> Any:
        """The arrays of an agent that all others see. Elementwise: the state may be `[agents, ...]`."""

    def source(self, everyone: Any, agent: jax.Array, state: Any) -> jax.Array:
        """The index of the agent that `agent` copies from, maybe itself: `[]` int32.

        Args:
          everyone: the results of `known` of all agents, stacked: `[agents, ...]`.
          agent: the index of this agent, `[]` int32.
          state: the state of this agent.
        """

    def taken(self, state: Any, axes: Sequence[int | None]) -> list[bool]:
        """For each leaf of the state: whether it is copied. `axes` are the leaves' batch axes."""

    def after(self, state: Any, source: jax.Array, agent: jax.Array) -> Any:
        """The agent's next state, after its leaves were copied from `source`."""
