"""The plan: what runs where, and what moves. Plain values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fdg.drawn import Drawn
from fdg.placing.policy import Group
from fdg.placing.schedule import Schedule
from fdg.placing.sharded import ShardedLeaf
from fdg.placing.staleness import Delay
from fdg.tracing.graph import FDG

BETWEEN = "(between fragments)"


@dataclasses.dataclass(frozen=True)
class Movement:
    """Bytes that pass between fragments or devices, and how.

    Attributes:
      source: fragments that the data come from.
      target: fragments that need it; the same as `source` for a collective.
      how: "transfer" from group to group, "all-reduce" or "all-gather" among a group's devices (what was
        read from compiled programs may be of other kinds), or "" where the data stay on their devices.
      bytes_per_crossing: what arrives, on all devices of the target together; for a collective the size of
        its result.
      where: the group, or "actors -> learners" for a transfer.
      program: for a collective, the program that it is in.
      read: whether it was read from the compiled program, and not predicted.
    """

    source: str
    target: str
    how: str
    bytes_per_crossing: int
    crossings_per_iteration: int
    delay: str = ""
    where: str = ""
    program: str = ""
    read: bool = False

    @property
    def bytes_per_iteration(self) -> int:
        """All crossings of an iteration together."""
        return self.bytes_per_crossing * self.crossings_per_iteration


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """An XLA program to be.

    Attributes:
      fragments: their names, in program order; empty for code between fragments alone.
    """

    name: str
    group: str
    fragments: tuple[str, ...]
    calls_per_iteration: int


@dataclasses.dataclass(frozen=True)
class Plan(Drawn):
    """What runs where.

    Attributes:
      graph: the graph that was placed (with the policy's staleness written into it).
      policy: the policy that placed it.
      num_devices: how many devices there were to use.
      num_seeds: independent agents, None for one without a seed axis.
      groups: the groups in use, idle devices left out; groups on the same devices are one.
      idle: devices that nothing runs on.
      unfit: for each group, the devices that the policy gave it and its batches do not divide over.
      assignment: the group of each fragment, by names, in the graph's order.
      programs: in the order in which an iteration first runs them.
      movements: every edge and transfer, then every collective.
      memory: bytes that each group holds on each of its devices, at least: the state, and the arrays that
        are alive together between operations. XLA's own temporaries come on top (`Program.cost()`).
      delayed: what the staleness delays, None without.
      schedule: one iteration's steps, None where one program does all.
      sharded: the leaves of the state that rules take.
      unused_rules: (group, regular expression) of rules that take no leaf.
      unpredicted: groups whose collectives are known only after compiling, for they shard parameters.
    """

    graph: FDG
    policy: Any
    num_devices: int
    num_seeds: int | None
    groups: tuple[Group, ...]
    idle: tuple[int, ...]
    assignment: tuple[tuple[str, str], ...]
    programs: tuple[PlannedProgram, ...]
    movements: tuple[Movement, ...]
    memory: tuple[tuple[str, int], ...]
    delayed: Delay | None = None
    unfit: tuple[tuple[str, tuple[int, ...]], ...] = ()
    schedule: Schedule | None = dataclasses.field(default=None, repr=False, compare=False)
    constants: Sequence[Any] = dataclasses.field(default=(), repr=False, compare=False)
    sharded: tuple[ShardedLeaf, ...] = ()
    unused_rules: tuple[tuple[str, str], ...] = ()
    unpredicted: tuple[str, ...] = ()

    def __repr__(self) -> str:
        count = len(self.programs)
        return (
            f"<Plan of {self.graph.name} under {self.policy} on {self.num_devices} devices: "
            f"{count} program{'s' if count != 1 else ''}>"
        )

    def group_of(self, fragment: str) -> Group:
        """The group that a fragment lives on."""
        name = dict(self.assignment)[fragment]
        return next(group for group in self.groups if group.name == name)
