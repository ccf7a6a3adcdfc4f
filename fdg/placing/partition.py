"""From an opened iteration to a schedule: as few programs as the data between the groups allow.

`fdg.places` says which group runs which operation. Here a group's operations are gathered into programs, and
a value that another group needs is moved there once, when it is made.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.fragment import FragmentMark
from fdg.placing.homes import Places, operations_in, read_by
from fdg.placing.regions import Loop, Opened, Operation, Region
from fdg.placing.schedule import Call, Move, Repeat, Schedule, Step, Value


def partition(opened: Opened, axes: Sequence[int | None], sizes: Mapping[str, int]) -> Schedule:
    """Places every operation of an opened iteration, and gathers them into programs.

    Args:
      axes: the batch axis of each leaf of the state.
      sizes: number of devices of each group, in the policy's order; what nothing else decides goes to the
        first.
    """
    carried = [*axes, None] if opened.has_token else axes
    places = Places(opened, len(carried), sizes)
    return _Scheduler(places, carried).schedule(len(axes))


# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Piece:
    """Operations of one group that will be one program."""

    group: str
    level: int
    operations: list[Operation] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Arrival:
    """A value that is moved: `after` is the level of the step that makes it, -1 for an input."""

    source: Value
    target: Value
    after: int
    users: list[str]
    late: bool


class _Scheduler:
    def __init__(self, places: Places, axes: Sequence[int | None]):
        self.places = places
        self.num_leaves = len(axes)
        self.axes: dict[core.Var, int | None] = dict(zip(places.region.inputs, axes, strict=False))
        self.origins: dict[core.Var, tuple[str, ...]] = {}  # fragments that a variable comes from
        self.names: collections.Counter[str] = collections.Counter()
        _follow_axes(places.region, self.axes, places)
        _agree(places.region, places.region.inputs[: self.num_leaves], self.axes)
        _find_origins(places.region, self.origins, self.num_leaves)

    def schedule(self, num_leaves: int) -> Schedule:
        """The steps; what is carried beyond the leaves is a token, which starts as a constant does."""
        region, homes = self.places.region, self.places.homes[None]
        leaves = region.inputs[: self.num_leaves]
        block = _Block(self, region, dict(zip(leaves, homes, strict=True)), True)
        tokens = {
            block.value(v, g) for v, groups in [*zip(leaves, homes, strict=True)][num_leaves:] for g in groups
        }
        block.never_freed = tokens
        ends = [
            {g: block.bring_back(v, g, leaf) for g in self.ordered(groups)}
            for v, leaf, groups in zip(region.outputs, leaves, homes, strict=False)
        ]
        metrics = [block.anywhere(v) for v in region.outputs[self.num_leaves :]]
        kept = [value for end in ends for value in end.values()] + metrics
        steps = block.steps(kept)
        starts = [
            [block.value(v, g) for g in self.ordered(groups)] for v, groups in zip(leaves, homes, strict=True)
        ]
        again = tuple(
            (end[start.group], start)
            for end, places in zip(ends, starts, strict=True)
            for start in places
            if end[start.group] is not start
        )
        for i, places in enumerate(starts):  # of record: where the new value is made
            made = block.maker(region.outputs[i])
            places.sort(key=lambda value: value.group != made)
        count = self.num_leaves - num_leaves
        constants = [(i, value) for i, values in enumerate(starts[num_leaves:]) for value in values] + [
            (count + i, value)
            for i, v in enumerate(region.inputs[self.num_leaves :])
            for value in block.constants_of(v)
        ]
        leaves_at = tuple(map(tuple, starts[:num_leaves]))
        return Schedule(steps, leaves_at, tuple(constants), again, tuple(metrics))

    def ordered(self, groups: Iterable[str]) -> list[str]:
        chosen = set(groups)
        return [g for g in self.places.order if g in chosen]


class _Block:
    """One region's pieces and moves.

    Args:
      held: the groups that have each input from the start; inputs that are not in it are wherever they are
        asked for (constants).
    """

    def __init__(self, scheduler: _Scheduler, region: Region, held: Mapping[core.Var, set[str]], top: bool):
        self.scheduler, self.region, self.top = scheduler, region, top
        self.never_freed: set[Value] = set()
        self._values: dict[tuple[core.Var, str], Value] = {}
        self._ready: dict[Value, tuple[int, str]] = {}  # level, and what makes it: input, piece, loop, move
        self._places: dict[core.Var, list[str]] = {}  # groups that have a variable, first come first
        self._arrivals: dict[Value, _Arrival] = {}
        self._constants: dict[core.Var, list[Value]] = {v: [] for v in region.inputs if v not in held}
        self._pieces: dict[tuple[str, int], _Piece] = {}
        self._loops: list[tuple[int, Loop, dict]] = []
        self._needed: dict[Value, list[tuple[str, int]]] = collections.defaultdict(list)
        for v, groups in held.items():
            for group in scheduler.ordered(groups):
                self._define(v, group, 0, "input")
        for item in region.items:
            if isinstance(item, Operation):
                for group in scheduler.ordered(scheduler.places.groups[item]):
                    self._place(item, group)
            else:
                self._place_loop(item)

    def value(self, variable: core.Var, group: str) -> Value:
        """The one `Value` of a variable on a group."""
        key = variable, group
        if key not in self._values:
            self._values[key] = Value(variable, group, self.scheduler.axes.get(variable))
        return self._values[key]

    def maker(self, variable: core.Var) -> str:
        """The group that has a variable first."""
        return self._places[variable][0]

    def anywhere(self, variable: core.Var) -> Value:
        """A variable where it is already; a constant on the first group."""
        if variable in self._constants:
            return self.bring(variable, self.scheduler.places.order[0], ())
        return self.value(variable, self.maker(variable))

    def constants_of(self, variable: core.Var) -> list[Value]:
        """Where a constant is needed."""
        return self._constants[variable]

    def bring_back(self, variable: core.Var, group: str, carried: core.Var) -> Value:
        """The next value of what is carried, on a group that keeps it."""
        return self.bring(variable, group, read_by(self.scheduler.places, self.region, carried, group), True)

    def bring(self, variable: core.Var, group: str, users: Sequence[str], late: bool = False) -> Value:
        """A variable on a group, moved there if it is not yet; `late` if only the next trip needs it."""
        value = self.value(variable, group)
        if value in self._arrivals:
            self._arrivals[value].users.extend(users)
            self._arrivals[value].late &= late
        if value in self._ready:
            return value
        if variable in self._constants:
            self._constants[variable].append(value)
            self._ready[value] = 0, "input"
            return value
        source = self.value(variable, self.maker(variable))
        level, kind = self._ready[source]
        after = -1 if kind == "input" else level
        self._arrivals[value] = _Arrival(source, value, after, list(users), late)
        self._define(variable, group, after + 1, "move")
        return value

    def _define(self, variable: core.Var, group: str, level: int, kind: str) -> None:
        value = self.value(variable, group)
        self._ready[value] = level, kind
        self._places.setdefault(variable, []).append(group)

    def _level(self, value: Value) -> int:
        """The first level at which another step of the value's group can use it."""
        level, kind = self._ready[value]
        return level + 1 if kind == "loop" else level

    def _place(self, operation: Operation, group: str) -> None:
        inputs = [self.bring(v, group, operation.fragments) for v in operation.inputs]
        level = max((self._level(value) for value in inputs), default=0)
        piece = self._pieces.setdefault((group, level), _Piece(group, level))
        piece.operations.append(operation)
        for v in operation.outputs:
            self._define(v, group, level, "piece")

    def _place_loop(self, loop: Loop) -> None:
        places = self.scheduler.places
        homes = places.homes[loop]
        count = len(loop.constants)
        carried = dict(zip(loop.body.inputs[count:], homes, strict=True))
        body = _Block(self.scheduler, loop.body, carried, False)
        ends = [
            {g: body.bring_back(v, g, start) for g in self.scheduler.ordered(groups)}
            for v, start, groups in zip(loop.body.outputs, carried, homes, strict=True)
        ]
        for end, v in zip(ends, loop.body.outputs, strict=True):  # its last value is also where it was made
            last = body.anywhere(v)
            end[last.group] = last
        enter = []
        users = tuple(dict.fromkeys(n for op in operations_in(loop.body) for n in op.fragments))
        for inner, outer in zip(loop.body.inputs, (*loop.constants, *loop.starts), strict=True):
            wanted = (
                [value.group for value in body.constants_of(inner)]
                if inner not in carried
                else self.scheduler.ordered(carried[inner])
            )
            enter += [(self.bring(outer, g, users), body.value(inner, g)) for g in wanted]
        level = 0
        for outer, _ in enter:
            ready, kind = self._ready[outer]
            level = max(level, ready + 1 if kind in ("piece", "loop") else ready)
        leave = []
        for result, end in zip(loop.results, ends, strict=True):
            for group, value in end.items():
                self._define(result, group, level, "loop")
                leave.append((value, self.value(result, group)))
        again = tuple(
            (end[g], body.value(v, g))
            for v, end in zip(loop.body.inputs[count:], ends, strict=True)
            for g in end
            if g in carried[v] and end[g] is not body.value(v, g)
        )
        steps = body.steps([value for end in ends for value in end.values()])
        kept = {body.value(v, g) for v in carried for g in carried[v]}
        wiring = {"enter": enter, "steps": steps, "again": again, "leave": leave, "carried": kept}
        self._loops.append((level, loop, wiring))

    # --- in order ---

    def _merge_pieces(self) -> None:
        """A piece whose results only its own group uses next can wait, and become part of that next one."""
        level_of = {(v, p.group): p for p in self._pieces.values() for op in p.operations for v in op.outputs}
        limit: dict[_Piece, int] = collections.defaultdict(lambda: 1 << 30)  # before this level it must run
        while True:
            limit.clear()
            for piece in self._pieces.values():
                for op in piece.operations:
                    for v in op.inputs:
                        arrival = self._arrivals.get(self.value(v, piece.group))
                        source = arrival and level_of.get((v, arrival.source.group))
                        if source:
                            limit[source] = min(limit[source], piece.level)
            for level, _, wiring in self._loops:
                for outer, _ in wiring["enter"]:
                    arrival = self._arrivals.get(outer)
                    group = arrival.source.group if arrival else outer.group
                    source = level_of.get((outer.variable, group))
                    if source:
                        limit[source] = min(limit[source], level)
            for group in self.scheduler.places.order:
                levels = sorted(level for g, level in self._pieces if g == group)
                for early, late in itertools.pairwise(levels):
                    piece, next_piece = self._pieces[group, early], self._pieces[group, late]
                    if late < limit[piece]:
                        next_piece.operations[:0] = piece.operations
                        del self._pieces[group, early]
                        level_of.update(
                            ((v, group), next_piece) for op in piece.operations for v in op.outputs
                        )
                        break
                else:
                    continue
                break
            else:
                break
        made = {(v, g): p.level for (v, g), p in level_of.items()}
        for arrival in self._arrivals.values():
            key = arrival.source.variable, arrival.source.group
            arrival.after = made.get(key, arrival.after)

    def steps(self, kept: Sequence[Value]) -> tuple[Step, ...]:
        """The region's steps in order; `kept` are the values that are needed after it."""
        self._merge_pieces()
        order: list[Any] = []
        levels = [-1, *(level for _, level in self._pieces), *(level for level, *_ in self._loops)]
        for level in range(-1, max(levels) + 1):
            for group in self.scheduler.places.order:
                if (group, level) in self._pieces:
                    order.append(self._pieces[group, level])
            order += [(loop, wiring) for at, loop, wiring in self._loops if at == level]
            together: dict[tuple[str, str, str], list[_Arrival]] = collections.defaultdict(list)
            for arrival in self._arrivals.values():
                if arrival.after == level:
                    delay = "" if not arrival.late else "iteration" if self.top else "step"
                    together[arrival.source.group, arrival.target.group, delay].append(arrival)
            order += [self._move(*key, arrivals) for key, arrivals in together.items()]
        return self._with_lifetimes(order, kept)

    def _move(self, source: str, target: str, delay: str, arrivals: list[_Arrival]) -> Move:
        origins = self.scheduler.origins
        return Move(
            source,
            target,
            tuple((a.source, a.target) for a in arrivals),
            tuple(dict.fromkeys(name for a in arrivals for name in origins.get(a.source.variable, ()))),
            tuple(dict.fromkeys(name for a in arrivals for name in a.users)),
            delay,
        )

    def _with_lifetimes(self, order: list[Any], kept: Sequence[Value]) -> tuple[Step, ...]:
        """Programs with their borders: what is used later comes out, what is not is given up going in."""
        reads: list[list[Value]] = []
        for step in order:
            if isinstance(step, _Piece):
                inner = {v for op in step.operations for v in op.outputs}
                outside = dict.fromkeys(v for op in step.operations for v in op.inputs if v not in inner)
                reads.append([self.value(v, step.group) for v in outside])
            elif isinstance(step, Move):
                reads.append([source for source, _ in step.pairs])
            else:
                reads.append([outer for outer, _ in step[1]["enter"]])
        names = self._names(order)
        used_after: set[Value] = set(kept)
        constants = {value for values in self._constants.values() for value in values} | self.never_freed
        steps: list[Step] = []
        for step, read in zip(reversed(order), reversed(reads), strict=True):
            if isinstance(step, _Piece):
                made = dict.fromkeys(v for op in step.operations for v in op.outputs)
                outputs = [value for v in made if (value := self.value(v, step.group)) in used_after]
                dead = {
                    i for i, value in enumerate(read) if value not in used_after and value not in constants
                }
                steps.append(self._call(step, names[step], read, outputs, dead))
            elif isinstance(step, Move):
                freed = {
                    i for i, value in enumerate(read) if value not in used_after and value not in constants
                }
                steps.append(dataclasses.replace(step, freed=frozenset(freed)))
            else:
                loop, wiring = step
                uses = collections.Counter(outer for outer, _ in wiring["enter"])
                again = {outer for outer in uses if uses[outer] > 1} | used_after | constants
                copied = {
                    i
                    for i, (outer, inside) in enumerate(wiring["enter"])
                    if inside in wiring["carried"] and outer in again
                }
                enter, leave = tuple(wiring["enter"]), tuple(wiring["leave"])
                steps.append(
                    Repeat(loop.trips, enter, frozenset(copied), wiring["steps"], wiring["again"], leave)
                )
            used_after.update(read)
        return tuple(reversed(steps))

    def _names(self, order: Sequence[Any]) -> dict[_Piece, str]:
        """Programs are named after their outermost fragments; without any, their group's next or last."""

        def fragments(step: Any, group: str) -> list[str]:
            if isinstance(step, Move) or (isinstance(step, _Piece) and step.group != group):
                return []
            inside = step.operations if isinstance(step, _Piece) else operations_in(step[0].body)
            mine = [op for op in inside if group in self.scheduler.places.groups[op]]
            return list(dict.fromkeys(n for op in mine for n in _outermost(op.eqn, iter(op.fragments))))

        names: dict[_Piece, str] = {}
        for i, step in enumerate(order):
            if not isinstance(step, _Piece):
                continue
            own = fragments(step, step.group)
            later = [n for other in order[i + 1 :] for n in fragments(other, step.group)]
            earlier = [n for other in order[:i] for n in fragments(other, step.group)]
            name = "+".join(own) or (
                f"before {later[0]}" if later else f"after {earlier[-1]}" if earlier else "between fragments"
            )
            self.scheduler.names[name] += 1
            count = self.scheduler.names[name]
            names[step] = name if count == 1 else f"{name} ({count})"
        return names

    def _call(
        self, piece: _Piece, name: str, inputs: list[Value], outputs: list[Value], dead: set[int]
    ) -> Call:
        fragments = tuple(dict.fromkeys(name for op in piece.operations for name in op.fragments))
        equations = tuple(op.eqn for op in piece.operations)
        kinds = collections.Counter(_kind(value) for value in outputs)
        donated = set()
        for i in sorted(dead):
            if kinds[_kind(inputs[i])]:
                kinds[_kind(inputs[i])] -= 1
                donated.add(i)
        return Call(
            name, piece.group, fragments, equations, tuple(inputs), tuple(outputs),
            frozenset(dead), frozenset(donated),
        )  # fmt: skip


