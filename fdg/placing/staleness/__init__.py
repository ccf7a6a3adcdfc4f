"""Staleness: the graph in which a group of fragments uses parameters that are some iterations old.

    w -> act(w, x) -> y -> learn(w, y) -> w'            act on actors, learn on learners, staleness 1

    w, old w -> act(old w, x) -> y -> learn(w, y) -> w', w

The delay is written into the iteration itself, before anything is placed: the state gets a history of what a
group waits for, and what that group's fragments read comes from its old end. The result is a graph like any
other, so that on any number of devices, one included, it has the same numbers.

`values` says what each value comes from, `readers` which version of it each fragment reads, and `versions`
writes the iteration again, with a variable for each version that is read.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.placing.staleness.readers import Readers
from fdg.placing.staleness.state import Delay, DelayedState
from fdg.placing.staleness.values import Block, Value
from fdg.placing.staleness.versions import Written
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
    same iteration. A fragment within another reads what that one reads, wherever it is placed, but a group
    always the newest of what it makes itself. Code between fragments is repeated on old values where it leads
    to the group; a value that a fragment hands on unchanged is not its product.

    Args:
      assignment: the group of each fragment, as the policy names it.

    Raises:
      PlanError: an actor uses what another group changes within the same loop; a fragment may have handed a
        delayed value on or not; a branch or loop around fragments depends on a delayed value; code with an
        effect would have to be repeated.
    """
    leaves = [Value(v.aval, frozenset({i})) for i, v in enumerate(jaxprs.open_jaxpr(graph.jaxpr).invars)]
    block, count = Block(graph.jaxpr, leaves), len(leaves)
    names = [
        f"state{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(graph.state)
    ]
    where = f"{policy}: staleness={staleness}"
    readers = Readers(graph.fragments, assignment, staleness, block.ends[:count], names, where)
    new = Written(block, [{None}] * len(block.ends), readers)

    old = [{reader for reader in new.need.get(v, ()) if readers.version(v, reader)} for v in leaves]
    delayed = [i for i, found in enumerate(old) if found]
    late = set().union(*old)
    what = Delay(staleness, tuple(delayed), tuple(f.name for f in graph.fragments if f.name in late))
    shapes = jax.tree.leaves(graph.state)
    state = DelayedState(graph.state, tuple(tuple(shapes[i] for i in delayed) for _ in range(staleness)))
    if not delayed:
        return read_graph(graph.name, graph.jaxpr, state, graph.metrics), what
    ends = [new.read(v, [None]) for v in block.ends]
    newest = [new.read(v, [None]) for v in leaves]
    history = [(leaves[i], frozenset({(i, age)})) for age in range(staleness, 0, -1) for i in delayed]
    older = [new.names.setdefault(pair, core.Var(pair[0].aval)) for pair in history]
    shifted = [*older[len(delayed) :], *(newest[i] for i in delayed)]
    inputs = [*((v, frozenset()) for v in leaves), *history]
    closed = new.build(inputs, [*ends[:count], *shifted, *ends[count:]], checked=True)
    return read_graph(graph.name, closed, state, graph.metrics), what
