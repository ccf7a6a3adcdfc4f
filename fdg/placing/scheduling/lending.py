"""Lending: groups on the same devices reshard values, and one lends parameters to the other.

Of a leaf that two such groups keep, one in smaller parts, both would keep a copy between iterations:

    generation: act([w])                          training: learn(w) -> w'
    training -> generation: w', for the next iteration

If the parts can be gathered (`placing.resharding`), the primary group lends it while it does not use it:

    training lends generation: w
    generation: act(w)
    generation returns to training: w
    training: learn([w]) -> w'
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from fdg.placing.layout import Layout
from fdg.placing.policy import Group
from fdg.placing.resharding import EXCHANGE, GATHER, SLICE, STAYS, Change, change, common_mesh
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value

Changed = Callable[[Value, Value], Change | None]


def reshard(schedule: Schedule, groups: Sequence[Group], lends: bool = True) -> Schedule:
    """Adds resharding between groups on the same devices to a schedule.

    Args:
      schedule: a schedule with layouts.
      lends: whether parameters may be lent; not if a group reads older ones.
    """
    by_name = {group.name: group for group in groups}
    meshes = {(a, b): common_mesh(by_name[a], by_name[b]) for a in by_name for b in by_name if a != b}
    if all(mesh is None for mesh in meshes.values()):
        return schedule

    def changed(a: Value, b: Value) -> Change | None:
        mesh = meshes.get((a.group, b.group))
        return None if mesh is None else change(mesh, a.laid_out, b.laid_out)

    if lends:
        schedule = _lent(schedule, changed)
    return dataclasses.replace(schedule, steps=tuple(_with_changes(schedule.steps, changed)))


def _with_changes(steps: Iterable[Step], changed: Changed) -> Iterable[Step]:
    for step in steps:
        if isinstance(step, Move):
            ways = [changed(a, b) for a, b in step.pairs]
            changes = tuple(way for way in ways if way is not None)  # all of two groups, or none
            yield dataclasses.replace(step, changes=changes)
        elif isinstance(step, Repeat):
            yield dataclasses.replace(step, steps=tuple(_with_changes(step.steps, changed)))
        else:
            yield step


def _lent(schedule: Schedule, changed: Changed) -> Schedule:
    """Lends leaves from the first step that reads them to the last."""
    loans = _loans(schedule, changed)
    while loans:  # those that the lender needs in between cannot be lent; without them it may be shorter
        borrowed, owned = {b for _, b in loans}, {a for a, _ in loans}
        reading = [i for i, step in enumerate(schedule.steps) if borrowed & _reads(step)]
        first, last = min(reading), max(reading)
        kept = set().union(*(_reads(step) & owned for step in schedule.steps[first : last + 1]))
        if not kept:
            break
        loans = [(a, b) for a, b in loans if a not in kept]
    if not loans:
        return schedule
    ends = {start: end for end, start in schedule.carry}
    dropped = {ends[b] for _, b in loans if b in ends} - borrowed
    inside = [_keeping(step, borrowed) for step in schedule.steps[first : last + 1]]
    makers = [
        move.sources
        for move in schedule.steps
        if isinstance(move, Move)
        for _, b in move.pairs
        if b in dropped
    ]
    sources = tuple(dict.fromkeys(name for names in makers for name in names))
    a, b = loans[0]
    everything = frozenset(range(len(loans)))
    borrowers, owners = _readers(schedule.steps, borrowed), _readers(schedule.steps, owned)
    lend = Move(a.group, b.group, tuple(loans), sources, borrowers, freed=everything, lends=True)
    returned = tuple((b, a) for a, b in loans)
    back = Move(b.group, a.group, returned, borrowers, owners, freed=everything, lends=True)
    steps = [*schedule.steps[:first], lend, *inside, back, *schedule.steps[last + 1 :]]
    return dataclasses.replace(
        schedule,
        steps=tuple(new for step in steps if (new := _without(step, dropped, lend, back)) is not None),
        leaves=tuple(tuple(v for v in places if v not in borrowed) for places in schedule.leaves),
        carry=tuple((end, start) for end, start in schedule.carry if start not in borrowed),
    )


def _loans(schedule: Schedule, changed: Changed) -> list[tuple[Value, Value]]:
    """Leaves of which a second group keeps larger parts that can be gathered: (primary, second)."""
    ends = {start: end for end, start in schedule.carry}
    brought = {b: a for step in schedule.steps if isinstance(step, Move) for a, b in step.pairs}
    read = [value for step in schedule.steps for value in _reads(step)]
    inside = {b for step in schedule.steps if isinstance(step, Repeat) for _, b in step.carry}
    entering = {
        outer
        for step in schedule.steps
        if isinstance(step, Repeat)
        for outer, inner in step.enter
        if inner in inside
    }
    found = []
    for own, *others in schedule.leaves:
        for other in others:
            way = changed(own, other)
            end, renewal = ends.get(other, other), ends.get(own, own)
            unchanged = end is other and renewal is own
            renewed = end in brought and brought[end] is renewal and end not in read
            if (
                way is not None
                and way.kind == GATHER
                and (unchanged or renewed)
                and other in read
                and other not in entering
                and other not in schedule.metrics
            ):
                found.append((own, other))
    lenders = {(a.group, b.group) for a, b in found}
    return [(a, b) for a, b in found if (a.group, b.group) == next(iter(lenders))] if lenders else []


def _readers(steps: Sequence[Step], values: set[Value]) -> tuple[str, ...]:
    """The fragments whose programs read some of the values."""
    calls = [step for step in steps if isinstance(step, Call) and values & _reads(step)]
    return tuple(dict.fromkeys(name for call in calls for name in call.fragments))


def _reads(step: Step) -> set[Value]:
    if isinstance(step, Call):
        return set(step.inputs)
    return {a for a, _ in (step.pairs if isinstance(step, Move) else step.enter)}


def _keeping(step: Step, values: set[Value]) -> Step:
    """The step without freeing these values."""
    if isinstance(step, Repeat):
        return step
    read = step.inputs if isinstance(step, Call) else [a for a, _ in step.pairs]
    kept = {i for i, value in enumerate(read) if value in values}
    if isinstance(step, Move):
        return dataclasses.replace(step, freed=step.freed - kept)
    return dataclasses.replace(step, freed=step.freed - kept, donated=step.donated - kept)


def _without(step: Step, dropped: set[Value], *untouched: Step) -> Step | None:
    """A move without unused values; None if none is left."""
    if not isinstance(step, Move) or any(step is other for other in untouched):
        return step
    left = [i for i, (_, b) in enumerate(step.pairs) if b not in dropped]
    if len(left) == len(step.pairs):
        return step
    freed = frozenset(new for new, old in enumerate(left) if old in step.freed)
    pairs = tuple(step.pairs[i] for i in left)
    return dataclasses.replace(step, pairs=pairs, freed=freed) if pairs else None


def resharding_notes(schedule: Schedule) -> list[str]:
    """A sentence about each kind of resharding between groups on the same devices, with its cost.

    Values that can be neither gathered nor sliced are named, because they need temporary memory.
    """
    found = []
    for move, times in schedule.moves():
        if not move.changes:
            continue
        kinds: dict[tuple[str, int], list[int]] = {}
        for way, (a, _) in zip(move.changes, move.pairs, strict=True):
            if a.axis is None:
                kinds.setdefault((way.kind, way.neighbours), []).append(way.temporary(a.bytes))
        parts = []
        for (kind, neighbours), temporary in kinds.items():
            number = f"{len(temporary)} {'array' if len(temporary) == 1 else 'arrays'}"
            parts.append(f"{number} {_WORDS[kind].format(neighbours)}, {max(temporary):,} B aside at most")
        if parts:
            verb = "lends to" if move.lends else "to"
            found.append(f"resharding {move.source} {verb} {move.target}, x{times}: {'; '.join(parts)}")
        found += [
            f"  not contained: {a.variable.aval.str_short()} as ({spec_words(way.source)}) ->"
            f" ({spec_words(way.target)}), {way.temporary(a.bytes):,} B aside"
            for way, (a, _) in zip(move.changes, move.pairs, strict=True)
            if way.kind == EXCHANGE and a.axis is None
        ]
    return list(dict.fromkeys(found))


_WORDS = {
    STAYS: "as they are",
    GATHER: "gathered among {} neighbours",
    SLICE: "cut, which moves nothing",
    EXCHANGE: "exchanged by way of the whole",
}


def spec_words(layout: Layout) -> str:
    """The axes of the common mesh that split each dimension.

    >>> spec_words(Layout((4, 4), ((), ("m0", "m1")), (("m0", 2), ("m1", 2))))
    '-, m0+m1'
    """
    return ", ".join("+".join(axes) or "-" for axes in layout.spec) or "whole"
