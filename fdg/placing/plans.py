"""Plans: placement, programs and transfers, as plain values."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fdg import jaxprs
from fdg.drawable import Drawable
from fdg.placing.memory import peak_by_group, program_bytes
from fdg.placing.movements import BETWEEN, Movement, PlannedProgram, exchanges, local_movements, transferred
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Schedule
from fdg.placing.sharded import ShardedLeaf, by_position
from fdg.placing.staleness import Delay
from fdg.tracing.graph import FDG

__all__ = ["BETWEEN", "Movement", "Plan", "PlannedProgram", "SteppedPlan"]


@dataclasses.dataclass(frozen=True)
class Plan(Drawable):
    """The plan of an engine: one program for all iterations, or for a `SteppedPlan` several.

    Attributes:
      graph: the placed graph, with the policy's staleness applied.
      num_devices: the number of given devices.
      groups: the groups with their used devices; groups on the same devices are merged.
      idle: unused devices.
      assignment: the group of each fragment by name, in the graph's order.
      programs: the programs, in the order of their first run in an iteration.
      delayed: what the staleness delays, or None.
      unfit: for each group, devices left out because its batches do not divide by them.
      notes: further sentences, printed at the end.
      sharded: the leaves of the state that rules shard.
      unused_rules: (group, regular expression) of rules that match no leaf.
      unpredicted: groups with sharded parameters, whose collectives are known only after compiling.
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
        """Every edge and transfer, then every collective."""
        return (
            *local_movements(self.graph.edges, dict(self.assignment)),
            *(transferred(*each) for each in self.moves()),
            *exchanges(self.programs),
        )

    @functools.cached_property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """Estimated peak bytes on a device of each group (`placing.memory`).

        Groups on the same devices have the same, total figure. `Engine.memory` has XLA's.
        """
        (group,), graph = self.groups, self.graph
        donated = range(len(graph.state_axes))
        if self.together is None:
            layouts = by_position(self.sharded, group.name)
            size = program_bytes(graph.jaxpr, graph.state_axes, group.rows, donated, layouts)
        else:  # all states, and the temporary arrays of agents that are mapped together
            one = program_bytes(graph.jaxpr, (), 1, donated)
            state = sum(jaxprs.bytes_of(v.aval) for v in jaxprs.open_jaxpr(graph.jaxpr).invars)
            size = self.agents_here * state + self.together * (one - state)
        return ((group.name, size),)

    @property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """The names of the groups; those on the same devices together."""
        found: dict[frozenset[int], list[str]] = {}
        for group in self.groups:
            found.setdefault(frozenset(group.devices), []).append(group.name)
        return tuple(map(tuple, found.values()))

    @property
    def together(self) -> int | None:
        """Agents that a device maps together, out of `agents_here`; None without an axis of agents."""
        return self.programs[0].together if self.programs else None

    @property
    def agents_here(self) -> int:
        """Agents on a device."""
        return (self.graph.agents or 1) // len(self.groups[0])

    def idle_process(self, devices: Sequence[Any]) -> int | None:
        """The first process without a used device, or None.

        Args:
          devices: the devices that the plan's positions refer to.
        """
        processes = [getattr(device, "process_index", 0) for device in devices]
        working = {processes[i] for group in self.groups for i in group.devices}
        return min(set(processes) - working, default=None)

    def __repr__(self) -> str:
        count = len(self.programs)
        return (
            f"<Plan of {self.graph.name} under {self.policy} on {self.num_devices} devices: "
            f"{count} program{'s' if count != 1 else ''}>"
        )

    def calls(self) -> Iterable[tuple[Call, int]]:
        """The programs that the host steps, with their runs in an iteration; empty for a single program."""
        return ()

    def moves(self) -> Iterable[tuple[Move, int]]:
        """The transfers between groups, with their runs in an iteration; empty for a single program."""
        return ()

    def group_of(self, fragment: str) -> Group:
        """The group of a fragment."""
        name = dict(self.assignment)[fragment]
        return next(group for group in self.groups if group.name == name)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class SteppedPlan(Plan):
    """A plan of several groups: the host steps programs and transfers in the order of a schedule.

    Attributes:
      schedule: the steps of one iteration.
      constants: the values that the schedule's constants refer to.
    """

    schedule: Schedule = dataclasses.field(compare=False)
    constants: Sequence[Any] = dataclasses.field(compare=False)

    @functools.cached_property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """As `Plan.memory`."""
        keys = {name: joined[0] for joined in self.sharing for name in joined}
        peak = peak_by_group(self.schedule, {group.name: group.rows for group in self.groups}, keys)
        return tuple((name, peak[key]) for name, key in keys.items())

    def calls(self) -> Iterable[tuple[Call, int]]:
        """As `Plan.calls`."""
        return self.schedule.calls()

    def moves(self) -> Iterable[tuple[Move, int]]:
        """As `Plan.moves`."""
        return self.schedule.moves()
