"""Chooses how many agents of a device are vmapped together, and describes the agents of a plan.

GPUs need large operations, so all agents are vmapped together. On a CPU, the working set of many agents does
not fit in the cache: the gradients of PPO on CartPole take 9 MB for 8 agents and 142 MB for 128. With few
agents, the fixed overhead of each operation dominates. The working set and the number of operations come from
the traced program, not from timings, so the same job on the same number of cores computes the same bits.
"""

import functools
import math
from typing import Any

import jax

from fdg import jaxprs
from fdg.batch.collective import Collective
from fdg.batch.gradients import gradient_bytes
from fdg.batch.lengths import divisors
from fdg.batch.rules.random import has_batch_dependent_draws
from fdg.jax_internals import ClosedJaxpr
from fdg.tracing.graph import FDG

TARGET_GRADIENT_BYTES = 8 << 20  # the target for the gradients of all agents in one vmap
OPERATION_BYTES = 2000  # what a core reads or writes in the time of an operation's fixed overhead


def agents_per_vmap(graph: FDG, agents: int, on_cpu: bool, cores: float = 1) -> int:
    """The number of agents to vmap together: a divisor of `agents`; 1 runs the agents one after another.

    `agents` is the number of agents per device, and `cores` the number of cores per device.
    """
    if has_batch_dependent_draws(jaxprs.open_jaxpr(graph.jaxpr)):  # under vmap, agents draw equal numbers
        return 1
    # Agents of a population copy from each other after each iteration, so they advance together.
    if agents == 1 or not on_cpu or graph.between_agents is not None:
        return agents
    return _agents_in_cache(graph.jaxpr, graph.state_axes, agents, cores)


def vmap_notes(agents: int, per_vmap: int) -> tuple[str, ...]:
    """The plan's note, if not all agents of a device are vmapped together."""
    if per_vmap == agents:
        return ()
    batching = f"{per_vmap} at a time" if per_vmap > 1 else "one after another"
    return (f"each device trains its {agents} agents {batching}, each through all iterations of a call",)


def sharded_agents_notes(graph: FDG) -> tuple[str, ...]:
    """The plan's note, if each agent's parameters are sharded over devices."""
    if graph.agents is None:
        return ()
    return (f"all {graph.agents} agents are vmapped; each agent's parameters are sharded over all devices",)


def population_collectives(
    graph: FDG, num_devices: int, state: Any
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The collectives of copying between the agents of a population, and notes for the plan.

    Both are empty if the agents are independent. `state` is one agent's state, a pytree of shapes.
    """
    between = graph.between_agents
    if between is None:
        return (), ()
    if num_devices == 1:
        return (), (between.note,)
    leaves = jax.tree.leaves(state)
    copy_flags = between.taken(state, graph.state_axes[: len(leaves)])
    leaves = [leaf for leaf, is_copied in zip(leaves, copy_flags, strict=True) if is_copied]
    gathered = jax.tree.leaves(jax.eval_shape(between.known, state))
    sizes = [leaf.size * leaf.dtype.itemsize * (graph.agents or 1) for leaf in (*gathered, *leaves)]
    return tuple(Collective("all-gather", size, 1) for size in sizes), (between.note,)


@functools.lru_cache(maxsize=64)
def _agents_in_cache(jaxpr: ClosedJaxpr, axes: tuple[int | None, ...], agents: int, cores: float) -> int:
    """The divisor of `agents` with gradients closest to the target size; `agents` if overhead dominates."""
    gradients = gradient_bytes(jaxpr, axes)
    if not gradients.largest:
        return agents
    target = max(1.0, TARGET_GRADIENT_BYTES / gradients.largest)
    count = min(divisors(agents), key=lambda divisor: abs(math.log(divisor / target)))
    operations = jaxprs.equation_count(jaxprs.open_jaxpr(jaxpr))
    return count if count * gradients.total >= cores * OPERATION_BYTES * operations else agents
