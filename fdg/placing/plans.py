"""Plans as plain values: the groups, programs, transfers and memory of a placed graph."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fdg import jaxprs
from fdg.drawable import Drawable
from fdg.placing.memory import peak_by_group, program_bytes
from fdg.placing.movements import (
    BETWEEN,
    Movement,
    PlannedProgram,
    collective_movements,
    local_movements,
    transfer_movement,
)
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Schedule
from fdg.placing.sharded import ShardedLeaf, layouts_by_position
from fdg.placing.staleness import Delay
from fdg.tracing.graph import FDG

__all__ = ["BETWEEN", "Movement", "Plan", "PlannedProgram", "SteppedPlan"]


@dataclasses.dataclass(frozen=True)
class Plan(Drawable):
    """A graph placed on devices. It runs as one program; a `SteppedPlan` runs as several programs.

    Attributes:
      graph: the placed graph, with the policy's staleness applied.
      num_devices: the number of devices, used or not.
      groups: the groups with their used devices; groups on the same devices are merged, except `apart` ones.
      idle: positions of unused devices.
      assignment: the group of each fragment by name, in the graph's order.
      programs: the programs, in the order of their first run in an iteration.
      delayed: the leaves and fragments that the staleness delays, or None.
      unfit: (group, positions of devices that it leaves idle, since its batches do not divide over them).
      notes: sentences that are printed at the end of the plan.
      sharded: the leaves of the state that sharding rules match.
      unused_rules: (group, regular expression) of sharding rules that match no leaf.
      unpredicted: groups with sharded parameters; their collectives are known only after compiling.
    """

    graph: FDG
    policy: Any
    num_devices: int
    groups: tuple[Group, ...]
    idle: tuple[int, ...]
    assignment: tuple[tuple[str, str], ...]
    programs: tuple[PlannedProgram, ...] = ()
    delayed: Delay | None = None
    unfit: tuple[tuple[str, tuple[int, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    sharded: tuple[ShardedLeaf, ...] = ()
    unused_rules: tuple[tuple[str, str], ...] = ()
    unpredicted: tuple[str, ...] = ()

    @functools.cached_property
    def movements(self) -> tuple[Movement, ...]:
        """Edges within a group, then transfers between groups, then collectives."""
        return (
            *local_movements(self.graph.edges, dict(self.assignment)),
            *(transfer_movement(*move) for move in self.moves()),
            *collective_movements(self.programs),
        )

    @functools.cached_property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """The estimated peak bytes on a device of each group (`placing.memory`).

        Each of several groups on the same devices (`Group.apart`) has the sum of their bytes. `Engine.memory`
        has the bytes that XLA reports.
        """
        (group,), graph = self.groups, self.graph
        donated = range(len(graph.state_axes))
        if self.agents_per_vmap is None:
            layouts = layouts_by_position(self.sharded, group.name)
            size = program_bytes(graph.jaxpr, graph.state_axes, group.num_batch_parts, donated, layouts)
        else:  # the states of all agents, and the temporary arrays of those that are vmapped together
            agent_bytes = program_bytes(graph.jaxpr, (), 1, donated)
            state_bytes = sum(jaxprs.bytes_of(v.aval) for v in jaxprs.open_jaxpr(graph.jaxpr).invars)
            size = self.agents_per_device * state_bytes + self.agents_per_vmap * (agent_bytes - state_bytes)
        return ((group.name, size),)

    @property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """One tuple per set of devices: the names of its groups (several only if groups are `apart`)."""
        names: dict[frozenset[int], list[str]] = {}
        for group in self.groups:
            names.setdefault(frozenset(group.devices), []).append(group.name)
        return tuple(map(tuple, names.values()))

    @property
    def agents_per_vmap(self) -> int | None:
        """The number of agents that each device vmaps at once; None for a plan without agents."""
        return self.programs[0].agents_per_vmap if self.programs else None

    @property
    def agents_per_device(self) -> int:
        """The number of agents that each device trains."""
        return (self.graph.agents or 1) // len(self.groups[0])

    def idle_process(self, devices: Sequence[Any]) -> int | None:
        """The first process that owns no used device; None if there is no such process.

        Args:
          devices: the list of devices that the plan's positions index.
        """
        processes = [getattr(device, "process_index", 0) for device in devices]
        used = {processes[i] for group in self.groups for i in group.devices}
        return min(set(processes) - used, default=None)

    def __repr__(self) -> str:
        count = len(self.programs)
        return (
            f"<Plan of {self.graph.name} under {self.policy} on {self.num_devices} devices: "
            f"{count} program{'s' if count != 1 else ''}>"
        )

    def calls(self) -> Iterable[tuple[Call, int]]:
        """The programs that the host starts, with their runs per iteration; empty for a single program."""
        return ()

    def moves(self) -> Iterable[tuple[Move, int]]:
        """The transfers between groups, with their runs per iteration; empty for a single program."""
        return ()

    def group_of(self, fragment: str) -> Group:
        """The group of a fragment."""
        name = dict(self.assignment)[fragment]
        return next(group for group in self.groups if group.name == name)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class SteppedPlan(Plan):
    """A plan of several groups: the host starts programs and transfers in the order of a schedule.

    Attributes:
      schedule: the steps of one iteration.
      constants: the values of the constants; `schedule.constants` has their positions in this sequence.
    """

    schedule: Schedule = dataclasses.field(compare=False)
    constants: Sequence[Any] = dataclasses.field(compare=False)

    @functools.cached_property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """The estimated peak bytes on a device of each group, over the steps of the schedule."""
        keys = {name: names[0] for names in self.sharing for name in names}
        num_batch_parts = {group.name: group.num_batch_parts for group in self.groups}
        peak = peak_by_group(self.schedule, num_batch_parts, keys)
        return tuple((name, peak[key]) for name, key in keys.items())

    def calls(self) -> Iterable[tuple[Call, int]]:
        """The programs that the host starts, with their runs per iteration."""
        return self.schedule.calls()

    def moves(self) -> Iterable[tuple[Move, int]]:
        """The transfers between groups, with their runs per iteration."""
        return self.schedule.moves()
