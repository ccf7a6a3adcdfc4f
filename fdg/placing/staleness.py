"""Staleness: the graph in which actors use parameters that are some iterations old.

The delay is written into the iteration itself, before anything is placed: the state gets a history of what
actors wait for, and what reaches an actor is read from its old end. The result is a graph like any other,
so that on any number of devices, one included, it has the same numbers.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.errors import PlanError
from fdg.fragment import FragmentMark, boundary_p
from fdg.placing.opening import inline
from fdg.placing.regions import Operation
from fdg.tracing.graph import FDG
from fdg.tracing.trace import read_graph


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """An algorithm's state, and the older parameters that its actors have yet to use.

    It reads like the state itself: `delayed.parameters` is `delayed.state.parameters`, and `delayed["w"]`
    is `delayed.state["w"]`.

    Attributes:
      state: the algorithm's own.
      history: the delayed leaves of earlier states, oldest first: one tuple for each iteration of staleness.
    """

    state: Any
    history: tuple[tuple[Any, ...], ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("state", "history"):
            raise AttributeError(name)
        return getattr(self.state, name)

    def __getitem__(self, key: Any) -> Any:
        return self.state[key]

    def tree_flatten_with_keys(self) -> Any:
        """For JAX."""
        keys = jax.tree_util.GetAttrKey("state"), jax.tree_util.GetAttrKey("history")
        return tuple(zip(keys, (self.state, self.history), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Sequence[Any]) -> "DelayedState":
        """For JAX."""
        return cls(*children)


@dataclasses.dataclass(frozen=True)
class Delay:
    """What was delayed: `staleness` iterations, for the leaves of the algorithm's state at `leaves`."""

    staleness: int
    leaves: tuple[int, ...]

    def start(self, state: Any) -> DelayedState:
        """The first state: no parameters are older than the initial ones."""
        leaves = jax.tree.leaves(state)
        old = tuple(leaves[i] for i in self.leaves)
        # Copies, for a donated buffer cannot be given up twice.
        copies = tuple(tuple(jax.numpy.copy(x) for x in old) for _ in range(self.staleness))
        return DelayedState(state, copies)


def delay(graph: FDG, assignment: Mapping[str, str], staleness: int, policy: Any) -> tuple[FDG, Delay]:
    """The graph whose actors use parameters `staleness` iterations old, and what that delays.

    Delayed are the leaves of the state that reach an actor, if their next value comes from a fragment that
    the policy places in another group than this actor, such as parameters from a learner. In iteration t the
    actor reads their value at the start of iteration t - staleness, and the first value before there is one.

    Args:
      assignment: the group of each fragment, as the policy names it.

    Raises:
      PlanError: what an actor uses is changed by another group within the iteration (inside a loop around
        both), or reaches fragments of the other group in the same loop.
    """
    opened = inline(graph.jaxpr)
    num_state = len(graph.state_axes)
    operations = opened.region.items
    inputs = opened.region.inputs[:num_state]
    flow = _Flow(graph, [eqn for op in operations if isinstance(op, Operation) for eqn in [op.eqn]])
    arrivals = flow.arrivals({v: {i} for i, v in enumerate(inputs)})
    actors = [f.name for f in graph.fragments if f.role == "actor"]
    delayed = []
    for i, end in enumerate(opened.region.outputs[:num_state]):
        makers = {label for label in arrivals.labels[end] if isinstance(label, str)}
        for actor in actors:
            others = {maker for maker in makers if assignment[maker] != assignment[actor]}
            if i in arrivals.at[actor] and others:
                delayed.append(i)
                break
    late = frozenset(delayed)
    history = [[core.Var(inputs[i].aval) for i in delayed] for _ in range(staleness)]
    old: dict[Any, Any] = dict(zip((inputs[i] for i in delayed), history[0], strict=True)) if delayed else {}
    equations: list[core.JaxprEqn] = []

    def is_late(v: Any) -> bool:
        return not jaxprs.is_literal(v) and any(label in late for label in arrivals.labels[v])

    def old_version(v: Any) -> Any:
        """The variable as it was; code between fragments that leads to it is repeated on old values."""
        if jaxprs.is_literal(v) or not is_late(v):
            return v
        if v not in old:
            eqn = flow.producer[v]
            copy = eqn.replace(
                invars=[old_version(operand) for operand in eqn.invars],
                outvars=[o if isinstance(o, core.DropVar) else core.Var(o.aval) for o in eqn.outvars],
            )
            old.update(zip(eqn.outvars, copy.outvars, strict=True))
            equations.append(copy)
        return old[v]

    for op in operations:
        eqn = op.eqn  # type: ignore[union-attr]
        operands = list(eqn.invars)
        for position, v in enumerate(eqn.invars):
            if not is_late(v) or not op.fragments:  # type: ignore[union-attr]
                continue
            reached = flow.reached(eqn, position)
            acting = [name for name in reached if name in actors]
            if not acting:
                continue
            apart = [name for name in reached if assignment[name] != assignment[acting[0]]]
            if apart:
                actor, other = acting[0], apart[0]
                raise PlanError(
                    f"{policy}: staleness={staleness} counts iterations, but within one iteration '{actor}'"
                    f" ({assignment[actor]}) and '{other}' ({assignment[other]}) take turns with the"
                    f" same parameters: use staleness=0, or let the loop around them end before the update"
                )
            operands[position] = old_version(v)
        equations.append(eqn.replace(invars=operands))

    constants = opened.region.inputs[num_state:]
    new_inputs = [*inputs, *(v for row in history for v in row)]
    shifted = [v for row in history[1:] for v in row] + [inputs[i] for i in delayed]
    ends = opened.region.outputs
    new_outputs = [*ends[:num_state], *(shifted if delayed else []), *ends[num_state:]]
    jaxpr = jaxprs.build(new_inputs, new_outputs, equations, constants, opened.constants)
    what = Delay(staleness, tuple(delayed))
    leaves = jax.tree.leaves(graph.state)
    rows = tuple(tuple(leaves[i] for i in delayed) for _ in range(staleness))
    return read_graph(graph.name, jaxpr, DelayedState(graph.state, rows), graph.metrics), what


