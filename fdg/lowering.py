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
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs
from fdg.fragment import boundary_p
from fdg.graph import FDG
from fdg.placement import Plan

BATCH, SEED = "batch", "seed"  # names of the mesh axes


def make_mesh(devices: Sequence[jax.Device], axis: str) -> Mesh:
    """A mesh of one axis, in the devices' order."""
    return Mesh(np.array(devices, dtype=object), (axis,), axis_types=(AxisType.Auto,))


def batch_sharding(mesh: Mesh, axis: int | None) -> NamedSharding:
    """Split along `axis` over the mesh; a copy on each device if None."""
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, BATCH))


def constrain(jaxpr: core.ClosedJaxpr, mesh: Mesh) -> core.ClosedJaxpr:
    """Replaces each fragment border by the sharding that the mesh gives its batch axis."""

    @functools.cache
    def constraint(shape, dtype, axis):
        if axis is not None and shape[axis] % mesh.size:
            return None  # left to the partitioner; the plan lets no fragment's own batch get here
        sharding = batch_sharding(mesh, axis)
        traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
            jax.ShapeDtypeStruct(shape, dtype)
        )
        return traced.eqns[0]

    def change(eqn):
        if eqn.primitive is not boundary_p:
            return eqn
        aval = eqn.invars[0].aval
        model = constraint(aval.shape, aval.dtype, eqn.params["axis"])
        return eqn if model is None else eqn.replace(primitive=model.primitive, params=model.params)

    lowered = jaxprs.map_equations(jaxprs.open_jaxpr(jaxpr), change)
    core.check_jaxpr(lowered)
    return jaxprs.with_jaxpr(jaxpr, lowered)


class Lowered:
    """One program: its training loop as a function of the state's leaves, and how those are sharded."""

    def __init__(self, loop: Callable[..., tuple[list, list]], shardings: list, metrics_sharding: Any):
        self.loop, self.shardings, self.metrics_sharding = loop, shardings, metrics_sharding


def lower_shared(graph: FDG, plan: Plan, devices: Sequence[jax.Device]) -> Lowered:
    """The program of a plan whose fragments all share their devices."""
    mesh = make_mesh([devices[i] for i in plan.groups[0].devices], BATCH)
    jaxpr = graph.jaxpr if mesh.size == 1 else constrain(graph.jaxpr, mesh)
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
