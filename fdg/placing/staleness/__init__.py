"""Staleness: rewrites a graph so that a group's fragments use parameters from earlier iterations.

    w -> act(w, x) -> y -> learn(w, y) -> w'            act on actors, learn on learners, staleness 1

    w, old w -> act(old w, x) -> y -> learn(w, y) -> w', w

The state gets a history of the delayed leaves: their values at the start of earlier iterations. A fragment
that uses parameters of age k reads the values from k iterations ago. The result is an ordinary graph, which
is placed like any other, so training gives the same numbers on any number of devices.

`lag` determines the age of each fragment's inputs in micro-batches, and splits the scan over micro-batches
where an age changes. `values` tracks which state leaves and fragments each value comes from. `readers`
decides which version of each value a fragment reads. `versions` rewrites the iteration, with one variable per
version that is read.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.placing.staleness.lag import Ages, micro_batches, with_lag
from fdg.placing.staleness.readers import Readers
from fdg.placing.staleness.state import Delay, DelayedState, algorithm_state
from fdg.placing.staleness.values import Block, Versioned
from fdg.placing.staleness.versions import BlockRewriter
from fdg.tracing.graph import FDG
from fdg.tracing.trace import read_graph

__all__ = [
    "Ages",
    "Delay",
    "DelayedState",
    "algorithm_state",
    "delay",
    "micro_batches",
    "with_lag",
]


def delay(graph: FDG, assignment: Mapping[str, str], ages: Ages, policy: Any) -> tuple[FDG, Delay]:
    """Rewrites a graph so that groups with actors use parameters from some iterations ago.

    `assignment` maps each fragment to its group. Returns the new graph, and what it delays.

    A group is delayed if it has a fragment of the role `actor`. For such a group, a leaf of the state is
    delayed if both are true:

    - A fragment of the group, of any role, reads the leaf's value from the start of the iteration (directly,
      or through code between fragments).
    - A fragment of another group, other than an environment, computes the leaf's next value.

    In iteration t, a fragment of the group reads the leaf's value from the start of iteration t - age; in the
    first iterations, its initial value. All other reads get the newest value: reads by other groups, of other
    leaves, and of values that another group computes in the same iteration.

    A nested fragment reads the same versions as the fragment around it, whatever its group is. But a group
    always reads the newest version of the leaves that it computes itself. If a delayed group needs results of
    code between fragments, that code is repeated with the old values. A fragment that returns an input as it
    is does not count as its producer.
    """
    leaves = [Versioned(v.aval, frozenset({i})) for i, v in enumerate(jaxprs.open_jaxpr(graph.jaxpr).invars)]
    block, count = Block(graph.jaxpr, leaves), len(leaves)
    names = [
        f"state{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(graph.state)
    ]
    readers = Readers(graph.fragments, assignment, ages, block.outputs[:count], names, str(policy))
    rewriter = BlockRewriter(block, [{None}] * len(block.outputs), readers)

    old_readers = [
        {reader for reader in rewriter.need.get(v, ()) if readers.version(v, reader)} for v in leaves
    ]
    delayed = [i for i, leaf_readers in enumerate(old_readers) if leaf_readers]
    delayed_readers = set().union(*old_readers)
    readers_in_order = tuple(f.name for f in graph.fragments if f.name in delayed_readers)
    result = Delay(ages.oldest, tuple(delayed), readers_in_order, ages.lag, ages.micro_batches)
    shapes = jax.tree.leaves(graph.state)
    state = DelayedState(graph.state, tuple(tuple(shapes[i] for i in delayed) for _ in range(ages.oldest)))
    if not delayed:
        return read_graph(graph.name, graph.jaxpr, state, graph.metrics), result
    outputs = [rewriter.read(v, [None]) for v in block.outputs]
    newest = [rewriter.read(v, [None]) for v in leaves]
    history = [(leaves[i], frozenset({(i, age)})) for age in range(ages.oldest, 0, -1) for i in delayed]
    history_variables = [rewriter.vars.setdefault(pair, core.Var(pair[0].aval)) for pair in history]
    next_history = [*history_variables[len(delayed) :], *(newest[i] for i in delayed)]
    inputs = [*((v, frozenset()) for v in leaves), *history]
    closed = rewriter.build(inputs, [*outputs[:count], *next_history, *outputs[count:]], checked=True)
    return read_graph(graph.name, closed, state, graph.metrics), result