@dataclasses.dataclass
class _Arrivals:
    """Labels of each variable, and those that arrive at each fragment."""

    labels: dict[Any, set]
    at: dict[str, set]


class _Flow:
    """Follows labels through code between fragments; what a fragment computes carries its name."""

    def __init__(self, graph: FDG, equations: Sequence[core.JaxprEqn]):
        self.graph, self.equations = graph, equations
        self.producer = {v: eqn for eqn in equations for v in eqn.outvars}
        self._names: dict[tuple, str] = {}
        used: collections.Counter[str] = collections.Counter()
        for eqn in equations:
            self._name(eqn, used, ())

    def _name(self, eqn: core.JaxprEqn, used: collections.Counter, path: tuple) -> None:
        mark = FragmentMark.of(eqn)
        if mark is not None:
            used[mark.name] += 1
            count = used[mark.name]
            self._names[(*path, id(eqn))] = mark.name if count == 1 else f"{mark.name}.{count}"
        for k, body in enumerate(jaxprs.bodies(eqn)):
            for inner in body.jaxpr.eqns:
                self._name(inner, used, (*path, id(eqn), k))

    def arrivals(self, labels: Mapping[Any, set]) -> _Arrivals:
        """Follows labels of the iteration's inputs to its end."""
        found = _Arrivals(collections.defaultdict(set, {v: set(x) for v, x in labels.items()}),
                          {f.name: set() for f in self.graph.fragments})  # fmt: skip
        for eqn in self.equations:
            inputs = [set() if jaxprs.is_literal(v) else found.labels[v] for v in eqn.invars]
            for v, result in zip(eqn.outvars, self._through(eqn, inputs, (), found.at), strict=True):
                found.labels[v] = result
        return found

    def reached(self, eqn: core.JaxprEqn, position: int) -> list[str]:
        """Fragments that read an equation's operand, through code between them."""
        at: dict[str, set] = {f.name: set() for f in self.graph.fragments}
        marker = object()
        inputs: list[set] = [{marker} if i == position else set() for i in range(len(eqn.invars))]
        self._through(eqn, inputs, (), at)
        return [name for name, labels in at.items() if marker in labels]

    def _through(
        self,
        eqn: core.JaxprEqn,
        inputs: list[set],
        path: tuple,
        at: dict[str, set],
        inside: str | None = None,
    ) -> list[set]:
        """Labels of an equation's results; `inside` is the fragment around it."""
        name = self._names.get((*path, id(eqn)))
        inner = jaxprs.bodies(eqn)
        if name is not None:
            at[name] |= set().union(*inputs)
        results: list[set] = [set() for _ in eqn.outvars]
        for k, body in enumerate(inner):
            values = [set(inputs[i]) for i in body.operands]
            while True:
                labels: dict[Any, set] = dict(zip(body.jaxpr.invars, values, strict=True))
                for one in body.jaxpr.eqns:
                    operands = [
                        labels.get(v, set()) if not jaxprs.is_literal(v) else set() for v in one.invars
                    ]
                    out = self._through(one, operands, (*path, id(eqn), k), at, name or inside)
                    labels.update(zip(one.outvars, out, strict=True))
                ends = [set() if jaxprs.is_literal(v) else labels.get(v, set()) for v in body.jaxpr.outvars]
                grown = [set(v) for v in values]
                for i, j in body.carry:
                    grown[i] |= ends[j]
                if grown == values:
                    break
                values = grown
            for position, j in enumerate(body.results):
                results[position] |= ends[j]
        if inner:
            return results
        if inside is not None and eqn.primitive is not boundary_p:
            return [{inside} for _ in eqn.outvars]
        return [set().union(*inputs) for _ in eqn.outvars]
