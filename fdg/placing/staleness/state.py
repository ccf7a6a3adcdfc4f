"""The state of a run with staleness: the algorithm's state and older parameters."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """An algorithm's state, and the older parameters that fragments will still read.

    It also has the attributes and items of the algorithm's state: `delayed.parameters` is
    `delayed.state.parameters`, and `delayed["w"]` is `delayed.state["w"]`.
    """

    state: Any  # the algorithm's state
    # the delayed leaves of earlier states, oldest first: one tuple per iteration of staleness
    history: tuple[tuple[Any, ...], ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("state", "history"):
            raise AttributeError(name)
        return getattr(self.state, name)

    def __getitem__(self, key: Any) -> Any:
        return self.state[key]


def algorithm_state(state: Any) -> Any:
    """The algorithm's state, without the history of older parameters."""
    return state.state if isinstance(state, DelayedState) else state


@dataclasses.dataclass(frozen=True)
class Delay:
    """The delayed leaves and their readers."""

    staleness: int  # the largest age in iterations
    leaves: tuple[int, ...]  # positions of the delayed leaves in the algorithm's state, in order
    readers: tuple[str, ...] = ()  # the fragments that read older versions, in the graph's order
    lag: int = 0  # the policy's lag in micro-batches; 0 for a staleness in iterations
    micro_batches: int = 0  # the number of micro-batches per iteration; 0 for a staleness in iterations

    def history_positions(self, leaf: int, num_leaves: int) -> list[int]:
        """Positions of a leaf's older versions in a `DelayedState`; the state's leaves are the first."""
        if leaf not in self.leaves:
            return []
        first = num_leaves + self.leaves.index(leaf)
        return [first + age * len(self.leaves) for age in range(self.staleness)]

    def start(self, state: Any) -> DelayedState:
        """The initial state; its history holds the initial parameters."""
        leaves = jax.tree.leaves(state)
        old = tuple(leaves[i] for i in self.leaves)
        # The history needs copies, since a buffer can be donated only once.
        copies = tuple(tuple(jax.numpy.copy(x) for x in old) for _ in range(self.staleness))
        return DelayedState(state, copies)
