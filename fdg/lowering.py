"""Lowering: from a graph and a plan to XLA programs.

Fragments that share their devices become one program. The traced iteration stays as it is, in the
global view; only its fragment borders change, from an identity to a sharding constraint that splits
the declared batch axis over the group's devices. XLA's partitioner derives the rest and inserts the
collectives, so a policy cannot change the mathematics.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from fdg.graph import FDG
from fdg.placement import Plan
from fdg.sharding import BATCH, SEED, batch_sharding, constrain, make_mesh


class Lowered:
    """One program: its training loop as a function of the state's leaves, and how those are sharded."""

    def __init__(self, loop: Callable[..., tuple[list, list]], shardings: list, metrics_sharding: Any):
        self.loop, self.shardings, self.metrics_sharding = loop, shardings, metrics_sharding


def lower_shared(graph: FDG, plan: Plan, devices: Sequence[jax.Device]) -> Lowered:
    """The program of a plan whose fragments all share their devices."""
    mesh = make_mesh([devices[i] for i in plan.groups[0].devices], BATCH)
    jaxpr = graph.jaxpr if mesh.size == 1 else constrain(graph.jaxpr, mesh, graph.state_axes)
    iterate = core.jaxpr_as_fun(jaxpr)
    axes = [
        axis if axis is not None and leaf.shape[axis] % mesh.size == 0 else None
        for axis, leaf in zip(graph.state_axes, jax.tree.leaves(graph.state), strict=True)
    ]
    shardings = [batch_sharding(mesh, axis) for axis in axes]
    loop = functools.partial(_loop, iterate, len(shardings))
    return Lowered(loop, shardings, batch_sharding(mesh, None))


def lower_seeds(graph: FDG, plan: Plan, devices: Sequence[jax.Device]) -> Lowered:
    """The program of independent agents: each device steps its own together, and none talks to another."""
    mesh = make_mesh([devices[i] for i in plan.groups[0].devices], SEED)
    agents, record = PartitionSpec(SEED), PartitionSpec(None, SEED)
    iterate = jax.vmap(core.jaxpr_as_fun(graph.jaxpr))
    num_state = len(graph.state_axes)

    def loop(leaves, iterations):
        local = functools.partial(_loop, iterate, num_state, iterations=iterations)
        return jax.shard_map(
            local, mesh=mesh, in_specs=(agents,), out_specs=(agents, record), check_vma=False
        )(leaves)

    return Lowered(loop, [NamedSharding(mesh, agents)] * num_state, NamedSharding(mesh, record))


def _loop(iterate: Callable, num_state: int, leaves: list, iterations: int) -> tuple[list, list]:
    def step(leaves, _):
        results = iterate(*leaves)
        return list(results[:num_state]), list(results[num_state:])

    return jax.lax.scan(step, list(leaves), None, length=iterations)
