"""The work of each program of a plan on one of its devices, to be priced on any cluster.

Programs are rewritten as for compiling:

    GPUOnly on 4 devices         one program, a quarter of the batch on each
    actors (3) + learners (1)    act+step with a third of it; learn with all of it
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from fdg.batch.collective import Collective
from fdg.batch.rules.result import Axis
from fdg.cores import common_cores
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.programs import prepare_for_vmap, vmapped_program
from fdg.lowering.rewriting import Setting, rewrite_all
from fdg.placing.plans import Plan, PlannedProgram, SteppedPlan
from fdg.placing.policy import Group
from fdg.profiling.work import Work, work_of


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices as lowering needs to know them."""

    platform: str = "cpu"
    cores: float | None = None  # cores that a machine's CPU devices share; None for those of this process
    devices: int | None = None  # the most devices on a machine; None for all

    def has_a_core_each(self, group: Group) -> bool:
        """Whether a group has at least as many CPU devices on a machine as there are cores."""
        here = len(group) if self.devices is None else min(len(group), self.devices)
        return self.platform == "cpu" and here >= (common_cores() if self.cores is None else self.cores)


@dataclasses.dataclass(frozen=True)
class Load:
    """A program's work in one run."""

    program: str
    group: Group
    work: Work  # of one of the group's devices
    arrays: int  # arguments and results that the host handles
    collectives: tuple[Collective, ...]  # among the group's devices


def loads(plan: Plan, target: Target) -> tuple[Load, ...]:
    """The loads of a plan's programs, in order; compiles and allocates nothing."""
    arrays = [len(call.inputs) + len(call.outputs) for call, _ in plan.calls()]
    arrays = arrays or [2 * len(plan.graph.state_axes)]
    return tuple(
        Load(planned.name, group, _one_device_work(work, group), count, _collectives_of(plan, planned))
        for planned, (group, work), count in zip(plan.programs, _works(plan, target), arrays, strict=True)
    )


_WITHOUT_PARAMETERS = ("environment", "buffer", "update")  # roles that gather none


def _collectives_of(plan: Plan, program: PlannedProgram) -> tuple[Collective, ...]:
    """The collectives of a program's run; estimated if parameters are sharded.

    As in fully sharded data parallelism (Rajbhandari et al., arXiv 1910.02054, section 7.2): parameters are
    gathered for the forward and the backward pass, and gradients are scattered. Their size is that of the
    gradients that the fragment `update` reads; a fragment with fewer bytes at its border reads none.
    """
    if program.collectives or program.group not in plan.unpredicted:
        return program.collectives
    roles = {fragment.name: fragment.role for fragment in plan.graph.fragments}
    size = max((e.bytes_per_crossing for e in plan.graph.edges
                if (roles[e.source], roles[e.target]) == ("gradient", "update")), default=0)  # fmt: skip
    around = {fragment.parent for fragment in plan.graph.fragments}
    found = []
    for one in plan.graph.fragments:
        reads = one.name in program.fragments and one.name not in around and one.bytes_per_call >= size > 0
        if reads and one.role not in _WITHOUT_PARAMETERS:
            calls = max(1, one.calls_per_iteration // program.calls_per_iteration)
            learns = one.role == "gradient"
            found.append(Collective("all-gather", size, calls * (1 + learns), (one.name,)))
            if learns:
                found.append(Collective("reduce-scatter", size, calls, (one.name,)))
    return tuple(found)


def _works(plan: Plan, target: Target) -> Iterator[tuple[Group, Work]]:
    """The group and the work of each program on one device, for all of its agents."""
    if isinstance(plan, SteppedPlan):
        groups = {group.name: group for group in plan.groups}
        for call, _ in plan.calls():
            axes, ends = (tuple(value.axis for value in side) for side in (call.inputs, call.outputs))
            yield groups[call.group], _work(call.jaxpr, axes, ends, groups[call.group], target)
        return
    (group,), graph = plan.groups, plan.graph
    if plan.together is None:
        yield group, _work(graph.jaxpr, graph.state_axes, graph.output_axes, group, target)
        return
    setting = _setting(graph.state_axes, graph.output_axes, group, target)
    one = prepare_for_vmap(graph.jaxpr, plan.together, setting._replace(devices=1, sharded=False))
    agents = plan.agents_here
    yield group, work_of(one) if agents == 1 else _agents(one, agents, plan.together)


@functools.lru_cache(maxsize=64)
def _agents(jaxpr: ClosedJaxpr, agents: int, together: int) -> Work:
    """The work of several agents on one device."""
    return work_of(vmapped_program(jaxpr, agents, together))


def _one_device_work(work: Work, group: Group) -> Work:
    """The work of one device if `model` devices share a part of the batch, and so split products."""
    if group.model == 1:
        return work
    products = {
        product._replace(n=max(1, product.n // group.model)): count
        for product, count in work.products.items()
    }
    return dataclasses.replace(work, products=products)


def _setting(axes: Sequence[Axis], ends: Sequence[Axis], group: Group, target: Target) -> Setting:
    kind = target.platform == "cpu", target.has_a_core_each(group)
    return Setting(tuple(axes), group.rows, tuple(ends), *kind, sharded=group.shards)


def _work(
    jaxpr: ClosedJaxpr, axes: Sequence[Axis], ends: Sequence[Axis], group: Group, target: Target
) -> Work:
    setting = _setting(axes, ends, group, target)
    return work_of(rewrite_all(jaxpr, setting), axes, group.rows)
