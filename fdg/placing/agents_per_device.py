"""How many agents of a device are mapped together (vmapped).

GPUs want large operations: all agents together. On CPU cores the working set should fit in the cache
(gradients of 128 agents of PPO on CartPole take 142 MB, those of 8 take 9 MB), while agents mapped together
share the overhead of small operations. Both are read from the traced program, not measured, so that equal
jobs on equally many cores compute the same bits.
"""

import math
from typing import Any

import jax

from fdg import jaxprs
from fdg.batch.collective import Collective
from fdg.batch.gradients import gradient_bytes
from fdg.batch.lengths import divisors
from fdg.batch.rules.random import has_draws_from_the_batch
from fdg.identity_cache import IdentityCache
from fdg.tracing.graph import FDG

CACHE_BYTES = 8 << 20  # of the gradients of agents that are mapped together
OPERATION_BYTES = 2000  # a core could read or write these bytes in an operation's start-up time

_KNOWN: IdentityCache[int] = IdentityCache(max_entries=64)


def agents_together(graph: FDG, agents: int, on_cpu: bool, cores: float = 1) -> int:
    """The number of agents mapped together: a divisor of the number of agents; 1 to run them one by one.

    `agents` is their number per device.
    """
    if has_draws_from_the_batch(jaxprs.open_jaxpr(graph.jaxpr)):  # mapped, they would share their draws
        return 1
    if agents == 1 or not on_cpu or graph.between_agents is not None:  # agents of a population stay in step
        return agents
    return _KNOWN(graph.jaxpr, (agents, cores), lambda: _that_fill_a_cache(graph, agents, cores))


def notes_of_agents(agents: int, together: int) -> tuple[str, ...]:
    """The plan's note, if not all agents of a device are mapped together."""
    if together == agents:
        return ()
    number = f"{together} at a time" if together > 1 else "one after another"
    return (f"each device trains its {agents} agents {number}, each through all iterations of a call",)


def notes_of_split_agents(graph: FDG) -> tuple[str, ...]:
    """The plan's note, if each agent is split over devices."""
    if graph.agents is None:
        return ()
    return (f"all {graph.agents} agents are mapped together, each on all devices, which split parameters",)


def exchanged_by_agents(graph: FDG, width: int, state: Any) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The collectives of a population's exchanges, and a note; empty for other agents."""
    between = graph.between_agents
    if between is None:
        return (), ()
    if width == 1:
        return (), (between.note,)
    leaves = jax.tree.leaves(state)
    taken = between.taken(state, graph.state_axes[: len(leaves)])
    leaves = [leaf for leaf, is_taken in zip(leaves, taken, strict=True) if is_taken]
    seen = jax.tree.leaves(jax.eval_shape(between.known, state))
    sizes = [leaf.size * leaf.dtype.itemsize * (graph.agents or 1) for leaf in (*seen, *leaves)]
    return tuple(Collective("all-gather", size, 1) for size in sizes), (between.note,)


def _that_fill_a_cache(graph: FDG, agents: int, cores: float) -> int:
    largest, all_of_them = gradient_bytes(graph.jaxpr, graph.state_axes)
    if not largest:
        return agents
    wanted = max(1.0, CACHE_BYTES / largest)
    few = min(divisors(agents), key=lambda count: abs(math.log(count / wanted)))
    operations = jaxprs.equation_count(jaxprs.open_jaxpr(graph.jaxpr))
    return few if few * all_of_them >= cores * OPERATION_BYTES * operations else agents
