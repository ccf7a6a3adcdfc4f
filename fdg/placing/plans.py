"""The plan: what runs where, and what moves. Plain values."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fdg import jaxprs
from fdg.drawn import Drawable
from fdg.placing.memory import peak_by_group, program_bytes
from fdg.placing.movements import BETWEEN, Movement, PlannedProgram, exchanges, staying, transfers
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Schedule
from fdg.placing.sharded import ShardedLeaf, by_position
from fdg.placing.staleness import Delay
from fdg.tracing.graph import FDG

__all__ = ["BETWEEN", "Movement", "Plan", "PlannedProgram", "SteppedPlan"]


@dataclasses.dataclass(frozen=True)
class Plan(Drawable):
    """What runs where: one program for all iterations, or, of a `SteppedPlan`, several.

    Attributes:
      graph: the graph that was placed (with the policy's staleness written into it).
      policy: the policy that placed it.
      num_devices: how many devices there were to use.
      groups: the groups in use, idle devices left out; groups on the same devices are one.
      idle: devices that nothing runs on.
      assignment: the group of each fragment, by names, in the graph's order.
      programs: in the order in which an iteration first runs them.
      delayed: what the staleness delays, None without.
      unfit: for each group, the devices that the policy gave it and its batches do not divide over.
      notes: what else there is to know, a sentence each; printed at the end.
      sharded: the leaves of the state that rules take.
      unused_rules: (group, regular expression) of rules that take no leaf.
      unpredicted: groups whose collectives are known only after compiling, for they shard parameters.
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
            *staying(self.graph.edges, dict(self.assignment)),
            *transfers(self.moves()),
            *exchanges(self.programs),
        )

    @functools.cached_property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """Bytes that each of a group's devices needs at its peak, estimated (`placing.memory`).

        Groups on the same devices have the same figure, of all that is there. `Engine.memory` has what XLA
        sets aside.
        """
        (group,), graph = self.groups, self.graph
        donated = range(len(graph.state_axes))
        if self.together is None:
            layouts = by_position(self.sharded, group.name)
            size = program_bytes(graph.jaxpr, graph.state_axes, group.rows, donated, layouts)
        else:  # all states, and what the agents that are mapped together make
            one = program_bytes(graph.jaxpr, (), 1, donated)
            state = sum(jaxprs.bytes_of(v.aval) for v in jaxprs.open_jaxpr(graph.jaxpr).invars)
            size = self.agents_here * state + self.together * (one - state)
        return ((group.name, size),)

    @property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """Names of the groups, those on the same devices together."""
        found: dict[frozenset[int], list[str]] = {}
        for group in self.groups:
            found.setdefault(frozenset(group.devices), []).append(group.name)
        return tuple(map(tuple, found.values()))

    @property
    def together(self) -> int | None:
        """How many agents a device maps together, of `agents_here`; None without an axis of agents."""
        return self.programs[0].together if self.programs else None

    @property
    def agents_here(self) -> int:
        """How many agents a device has."""
        return (self.graph.agents or 1) // len(self.groups[0])

    def idle_process(self, devices: Sequence[Any]) -> int | None:
        """The first process of which no device has work; None where each has some.

        Args:
          devices: those that the plan's positions refer to.
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
        """The programs that the host steps, with how often an iteration runs each; none of one program."""
        return ()

    def moves(self) -> Iterable[tuple[Move, int]]:
        """The transfers between groups, with how often an iteration makes each; none of one program."""
        return ()

    def group_of(self, fragment: str) -> Group:
        """The group that a fragment lives on."""
        name = dict(self.assignment)[fragment]
        return next(group for group in self.groups if group.name == name)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class SteppedPlan(Plan):
    """A plan of several groups: the host steps programs and transfers in the order of a schedule.

    Attributes:
      schedule: one iteration's steps.
      constants: values that the schedule's constants refer to.
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
