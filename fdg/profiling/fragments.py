"""Builds the programs with which `profile` times fragments: one per fragment, on the devices of its group."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from fdg import jaxprs
from fdg.agents import mapped
from fdg.batch.rules.result import shape_of
from fdg.lowering import host_calls
from fdg.lowering.mesh import AGENT_AXIS, group_mesh, layout_sharding, make_mesh
from fdg.lowering.programs import on_mesh, prepare_for_vmap, setting_on, vmapped_program
from fdg.placing.layout import Layout
from fdg.placing.plans import Plan
from fdg.placing.policy import Group
from fdg.processes import distributed
from fdg.processes.arrays import put
from fdg.profiling.border import border_bytes
from fdg.profiling.repeating import Repeated
from fdg.profiling.sites import Site, inputs_of, sites
from fdg.profiling.work import Work, work_of
from fdg.running.program import is_here
from fdg.tracing.graph import Fragment


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedFragment:
    """A fragment with its group and its work."""

    site: Site  # the call of the fragment in the graph
    fragment: Fragment
    group: Group  # the group of devices that runs it
    work: Work  # the work of one call on one of the group's devices
    border: int  # bytes of inputs and outputs that a call reads and writes on one device


def place_fragments(plan: Plan) -> tuple[PlacedFragment, ...]:
    """The fragments of a plan with their groups; nothing is compiled or allocated."""
    placed = []
    for site in sites(plan.graph):
        group = plan.group_of(site.fragment.name)
        if plan.agents_per_vmap is None:
            work = work_of(site.jaxpr, site.axes, group.num_batch_parts)
            axes = (*site.axes, *site.output_axes)
            border = border_bytes(site.jaxpr, [1 if axis is None else group.num_batch_parts for axis in axes])
        else:
            jaxpr = vmapped_program(site.jaxpr, plan.agents_per_device, plan.agents_per_vmap)
            work, border = work_of(jaxpr), border_bytes(jaxpr)
        placed.append(PlacedFragment(site, site.fragment, group, work, border))
    return tuple(placed)


def fragment_benchmarks(
    plan: Plan, fragments: Sequence[PlacedFragment], devices: Sequence[jax.Device], leaves: Sequence[Any]
) -> Mapping[str, Repeated]:
    """Programs that repeat each fragment, by name; fragments without results or devices here are omitted.

    The fragments' inputs are computed from `leaves`: those of a state, on one device of this process.
    """
    # A fragment with host environments would step all of them here, but each process holds only some.
    if distributed.count() > 1 and host_calls.calls_host(jaxprs.open_jaxpr(plan.graph.jaxpr).eqns):
        return {}
    benchmarks = {}
    agents, num_repeats = _representative_agents(plan)
    leaves = leaves if agents is None else [leaf[agents] for leaf in leaves]
    values = inputs_of(plan.graph, leaves)
    for placed in fragments:
        name, site, group = placed.fragment.name, placed.site, placed.group
        if not site.outputs or name not in values or not is_here(devices[i] for i in group.devices):
            continue
        variables = jaxprs.variables(site.equation.invars)
        value_by_variable = dict(zip(variables, values[name], strict=True))
        function, shardings = on_group(plan, site, group, devices)
        arguments = [
            put(x, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
            for x, sharding in zip((value_by_variable[v] for v in site.inputs), shardings, strict=True)
        ]
        is_on_host = host_calls.calls_host([site.equation])
        # `feedback`: which outputs of a call are inputs of the next one
        benchmarks[name] = Repeated(function, arguments, site.feedback, is_on_host, num_repeats)
    return benchmarks


def on_group(
    plan: Plan, site: Site, group: Group, devices: Sequence[jax.Device]
) -> tuple[Callable, list[NamedSharding]]:
    """A fragment's function on its group, and the shardings of its inputs."""
    if (per_vmap := plan.agents_per_vmap) is not None:
        mesh = make_mesh([devices[i] for i in group.devices], AGENT_AXIS)
        agents_spec = PartitionSpec(AGENT_AXIS)
        setting = setting_on(mesh, site.axes, site.output_axes)
        agent_jaxpr = prepare_for_vmap(site.jaxpr, per_vmap, setting)
        function = jax.shard_map(
            mapped(core.jaxpr_as_fun(agent_jaxpr), agents=per_vmap, agents_per_vmap=per_vmap),
            mesh=mesh,
            in_specs=agents_spec,
            out_specs=agents_spec,
            check_vma=False,
        )
        return function, [NamedSharding(mesh, agents_spec)] * len(site.inputs)
    mesh = group_mesh(group, devices)
    layouts = [_layout(plan, group, v, axis) for v, axis in zip(site.inputs, site.axes, strict=True)]
    pairs = zip(layouts, site.axes, strict=True)
    specs = [layout.spec if axis is None else None for layout, axis in pairs] if group.shards else None
    constrained = on_mesh(site.jaxpr, mesh, site.axes, site.output_axes, specs)
    return core.jaxpr_as_fun(constrained), [layout_sharding(mesh, layout) for layout in layouts]


def _layout(plan: Plan, group: Group, v: core.Var, axis: int | None) -> Layout:
    """The layout of a value: split along its batch axis, or else like a sharded leaf of the same shape."""
    if axis is None:
        for leaf in plan.sharded:
            if leaf.group == group.name and leaf.layout.shape == shape_of(v):
                return leaf.layout
    return Layout.of_batch(shape_of(v), axis, group.mesh)


def _representative_agents(plan: Plan) -> tuple[np.ndarray | None, int]:
    """The agents to profile, as rows of the state, and how often a device repeats their work in an iteration.

    Each device vmaps a few agents at a time and profiles the first few. None for a plan without agents.
    """
    if plan.agents_per_vmap is None:
        return None, 1
    first_agents = np.arange(len(plan.groups[0])) * plan.agents_per_device  # the first agent of each device
    agents = (first_agents[:, None] + np.arange(plan.agents_per_vmap)).reshape(-1)
    return agents, plan.agents_per_device // plan.agents_per_vmap