def _outermost(eqn: core.JaxprEqn, names: Iterator[str]) -> list[str]:
    """Of the fragments in an equation, named in the order of `trace`, those that are in no other."""
    here = [next(names)] if FragmentMark.of(eqn) is not None else []
    inner = [n for body in jaxprs.bodies(eqn) for e in body.jaxpr.eqns for n in _outermost(e, names)]
    return here or inner


def _kind(value: Value) -> tuple:
    return value.shape, value.dtype, value.axis


def _follow_axes(region: Region, axes: dict[Any, int | None], places: Places) -> None:
    """Enters the batch axis of every variable, given those of the region's inputs."""

    def enter(variables: Iterable[core.Var], found: Iterable[int | None]) -> None:
        axes.update(
            (v, places.declared.get(v) if a is None else a) for v, a in zip(variables, found, strict=True)
        )

    enter(region.inputs, [axes.get(v) for v in region.inputs])
    for item in region.items:
        if isinstance(item, Operation):
            operands = [None if jaxprs.is_literal(v) else axes.get(v) for v in item.eqn.invars]
            row = None if item.row is None else axes.get(item.row)
            devices = math.lcm(*(places.sizes[group] for group in places.groups[item]))
            results = [row + 1] if row is not None else batch_flow.equation_axes(item.eqn, operands, devices)
            enter(item.eqn.outvars, results)
            continue
        enter(item.body.inputs, [axes.get(outer) for outer in (*item.constants, *item.starts)])
        carried = item.body.inputs[len(item.constants) :]
        for _ in range(len(carried) + 1):  # an axis can reach one more carried value a round
            _follow_axes(item.body, axes, places)
            ends = [(v, axes.get(end)) for v, end in zip(carried, item.body.outputs, strict=True)]
            late = [(v, axis) for v, axis in ends if axes.get(v) is None and axis is not None]
            if not late:
                break
            axes.update(late)
        enter(item.results, [axes.get(v) for v in carried])
        for start, v in zip(item.starts, carried, strict=True):  # zeros that rows are written to
            if axes.get(start) is None:
                axes[start] = axes.get(v)


