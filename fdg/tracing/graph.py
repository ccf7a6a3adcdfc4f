"""The fragmented dataflow graph: an iteration's fragments and the arrays between them.

The graph is plain, immutable data, which `fdg.trace` reads from an algorithm.
"""

import dataclasses
from typing import Any

import jax

from fdg.agents import BetweenAgents
from fdg.drawable import Drawable


@dataclasses.dataclass(frozen=True)
class Array:
    """An array at a fragment's border."""

    value: int  # the number of its variable at the call; equal if two calls share the variable; -1: a literal
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    axis: int | None  # its batch axis; None if it is shared by the batch

    def __str__(self) -> str:
        sizes = [f"B={n}" if i == self.axis else str(n) for i, n in enumerate(self.shape)]
        return f"{self.dtype}[{', '.join(sizes)}]"


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A node: a call site of a fragment function."""

    name: str  # unique in the graph (`act`, `act.2`, ...)
    role: str
    parent: str | None  # the enclosing fragment; None at the top level
    calls_per_iteration: int
    # False inside a while loop (counted with its maximum trips, or one) or a branch (counted as taken)
    calls_exact: bool
    flops_per_call: int  # counted by `jaxprs.flops_of`
    bytes_per_call: int  # bytes of its inputs and outputs
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]

    @property
    def batch_size(self) -> int | None:
        """The length of the batch axis; None if the fragment declares no batch axis."""
        sizes = [a.shape[a.axis] for a in (*self.inputs, *self.outputs) if a.axis is not None]
        return sizes[0] if sizes else None


@dataclasses.dataclass(frozen=True)
class Edge:
    """Arrays that `source` produces and `target` reads, transferred together.

    Attributes:
      values: the `Array.value` of each array; all are outputs of `source`.
      bytes_per_crossing: the total size of the arrays.
      crossings_per_iteration: the number of transfers per iteration.
      delay: "" within a step, "step" to the next trip of a loop, "iteration" to the next iteration.
    """

    source: str
    target: str
    values: tuple[int, ...]
    bytes_per_crossing: int
    crossings_per_iteration: int
    delay: str = ""

    @property
    def bytes_per_iteration(self) -> int:
        """The bytes of all transfers in an iteration."""
        return self.bytes_per_crossing * self.crossings_per_iteration


@dataclasses.dataclass(frozen=True)
class FDG(Drawable):
    """A fragmented dataflow graph.

    Attributes:
      fragments: the fragments in program order; nested fragments follow their parent.
      edges: the edges between fragments of one nesting level.
      state_axes: the batch axis of each leaf of the algorithm's state, if a fragment declares one.
      jaxpr: one iteration; it maps the state's leaves to the next state's leaves and the metrics' leaves.
      state: the state's pytree, of `jax.ShapeDtypeStruct`.
      metrics: the metrics' pytree, of `jax.ShapeDtypeStruct`.
      parameter_rules: the sharding rules that the algorithm (or its network) declares, or None.
      between_agents: how agents copy from each other (`fdg.agents.BetweenAgents`), or None.
      agents: the number of agents (`fdg.agents`); None if the algorithm has no agents. All other attributes
        describe one agent; `of_all` adds the axis of agents.
    """

    name: str
    fragments: tuple[Fragment, ...]
    edges: tuple[Edge, ...]
    state_axes: tuple[int | None, ...] = ()
    jaxpr: Any = dataclasses.field(default=None, repr=False, compare=False)
    state: Any = dataclasses.field(default=None, repr=False, compare=False)
    metrics: Any = dataclasses.field(default=None, repr=False, compare=False)
    parameter_rules: Any = dataclasses.field(default=None, repr=False, compare=False)
    between_agents: BetweenAgents | None = dataclasses.field(default=None, repr=False, compare=False)
    agents: int | None = None

    @property
    def output_axes(self) -> tuple[int | None, ...]:
        """The batch axes of the jaxpr's outputs: the leaves' axes, then None for metrics."""
        return (*self.state_axes, *[None] * len(jax.tree.leaves(self.metrics)))

    def of_all(self, shapes: Any) -> Any:
        """Adds the axis of agents to a pytree of shapes."""
        if self.agents is None:
            return shapes
        leading = (self.agents,)
        return jax.tree.map(lambda x: x.update(shape=leading + x.shape), shapes)

    def __repr__(self) -> str:
        return f"<FDG of {self.name}: {len(self.fragments)} fragments, {len(self.edges)} edges>"

    def fragment(self, name: str) -> Fragment:
        """The fragment with this name."""
        return next(f for f in self.fragments if f.name == name)
