"""The programs of a plan as they are compiled: what the cost model looks at is what runs.

GPUOnly on 4 devices         one program, a quarter of the batch on each
actors (3) + learners (1)    act+step with a third of it; learn with all of it
"""

import dataclasses
from collections.abc import Sequence

from fdg.batch.rules.result import Axis
from fdg.cores import common_cores
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.agents import of_one
from fdg.lowering.rewriting import Setting, rewritten
from fdg.placing.plan import Plan
from fdg.placing.policy import Group
from fdg.recall import Recall


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One of them.

    Attributes:
      name: of the program.
      group: where it runs.
      jaxpr: in the global view, rewritten as for compiling; of several agents that of one.
      axes: the batch axis of each input.
      rows: that the batch is split over.
      donated: inputs whose memory results take over.
      agents: on each device; 1 unless a plan has several.
      together: how many of them are mapped together (`lowering.agents`).
      repeated: whether the program is a loop over the jaxpr.
    """

    name: str
    group: Group
    jaxpr: ClosedJaxpr
    axes: tuple[int | None, ...]
    rows: int
    donated: frozenset[int]
    agents: int = 1
    together: int = 1
    repeated: bool = False


@dataclasses.dataclass(frozen=True)
class Target:
    """What lowering asks of devices.

    Attributes:
      platform: theirs.
      cores: of a machine with CPU devices, that these share; None for as many as each process here has.
      devices: most of them that a machine has; None for all.
    """

    platform: str = "cpu"
    cores: float | None = None
    devices: int | None = None

    def has_a_core_each(self, group: Group) -> bool:
        """Whether a group has as many CPU devices on a machine as it has cores, or more."""
        here = len(group) if self.devices is None else min(len(group), self.devices)
        return self.platform == "cpu" and here >= (common_cores() if self.cores is None else self.cores)


HERE = Target()
"""CPU devices of this process."""


def programs(plan: Plan, target: Target) -> tuple[Compiled, ...]:
    """All of a plan, in its order; nothing is compiled or allocated."""
    groups = {group.name: group for group in plan.groups}
    if plan.schedule is None:
        (planned,), (group,), graph = plan.programs, plan.groups, plan.graph
        state = frozenset(range(len(graph.state_axes)))
        if plan.num_seeds is not None and plan.together is not None:
            agents = plan.num_seeds // len(group)
            setting = _setting(graph.state_axes, graph.output_axes, group, target)
            one = of_one(graph.jaxpr, plan.together, setting._replace(devices=1, sharded=False))
            return (Compiled(planned.name, group, one, (), 1, state, agents, plan.together, True),)
        axes = tuple(graph.state_axes)
        jaxpr = _rewritten(graph.jaxpr, _setting(axes, graph.output_axes, group, target))
        return (Compiled(planned.name, group, jaxpr, axes, group.rows, state, repeated=True),)
    found = []
    for call, _ in plan.schedule.calls():
        group = groups[call.group]
        axes, ends = (tuple(value.axis for value in side) for side in (call.inputs, call.outputs))
        jaxpr = _rewritten(call.jaxpr, _setting(axes, ends, group, target))
        found.append(Compiled(call.name, group, jaxpr, axes, group.rows, frozenset(call.donated)))
    return tuple(found)


_KNOWN: Recall[ClosedJaxpr] = Recall(most=1024)


def _setting(axes: Sequence[Axis], ends: Sequence[Axis], group: Group, target: Target) -> Setting:
    kind = target.platform == "cpu", target.has_a_core_each(group)
    return Setting(tuple(axes), group.rows, tuple(ends), *kind, sharded=group.shards)


def _rewritten(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    return _KNOWN(jaxpr, setting, lambda: rewritten(jaxpr, setting))