def _agree(region: Region, carried: Sequence[core.Var], axes: dict[core.Var, int | None]) -> None:
    """Variables that hand on one array, from around a loop into it or from trip to trip, lie alike."""
    same: dict[core.Var, set[core.Var]] = {}

    def tie(a: core.Var, b: core.Var) -> None:
        both = same.get(a, {a}) | same.get(b, {b})
        same.update(dict.fromkeys(both, both))

    def visit(region: Region, carried: Sequence[core.Var]) -> None:
        for start, end in zip(carried, region.outputs, strict=False):
            tie(start, end)
        for item in region.items:
            if isinstance(item, Loop):
                for outer, inner in zip((*item.constants, *item.starts), item.body.inputs, strict=True):
                    tie(outer, inner)
                for result, end in zip(item.results, item.body.outputs, strict=True):
                    tie(result, end)
                visit(item.body, item.body.inputs[len(item.constants) :])

    visit(region, carried)
    for variables in {id(tied): tied for tied in same.values()}.values():
        found = {axis for v in variables if (axis := axes.get(v)) is not None}
        axes.update(dict.fromkeys(variables, found.pop() if len(found) == 1 else None))


def _find_origins(region: Region, origins: dict[core.Var, tuple[str, ...]], num_carried: int) -> None:
    """Enters the fragments that each variable comes from, through code between fragments."""
    for _ in range(2):  # the second time round, what is carried has an origin too
        for item in region.items:
            if isinstance(item, Operation):
                through = dict.fromkeys(name for v in item.inputs for name in origins.get(v, ()))
                for v in item.outputs:
                    origins[v] = item.fragments or tuple(through)
                continue
            for inner, outer in zip(item.body.inputs, (*item.constants, *item.starts), strict=True):
                origins.setdefault(inner, origins.get(outer, ()))
            _find_origins(item.body, origins, -len(item.starts))
            for result, end in zip(item.results, item.body.outputs, strict=True):
                origins[result] = origins.get(end, ())
        carried = region.inputs[:num_carried] if num_carried >= 0 else region.inputs[num_carried:]
        for v, end in zip(carried, region.outputs, strict=False):
            origins[v] = tuple(dict.fromkeys((*origins.get(end, ()), *origins.get(v, ()))))
