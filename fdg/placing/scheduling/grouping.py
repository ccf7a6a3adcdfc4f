"""Combines the operations of each group into programs, and orders programs, transfers and loops.

The level of an operation is the number of transfers and loops that must come before it. Operations of one
group with the same level form one program. Here `act` and `judge` run on actors, `learn` on learners, and
`judge` reads the result of `learn`:

    a = act(x)        level 0, actors
    w = learn(a)      level 1, learners: `a` is transferred after level 0
    m = judge(a, w)   level 2, actors: `w` is transferred after level 1

A program whose results no other group waits for is merged into its group's next program. For example,
an operation of level 1 on actors whose result only actors read joins the actors' program of level 2.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jax.extend import core

from fdg.placing.regions.region import Loop, Operation, Region
from fdg.placing.scheduling.liveness import with_live_ranges
from fdg.placing.scheduling.placement import Placement
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value

ValueOf = Callable[[core.Var, str], Value]  # (variable, group) -> the value of the variable on the group
Origins = dict[core.Var, tuple[str, ...]]  # the fragments that each variable comes from


def make_schedule(
    placement: Placement, value_of: ValueOf, num_leaves: int, newer: frozenset[str] = frozenset()
) -> Schedule:
    """The schedule of an iteration; its programs have no names yet.

    The first `num_leaves` carried values are the state's leaves. A further carried value, the token of side
    effects, is initialised like a constant. `newer` are fragments that read newer parameters than fragments
    before them. An operation with such a fragment gets a higher level than all earlier operations of its
    group, and no program without such fragments is merged into its program.
    """
    region = placement.region
    collector = _StepCollector(placement, value_of, _find_origins(region), region, newer)
    metrics = tuple(collector.on_producer(v) for v in region.outputs[len(region.inputs) :])
    starts = [[value_of(v, group) for group in groups] for v, groups in collector.carried.items()]
    for end, copies in zip(region.outputs, starts, strict=False):
        producer = collector.producer(end)  # its copy must be the first of `copies`
        copies[:] = [v for v in copies if v.group == producer] + [v for v in copies if v.group != producer]
    tokens = starts[num_leaves:]
    needed = [*tokens, *collector.constants.values()]
    constants = tuple((i, value) for i, copies in enumerate(needed) for value in copies)
    steps = collector.steps(metrics, {value for copies in tokens for value in copies}, "iteration")
    return Schedule(steps, tuple(map(tuple, starts[:num_leaves])), constants, collector.carry, metrics)


@dataclasses.dataclass
class _Transfer:
    """The transfer of a value to another group."""

    source: Value
    level: int  # the level of the step that defines the value; -1 for an input
    users: list[str]  # the fragments that use the value on the target
    for_next_trip: bool  # whether only the next trip (or iteration) uses it


class _StepCollector:
    """Collects the steps of a region in one walk; the region's free variables are on every group."""

    def __init__(
        self,
        placement: Placement,
        value_of: ValueOf,
        origins: Origins,
        region: Region,
        newer: frozenset[str] = frozenset(),
    ):
        self.placement, self.value_of, self.origins, self.newer = placement, value_of, origins, newer
        # for each free variable, its values on the groups that read it
        self.constants: dict[core.Var, list[Value]] = {v: [] for v in region.free}
        # the groups that hold each carried variable
        self.carried = {v: placement.ordered(placement.carry_groups[v]) for v in region.inputs}
        # for each value: its level, and the kind of its definition ("input", "program", "loop" or "move")
        self._definitions: dict[Value, tuple[int, str]] = {}
        self._groups: dict[core.Var, list[str]] = {}  # the groups that have each variable, the producer first
        self._transfers: dict[Value, _Transfer] = {}  # by the value on the target
        self._programs: dict[tuple[str, int], list[Operation]] = {}  # by group and level
        self._loops: list[tuple[int, Repeat]] = []  # (level, loop)
        for v, groups in self.carried.items():
            for group in groups:
                self._define(v, group, 0, "input")
        for item in region.items:
            if isinstance(item, Loop):
                self._add_loop(item)
                continue
            for group in placement.ordered(placement.groups[item]):
                self._add_operation(item, group)
        # for each carried input, its next value on each group that holds it
        self.next_values = [
            {g: self._fetch(end, g, placement.fragments_reading(region, v, g), True) for g in groups}
            for end, (v, groups) in zip(region.outputs, self.carried.items(), strict=False)
        ]
        # pairs (value at the end of a trip, value at the start of the next trip)
        self.carry = tuple(
            (value, start)
            for v, end in zip(region.inputs, self.next_values, strict=True)
            for group, value in end.items()
            if value is not (start := value_of(v, group))
        )

    def producer(self, variable: core.Var) -> str:
        """The group that computes a variable."""
        return self._groups[variable][0]

    def on_producer(self, variable: core.Var) -> Value:
        """A variable on the group that computes it."""
        return self.value_of(variable, self.producer(variable))

    def steps(self, live_out: Iterable[Value], tokens: Collection[Value], trip: str) -> tuple[Step, ...]:
        """The steps in order, with live ranges.

        `live_out` are values that are needed afterwards, besides `next_values`. `tokens`, like constants, are
        never freed. `trip` is the word for a trip of the region: "iteration", or "step" for a loop.
        """
        while (pair := self._mergeable_pair()) is not None:
            group, early, late = pair
            self._programs[group, late] = self._programs.pop((group, early)) + self._programs[group, late]
        levels = self._levels_by_result()
        for transfer in self._transfers.values():
            key = transfer.source.variable, transfer.source.group
            transfer.level = levels.get(key, transfer.level)
        needed = [*(value for end in self.next_values for value in end.values()), *live_out]
        constants = {value for copies in self.constants.values() for value in copies}.union(tokens)
        return with_live_ranges(list(self._ordered_steps(trip)), needed, constants)

    # --- the walk ---

    def _fetch(
        self, variable: core.Var, group: str, users: Sequence[str], for_next_trip: bool = False
    ) -> Value:
        """The value of a variable on a group; adds a transfer if the group does not have it yet."""
        value = self.value_of(variable, group)
        if value in self._transfers:
            self._transfers[value].users.extend(users)
            self._transfers[value].for_next_trip &= for_next_trip
        if value in self._definitions:
            return value
        if variable in self.constants:
            self.constants[variable].append(value)
            self._definitions[value] = 0, "input"
            return value
        source = self.value_of(variable, self.producer(variable))
        level, kind = self._definitions[source]
        source_level = -1 if kind == "input" else level
        self._transfers[value] = _Transfer(source, source_level, list(users), for_next_trip)
        self._define(variable, group, source_level + 1, "move")
        return value

    def _define(self, variable: core.Var, group: str, level: int, kind: str) -> None:
        self._definitions[self.value_of(variable, group)] = level, kind
        self._groups.setdefault(variable, []).append(group)

    def _add_operation(self, operation: Operation, group: str) -> None:
        """Adds an operation to the group's first program for which its inputs are ready."""
        inputs = [self._fetch(v, group, operation.fragments) for v in operation.inputs]
        ready = (self._definitions[value] for value in inputs)
        level = max((level + 1 if kind == "loop" else level for level, kind in ready), default=0)
        if not self.newer.isdisjoint(operation.fragments):
            level = max(level, 1 + max((other for g, other in self._programs if g == group), default=-1))
        self._programs.setdefault((group, level), []).append(operation)
        for v in operation.outputs:
            self._define(v, group, level, "program")

    def _add_loop(self, loop: Loop) -> None:
        """Adds a loop, with its body's steps and the values that enter and leave it."""
        placement, value_of = self.placement, self.value_of
        body = _StepCollector(placement, value_of, self.origins, loop.body)
        for end, v in zip(body.next_values, loop.body.outputs, strict=True):  # the producer keeps it too
            last = body.on_producer(v)
            end[last.group] = last
        users = tuple(dict.fromkeys(name for op in loop.body.operations() for name in op.fragments))
        enter: list[tuple[Value, Value]] = []
        for outer, inner in loop.entering:
            if inner in body.carried:
                groups = body.carried[inner]
            else:
                groups = [value.group for value in body.constants[inner]]
            enter += [(self._fetch(outer, group, users), value_of(inner, group)) for group in groups]
        donated = frozenset(i for i, (_, inner) in enumerate(enter) if inner.variable in body.carried)
        ready = (self._definitions[outer] for outer, _ in enter)
        level = max((level + 1 if kind in ("program", "loop") else level for level, kind in ready), default=0)
        leave = []
        for result, end in zip(loop.outputs, body.next_values, strict=True):
            for group, value in end.items():
                self._define(result, group, level, "loop")
                leave.append((value, value_of(result, group)))
        steps = body.steps((), (), "step")
        repeat = Repeat(loop.trips, tuple(enter), donated, steps, body.carry, tuple(leave))
        self._loops.append((level, repeat))

    # --- merging ---

    def _levels_by_result(self) -> dict[tuple[core.Var, str], int]:
        return {(v, g): level for (g, level), ops in self._programs.items() for op in ops for v in op.outputs}

    def _mergeable_pair(self) -> tuple[str, int, int] | None:
        """The group and the levels of two consecutive programs of a group that can be merged."""
        levels_by_result = self._levels_by_result()
        limit: dict[tuple[str, int], float] = {}  # a program must run before this level

        def add_reader(value: Value, level: int) -> None:
            """Notes that a value is read at a level: the program that computes it must run before."""
            group = self._transfers[value].source.group if value in self._transfers else value.group
            if (value.variable, group) in levels_by_result:
                key = group, levels_by_result[value.variable, group]
                limit[key] = min(limit.get(key, math.inf), level)

        for (group, level), operations in self._programs.items():
            for value in {self.value_of(v, group) for op in operations for v in op.inputs}:
                if value in self._transfers:
                    add_reader(value, level)
        for level, repeat in self._loops:
            for outer, _ in repeat.enter:
                add_reader(outer, level)
        for group in self.placement.order:
            levels = sorted(level for g, level in self._programs if g == group)
            for early, late in itertools.pairwise(levels):
                has_newer = [self._has_newer(self._programs[group, level]) for level in (early, late)]
                if late < limit.get((group, early), math.inf) and has_newer != [False, True]:
                    return group, early, late
        return None

    def _has_newer(self, operations: Iterable[Operation]) -> bool:
        return any(not self.newer.isdisjoint(op.fragments) for op in operations)

    # --- the order ---

    def _ordered_steps(self, trip: str) -> Iterator[Step]:
        """Yields each level's programs and loops, then the transfers of their results."""
        last = max([-1, *(level for _, level in self._programs), *(level for level, _ in self._loops)])
        for level in range(-1, last + 1):
            for group in self.placement.order:
                if (group, level) in self._programs:
                    yield self._make_call(group, self._programs[group, level])
            yield from (repeat for loop_level, repeat in self._loops if loop_level == level)
            yield from self._make_moves(level, trip)

    def _make_call(self, group: str, operations: Sequence[Operation]) -> Call:
        defined = dict.fromkeys(v for op in operations for v in op.outputs)
        read = dict.fromkeys(v for op in operations for v in op.inputs if v not in defined)
        fragments = dict.fromkeys(name for op in operations for name in op.fragments)
        inputs, outputs = (tuple(self.value_of(v, group) for v in side) for side in (read, defined))
        return Call("", group, tuple(fragments), tuple(op.eqn for op in operations), inputs, outputs)

    def _make_moves(self, level: int, trip: str) -> Iterator[Move]:
        moves: dict[tuple[str, str, bool], list[tuple[_Transfer, Value]]] = collections.defaultdict(list)
        for value, transfer in self._transfers.items():
            if transfer.level == level:
                key = transfer.source.group, value.group, transfer.for_next_trip
                moves[key].append((transfer, value))
        for (source, target, for_next_trip), pairs in moves.items():
            sources = (name for t, _ in pairs for name in self.origins.get(t.source.variable, ()))
            users = (name for t, _ in pairs for name in t.users)
            yield Move(
                source,
                target,
                tuple((t.source, value) for t, value in pairs),
                tuple(dict.fromkeys(sources)),
                tuple(dict.fromkeys(users)),
                trip if for_next_trip else "",
            )


def _find_origins(region: Region) -> Origins:
    """Finds the fragments that each variable comes from, directly or through code between fragments."""
    origins: Origins = {}

    def join(pairs: Iterable[tuple[core.Var, core.Var]]) -> None:
        """Appends, so that a further round never reorders: otherwise the rounds might not end."""
        for v, after in pairs:
            origins[after] = tuple(dict.fromkeys((*origins.get(after, ()), *origins.get(v, ()))))

    before: Origins | None = None
    while origins != before:  # in each round, an origin may reach another carried value
        before = dict(origins)
        for step in region.walk():
            if isinstance(step, Operation):
                inherited = dict.fromkeys(name for v in step.inputs for name in origins.get(v, ()))
                origins.update(dict.fromkeys(step.outputs, step.fragments or tuple(inherited)))
            else:
                join(step.pairs)
        join(region.carry)
    return origins
