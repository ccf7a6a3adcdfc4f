"""The work of each program of a plan on one of its devices, from which `prediction` computes seconds.

The programs are first rewritten, as they are before compilation. Examples of what each device then computes:

    GPUOnly on 4 devices         one program, a quarter of the batch on each
    actors (3) + learners (1)    act+step with a third of the batch on each actor; learn with the whole batch
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from fdg.batch.collective import Collective
from fdg.batch.rules.result import Axis
from fdg.cores import min_cores_per_process
from fdg.costs.hardware import Cluster
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.programs import prepare_for_vmap, vmapped_program
from fdg.lowering.rewriting import Setting, rewrite_all
from fdg.placing.layout import model_axis
from fdg.placing.plans import Plan, PlannedProgram, SteppedPlan
from fdg.placing.policy import Group
from fdg.placing.sharded import layouts_by_position
from fdg.profiling.work import Work, work_of


@dataclasses.dataclass(frozen=True)
class ProgramWork:
    """The work of one run of a program."""

    name: str  # the program's name
    group: Group
    work: Work  # on one of the group's devices
    num_arrays: int  # arguments and results, which the host handles
    collectives: tuple[Collective, ...]  # among the group's devices


def program_works(plan: Plan, cluster: Cluster) -> tuple[ProgramWork, ...]:
    """The work of a plan's programs, in order; compiles and allocates nothing."""
    array_counts = [len(call.inputs) + len(call.outputs) for call, _ in plan.calls()]
    array_counts = array_counts or [2 * len(plan.graph.state_axes)]
    return tuple(
        ProgramWork(program.name, group, work, count, _collectives_of(plan, program))
        for program, (group, work), count in zip(
            plan.programs, _group_works(plan, cluster), array_counts, strict=True
        )
    )


_WITHOUT_PARAMETERS = ("environment", "buffer", "update")  # roles that gather no parameters


def _collectives_of(plan: Plan, program: PlannedProgram) -> tuple[Collective, ...]:
    """The collectives in one run of a program; estimated if parameters are sharded.

    The estimate follows fully sharded data parallelism (Rajbhandari et al., arXiv 1910.02054, section 7.2):
    parameters are gathered for the forward and the backward pass, and gradients are scattered. Both have the
    size of the gradients that `update` reads; a fragment whose border has fewer bytes reads no parameters.
    """
    if program.collectives or program.group not in plan.unpredicted:  # groups with sharded parameters
        return program.collectives
    graph = plan.graph
    roles = {fragment.name: fragment.role for fragment in graph.fragments}
    gradients = [e for e in graph.edges if (roles[e.source], roles[e.target]) == ("gradient", "update")]
    size = max((edge.bytes_per_crossing for edge in gradients), default=0)
    parents = {fragment.parent for fragment in graph.fragments}
    collectives = []
    for fragment in graph.fragments:
        if fragment.name not in program.fragments or fragment.name in parents:
            continue
        if fragment.role in _WITHOUT_PARAMETERS or not fragment.bytes_per_call >= size > 0:
            continue
        calls = max(1, fragment.calls_per_iteration // program.calls_per_iteration)
        if fragment.role == "gradient":  # a forward and a backward pass
            collectives.append(Collective("all-gather", size, 2 * calls, (fragment.name,)))
            collectives.append(Collective("reduce-scatter", size, calls, (fragment.name,)))
        else:
            collectives.append(Collective("all-gather", size, calls, (fragment.name,)))
    return tuple(collectives)


def _group_works(plan: Plan, cluster: Cluster) -> Iterator[tuple[Group, Work]]:
    """Each program's group and its work on one device, summed over the agents on that device."""
    if isinstance(plan, SteppedPlan):
        groups = {group.name: group for group in plan.groups}
        for call, _ in plan.calls():
            group = groups[call.group]
            axes, output_axes = ([value.axis for value in side] for side in (call.inputs, call.outputs))
            setting = _setting(axes, output_axes, group, cluster)
            model_axes = [model_axis(value.layout) for value in call.inputs]
            jaxpr = rewrite_all(call.jaxpr, setting)
            yield group, work_of(jaxpr, axes, group.num_batch_parts, model_axes, group.model)
        return
    (group,), graph = plan.groups, plan.graph
    setting = _setting(graph.state_axes, graph.output_axes, group, cluster)
    agents, per_vmap = plan.agents_per_device, plan.agents_per_vmap
    if per_vmap is None:
        layouts = layouts_by_position(plan.sharded, group.name)
        model_axes = [model_axis(layouts.get(i)) for i in range(len(graph.state_axes))]
        jaxpr = rewrite_all(graph.jaxpr, setting)
        yield group, work_of(jaxpr, graph.state_axes, group.num_batch_parts, model_axes, group.model)
        return
    single_jaxpr = prepare_for_vmap(graph.jaxpr, per_vmap, setting._replace(devices=1, sharded=False))
    work = work_of(single_jaxpr) if agents == 1 else _vmapped_work(single_jaxpr, agents, per_vmap)
    yield group, work


@functools.lru_cache(maxsize=64)
def _vmapped_work(jaxpr: ClosedJaxpr, agents: int, agents_per_vmap: int) -> Work:
    """The work of `agents` agents on one device, which vmaps `agents_per_vmap` of them at a time."""
    return work_of(vmapped_program(jaxpr, agents, agents_per_vmap))


def _setting(axes: Sequence[Axis], output_axes: Sequence[Axis], group: Group, cluster: Cluster) -> Setting:
    """The properties of a group's program and devices on which its rewrites depend."""
    part = cluster.part_of(group.devices)
    num_parts, on_cpu = group.num_batch_parts, part.kind.platform == "cpu"
    all_cores = occupies_all_cores(group, part)
    return Setting(tuple(axes), num_parts, tuple(output_axes), on_cpu, all_cores, sharded=group.shards)


def occupies_all_cores(group: Group, cluster: Cluster) -> bool:
    """Whether a group has at least as many CPU devices on one machine as the machine has cores."""
    cores = min_cores_per_process() if cluster.cores is None else cluster.cores
    return cluster.kind.platform == "cpu" and min(len(group), cluster.devices_per_machine) >= cores
