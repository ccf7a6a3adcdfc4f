"""Groups operations into programs by level: the number of transfers and loops that must come before them.

Operations of one group with the same level form one program. With `act` and `judge` on actors, `learn` on
learners, and `judge` reading what `learn` computes:

    a = act(x)        level 0, actors
    w = learn(a)      level 1, learners: `a` crosses after level 0
    m = judge(a, w)   level 2, actors: `w` crosses after level 1
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend import core

from fdg.placing.regions.region import Loop, Operation, Region
from fdg.placing.scheduling.drafts import Arrival, Draft, LoopDraft, ProgramDraft, Values
from fdg.placing.scheduling.residents import Placement
from fdg.placing.scheduling.schedule import Value


@dataclasses.dataclass(frozen=True)
class Levels:
    """The iteration's draft, and the placement of its inputs, outputs and loop-carried values.

    Attributes:
      starts: for each carried value, its copies on the groups that keep it; the first is on the group that
        computes its next value.
      carry: pairs (value at the end of an iteration, value at the start of the next).
      metrics: for each metric, its value on the group that computes it.
      constants: pairs (position among the graph's constants, value on a group that reads it).
    """

    draft: Draft
    starts: tuple[tuple[Value, ...], ...]
    carry: tuple[tuple[Value, Value], ...]
    metrics: tuple[Value, ...]
    constants: tuple[tuple[int, Value], ...]

    def __str__(self) -> str:
        return str(self.draft)


def assign_levels(
    placement: Placement, values: Values, num_leaves: int, newer: frozenset[str] = frozenset()
) -> Levels:
    """Assigns each operation its level, and records the transfers between groups.

    Args:
      num_leaves: the first this many carried values are the state's leaves; the rest (the token of side
        effects) is initialised like a constant.
      newer: fragments of operations that come a level after all before them on their group.
    """
    region, residents = placement.region, placement.residents[None]
    carried = region.inputs[: placement.num_carried]
    builder = _Builder(placement, values, region, dict(zip(carried, residents, strict=True)), newer)
    ends = [
        {g: builder.bring_back(v, g, leaf) for g in placement.ordered(groups)}
        for v, leaf, groups in zip(region.outputs, carried, residents, strict=False)
    ]
    metrics = [builder.anywhere(v) for v in region.outputs[placement.num_carried :]]
    starts = [
        [values(v, g) for g in placement.ordered(groups)]
        for v, groups in zip(carried, residents, strict=True)
    ]
    carry = tuple(
        (end[start.group], start)
        for end, places in zip(ends, starts, strict=True)
        for start in places
        if end[start.group] is not start
    )
    for end, places in zip(region.outputs, starts, strict=False):  # first, the new value's maker
        made = builder.maker(end)
        places.sort(key=lambda value: value.group != made)
    tokens = starts[num_leaves:]
    needed = [*tokens, *(builder.constants[v] for v in region.inputs[placement.num_carried :])]
    constants = tuple((i, value) for i, places in enumerate(needed) for value in places)
    kept = [*(value for end in ends for value in end.values()), *metrics]
    draft = builder.draft(kept, {value for places in tokens for value in places})
    return Levels(draft, tuple(map(tuple, starts[:num_leaves])), carry, tuple(metrics), constants)


@dataclasses.dataclass
class _Moved:
    """A mutable `Arrival`, while its users are still being collected."""

    source: Value
    after: int
    users: list[str]
    for_next_trip: bool


class _Builder:
    """Walks one region in order.

    Args:
      held: for each carried input, the groups that have it from the start; the other inputs are constants,
        which are available on every group.
    """

    def __init__(
        self,
        placement: Placement,
        values: Values,
        region: Region,
        held: Mapping[core.Var, frozenset[str]],
        newer: frozenset[str] = frozenset(),
    ):
        self.newer = newer
        self.placement, self.values, self.region = placement, values, region
        self.constants: dict[core.Var, list[Value]] = {v: [] for v in region.inputs if v not in held}
        self._ready: dict[Value, tuple[int, str]] = {}  # level, and what makes it: input, program, loop, move
        self._groups: dict[core.Var, list[str]] = {}  # groups that have a variable, first come first
        self._moved: dict[Value, _Moved] = {}
        self._programs: dict[tuple[str, int], list[Operation]] = {}
        self._loops: list[LoopDraft] = []
        for v, groups in held.items():
            for group in placement.ordered(groups):
                self._define(v, group, 0, "input")
        for item in region.items:
            if isinstance(item, Operation):
                for group in placement.ordered(placement.groups[item]):
                    self._add_operation(item, group)
            else:
                self._add_loop(item)

    def draft(self, kept: Sequence[Value], never_given_up: set[Value]) -> Draft:
        """The region's draft; `kept` are the values that are needed after the region."""
        programs = [ProgramDraft(g, level, tuple(ops)) for (g, level), ops in self._programs.items()]
        arrivals = [
            Arrival(m.source, target, m.after, tuple(m.users), m.for_next_trip)
            for target, m in self._moved.items()
        ]
        constants = {value for places in self.constants.values() for value in places} | never_given_up
        loops = tuple(self._loops)
        return Draft(
            self.region,
            self.values,
            tuple(programs),
            tuple(arrivals),
            loops,
            frozenset(constants),
            tuple(kept),
        )

    def maker(self, variable: core.Var) -> str:
        """The first group that has a variable: the one that computes it."""
        return self._groups[variable][0]

    def anywhere(self, variable: core.Var) -> Value:
        """A variable on the group that computes it; a constant on the first group."""
        if variable in self.constants:
            return self.bring(variable, self.placement.order[0], ())
        return self.values(variable, self.maker(variable))

    def bring_back(self, variable: core.Var, group: str, carried: core.Var) -> Value:
        """The next value of a carried variable, on a group that keeps it."""
        return self.bring(variable, group, self.placement.read_by(self.region, carried, group), True)

    def bring(
        self, variable: core.Var, group: str, users: Sequence[str], for_next_trip: bool = False
    ) -> Value:
        """A variable on a group; adds a transfer if the group does not have it yet."""
        value = self.values(variable, group)
        if value in self._moved:
            self._moved[value].users.extend(users)
            self._moved[value].for_next_trip &= for_next_trip
        if value in self._ready:
            return value
        if variable in self.constants:
            self.constants[variable].append(value)
            self._ready[value] = 0, "input"
            return value
        source = self.values(variable, self.maker(variable))
        level, kind = self._ready[source]
        after = -1 if kind == "input" else level
        self._moved[value] = _Moved(source, after, list(users), for_next_trip)
        self._define(variable, group, after + 1, "move")
        return value

    def _define(self, variable: core.Var, group: str, level: int, kind: str) -> None:
        self._ready[self.values(variable, group)] = level, kind
        self._groups.setdefault(variable, []).append(group)

    def _add_operation(self, operation: Operation, group: str) -> None:
        inputs = [self.bring(v, group, operation.fragments) for v in operation.inputs]
        ready = (self._ready[value] for value in inputs)
        level = max((level + 1 if kind == "loop" else level for level, kind in ready), default=0)
        if not self.newer.isdisjoint(operation.fragments):
            level = max(level, 1 + max((at for g, at in self._programs if g == group), default=-1))
        self._programs.setdefault((group, level), []).append(operation)
        for v in operation.outputs:
            self._define(v, group, level, "program")

    def _add_loop(self, loop: Loop) -> None:
        placement, values = self.placement, self.values
        residents = dict(zip(loop.carried, placement.residents[loop], strict=True))
        body = _Builder(placement, values, loop.body, residents)
        ends = [
            {g: body.bring_back(v, g, start) for g in placement.ordered(groups)}
            for v, (start, groups) in zip(loop.body.outputs, residents.items(), strict=True)
        ]
        for end, v in zip(ends, loop.body.outputs, strict=True):  # the last value is also at its maker
            last = body.anywhere(v)
            end[last.group] = last
        enter = []
        users = tuple(dict.fromkeys(name for op in loop.body.operations() for name in op.fragments))
        for inner, outer in loop.entering:
            if inner in residents:
                groups = placement.ordered(residents[inner])
            else:
                groups = [value.group for value in body.constants[inner]]
            enter += [(self.bring(outer, g, users), values(inner, g)) for g in groups]
        ready = (self._ready[outer] for outer, _ in enter)
        level = max((level + 1 if kind in ("program", "loop") else level for level, kind in ready), default=0)
        leave = []
        for result, end in zip(loop.results, ends, strict=True):
            for group, value in end.items():
                self._define(result, group, level, "loop")
                leave.append((value, values(result, group)))
        carry = tuple(
            (end[g], values(v, g))
            for v, end in zip(loop.carried, ends, strict=True)
            for g in end
            if g in residents[v] and end[g] is not values(v, g)
        )
        inside = body.draft([value for end in ends for value in end.values()], set())
        carried = frozenset(values(v, g) for v, groups in residents.items() for g in groups)
        self._loops.append(LoopDraft(level, loop, tuple(enter), carry, tuple(leave), carried, inside))
