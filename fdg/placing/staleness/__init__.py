"""Staleness: the graph in which a group of fragments uses parameters that are some iterations old.

    w -> act(w, x) -> y -> learn(w, y) -> w'            act on actors, learn on learners, staleness 1

    w, old w -> act(old w, x) -> y -> learn(w, y) -> w', w

The delay is written into the iteration itself, before anything is placed: the state gets a history of what a
group waits for, and what that group's fragments read comes from its old end. The result is a graph like any
other, so that on any number of devices, one included, it has the same numbers. `flow` follows values forwards
to say which come from the state unchanged, `demand` backwards to say who reads them, and `rewrite` writes it
down.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.placing.staleness.demand import Demand, Question, Reads
from fdg.placing.staleness.flow import Flow
from fdg.placing.staleness.rewrite import Rewriter
from fdg.placing.staleness.state import Delay, DelayedState
from fdg.tracing.graph import FDG
from fdg.tracing.trace import read_graph

__all__ = ["Delay", "DelayedState", "delay"]


def delay(graph: FDG, assignment: Mapping[str, str], staleness: int, policy: Any) -> tuple[FDG, Delay]:
    """The graph in which groups that wait for parameters use those of `staleness` iterations ago.

    A group waits if a fragment of the role `actor` lives there. Delayed for it is each leaf of the state that
    a fragment of the group, of any role, reads as it was at the start of the iteration (also through code
    between fragments), and whose next value another group's fragment makes. In iteration t the group reads
    the leaf as it was at the start of iteration t - staleness, and the first value before there is one.
    Everything else, and everybody else, reads the newest; so does the group, where another makes it in the
    same iteration. Code between fragments is repeated on old values where it leads to the group; a value that
    a fragment hands on unchanged is not its product.

    Args:
      assignment: the group of each fragment, as the policy names it.

    Raises:
      PlanError: an actor uses what another group changes within the same loop; a fragment may have handed a
        delayed value on or not; a branch or loop around fragments depends on a delayed value; code with an
        effect would have to be repeated.
    """
    waiting = frozenset(assignment[f.name] for f in graph.fragments if f.role == "actor")
    jaxpr, num_state = jaxprs.open_jaxpr(graph.jaxpr), len(graph.state_axes)
    flow = Flow(assignment)
    top = flow.block(jaxpr, [frozenset({i}) for i in range(num_state)])
    makers = [{x for x in top.origins_of(v) if isinstance(x, str)} for v in jaxpr.outvars[:num_state]]
    late = {
        i: frozenset(group for group in waiting if any(assignment[maker] != group for maker in found))
        for i, found in enumerate(makers)
    }
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(graph.state)]
    actors = frozenset(f.name for f in graph.fragments if f.role == "actor")
    where = f"{policy}: staleness={staleness}"
    demand = Demand(flow, Question(assignment, waiting, actors, late, [f"state{n}" for n in names], where))
    newest: Reads = {(None, None)}
    demand.run(top, [newest] * len(jaxpr.outvars))
    delayed = [i for i, v in enumerate(jaxpr.invars) if any(demand.versions(top, v))]
    what = Delay(staleness, tuple(delayed), _readers(graph, top.need, jaxpr.invars))
    leaves = jax.tree.leaves(graph.state)
    rows = tuple(tuple(leaves[i] for i in delayed) for _ in range(staleness))
    if not delayed:
        return read_graph(graph.name, graph.jaxpr, DelayedState(graph.state, rows), graph.metrics), what

    history = [[core.Var(jaxpr.invars[i].aval) for i in delayed] for _ in range(staleness)]
    inputs: dict[tuple[Any, Any], Any] = {(v, None): v for v in jaxpr.invars}
    for i, old in zip(delayed, history[0], strict=True):
        inputs.update({(jaxpr.invars[i], group): old for group in waiting})
    rewriter = Rewriter(demand)
    new = rewriter.run(top, inputs)
    ends = [rewriter.look_up(new, v, None) for v in jaxpr.outvars]
    shifted = [*(v for row in history[1:] for v in row), *(jaxpr.invars[i] for i in delayed)]
    closed = jaxprs.build(
        [*jaxpr.invars, *(v for row in history for v in row)],
        [*ends[:num_state], *shifted, *ends[num_state:]],
        new.equations,
        [*jaxpr.constvars, *(v for v, _ in new.constants)],
        [*jaxprs.constants_of(graph.jaxpr), *(value for _, value in new.constants)],
    )
    return read_graph(graph.name, closed, DelayedState(graph.state, rows), graph.metrics), what


def _readers(graph: FDG, need: Mapping[Any, Reads], leaves: Any) -> tuple[str, ...]:
    """Fragments that read an older version of a leaf."""
    found = {reader for v in leaves for version, reader in need.get(v, ()) if version}
    return tuple(f.name for f in graph.fragments if f.name in found)
