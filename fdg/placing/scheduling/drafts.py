"""Drafts: the values that the passes between a placement and a schedule read and return.

    levels -> merging -> ordering -> naming, lifetimes -> Schedule

A draft has one region's programs, transfers and loops. `print` it between any two passes:

    level 0  actors: act step
    level 0  actors -> learners: a, b
    level 1  learners: learn
    level 1  learners -> actors: c, for the next trip
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend import core

from fdg.placing.regions.region import Loop, Operation, Region, VariableNames
from fdg.placing.scheduling.schedule import Value


class Values:
    """The `Value` of each variable on each group."""

    def __init__(self, axes: Mapping[Any, int | None]):
        self._axes = axes
        self._known: dict[tuple[core.Var, str], Value] = {}

    def __call__(self, variable: core.Var, group: str) -> Value:
        """The value of a variable on a group."""
        key = variable, group
        if key not in self._known:
            self._known[key] = Value(variable, group, self._axes.get(variable))
        return self._known[key]


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramDraft:
    """Operations of a group that will be one program."""

    group: str
    level: int
    operations: tuple[Operation, ...]

    @property
    def fragments(self) -> tuple[str, ...]:
        """The names of its fragments in program order."""
        return tuple(dict.fromkeys(name for op in self.operations for name in op.fragments))


@dataclasses.dataclass(frozen=True, eq=False)
class Arrival:
    """A value that is transferred to another group.

    Attributes:
      after: the level of the step that defines it; -1 for an input.
      users: the fragments that use it there.
      for_next_trip: whether only the next trip (or iteration) uses it.
    """

    source: Value
    target: Value
    after: int
    users: tuple[str, ...]
    for_next_trip: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CrossingDraft:
    """Values transferred together from one group to another."""

    level: int
    source: str
    target: str
    arrivals: tuple[Arrival, ...]
    for_next_trip: bool


@dataclasses.dataclass(frozen=True, eq=False)
class LoopDraft:
    """A loop that the host steps; attributes as in `schedule.Repeat`.

    Attributes:
      carried: values that the body may donate: the carry on each group that keeps it.
    """

    level: int
    loop: Loop
    enter: tuple[tuple[Value, Value], ...]
    carry: tuple[tuple[Value, Value], ...]
    leave: tuple[tuple[Value, Value], ...]
    carried: frozenset[Value]
    body: "Draft"


StepDraft: TypeAlias = ProgramDraft | CrossingDraft | LoopDraft


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """The draft of a region.

    Attributes:
      programs: at most one for each group and level.
      arrivals: one for each transferred value.
      constants: values that exist before the first trip and are never freed.
      kept: values that are used after the region.
      steps: all steps in order; empty before `in_order`.
    """

    region: Region
    values: Values
    programs: tuple[ProgramDraft, ...]
    arrivals: tuple[Arrival, ...]
    loops: tuple[LoopDraft, ...]
    constants: frozenset[Value]
    kept: tuple[Value, ...]
    steps: tuple[StepDraft, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self, VariableNames()))


def in_order(draft: Draft, groups: Sequence[str]) -> Draft:
    """The draft with its steps in order: for each level programs, loops, and then transfers of their results.

    Args:
      groups: in the policy's order, which orders the programs of a level.
    """
    steps: list[StepDraft] = []
    loops = tuple(dataclasses.replace(loop, body=in_order(loop.body, groups)) for loop in draft.loops)
    levels = [-1, *(program.level for program in draft.programs), *(loop.level for loop in loops)]
    at = {(program.level, program.group): program for program in draft.programs}
    for level in range(-1, max(levels) + 1):
        steps += [at[level, group] for group in groups if (level, group) in at]
        steps += [loop for loop in loops if loop.level == level]
        together: dict[tuple[str, str, bool], list[Arrival]] = collections.defaultdict(list)
        for arrival in draft.arrivals:
            if arrival.after == level:
                key = arrival.source.group, arrival.target.group, arrival.for_next_trip
                together[key].append(arrival)
        steps += [
            CrossingDraft(level, source, target, tuple(arrivals), for_next_trip)
            for (source, target, for_next_trip), arrivals in together.items()
        ]
    return dataclasses.replace(draft, loops=loops, steps=tuple(steps))


def _lines(draft: Draft, names: VariableNames) -> list[str]:
    lines: list[str] = []
    unordered: list[StepDraft | Arrival] = [*draft.programs, *draft.loops, *draft.arrivals]
    for step in draft.steps or unordered:
        if isinstance(step, ProgramDraft):
            inside = " ".join(op.name for op in step.operations)
            lines.append(f"level {step.level}  {step.group}: {inside}")
        elif isinstance(step, LoopDraft):
            lines.append(f"level {step.level}  {step.loop.trips} trips:")
            lines += ["  " + line for line in _lines(step.body, names)]
        else:
            arrivals = step.arrivals if isinstance(step, CrossingDraft) else (step,)
            level = step.level if isinstance(step, CrossingDraft) else step.after
            ends = f"{arrivals[0].source.group} -> {arrivals[0].target.group}"
            what = names.listed(a.source.variable for a in arrivals)
            later = ", for the next trip" if arrivals[0].for_next_trip else ""
            lines.append(f"level {level}  {ends}: {what}{later}")
    return lines
