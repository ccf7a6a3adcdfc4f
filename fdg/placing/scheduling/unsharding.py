"""Resharding between groups on the same devices: parameters are gathered for their use, then sliced.

If two groups keep a leaf, one in smaller parts, both would store a copy between iterations:

    generation: act([w])                          training: learn(w) -> w'
    training -> generation: w', for the next iteration

If the parts can be gathered (`placing.resharding`), the primary group lends the leaf while it does not use
it, as fully sharded data parallelism gathers parameters for a pass:

    training lends generation: w        gathered; the parts are freed
    generation: act(w)
    generation lends training: w        sliced
    training: learn([w]) -> w'
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from fdg.placing.layout import spec_text
from fdg.placing.policy import Group
from fdg.placing.resharding import EXCHANGE, GATHER, SLICE, STAYS, Change, change, common_mesh
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value, defs, uses

ChangeOf = Callable[[Value, Value], Change | None]


def reshard(schedule: Schedule, groups: Sequence[Group], unshards: bool = True) -> Schedule:
    """Adds resharding between groups on the same devices to a schedule.

    With `unshards`, parameters may be gathered for their use only; not if a group reads older ones.
    """
    by_name = {group.name: group for group in groups}
    meshes = {(a, b): common_mesh(by_name[a], by_name[b]) for a in by_name for b in by_name if a != b}
    if all(mesh is None for mesh in meshes.values()):
        return schedule

    def change_of(a: Value, b: Value) -> Change | None:
        mesh = meshes.get((a.group, b.group))
        return None if mesh is None else change(mesh, a.laid_out, b.laid_out)

    if unshards:
        schedule = _gathered_for_use(schedule, change_of)
    return dataclasses.replace(schedule, steps=tuple(_with_changes(schedule.steps, change_of)))


def _with_changes(steps: Iterable[Step], change_of: ChangeOf) -> Iterable[Step]:
    for step in steps:
        if isinstance(step, Move):
            ways = [change_of(a, b) for a, b in step.pairs]
            changes = tuple(way for way in ways if way is not None)  # all of two groups, or none
            yield dataclasses.replace(step, changes=changes)
        elif isinstance(step, Repeat):
            yield dataclasses.replace(step, steps=tuple(_with_changes(step.steps, change_of)))
        else:
            yield step


def _gathered_for_use(schedule: Schedule, change_of: ChangeOf) -> Schedule:
    """Gathers leaves before the first step that uses them, and slices them after the last."""
    steps, pairs = schedule.steps, _gatherable(schedule, change_of)
    while pairs:  # unless the primary group uses the leaves in between; fewer leaves may have a shorter range
        parts, whole = {a for a, _ in pairs}, {b for _, b in pairs}
        using = [i for i, step in enumerate(steps) if not whole.isdisjoint(uses(step))]
        first, last = min(using), max(using)
        kept = parts.intersection(value for step in steps[first : last + 1] for value in uses(step))
        if not kept:
            break
        pairs = [(a, b) for a, b in pairs if a not in kept]
    if not pairs:
        return schedule
    ends = {start: end for end, start in schedule.carry}
    dropped = {ends[b] for _, b in pairs if b in ends} - whole
    makers = (step.sources for step in steps if isinstance(step, Move) for b in defs(step) if b in dropped)
    sources = tuple(dict.fromkeys(name for names in makers for name in names))
    (a, b), every = pairs[0], frozenset(range(len(pairs)))
    users, owners = _users(steps, whole), _users(steps, parts)
    gather = Move(a.group, b.group, tuple(pairs), sources, users, freed=every, donates=True)
    back = tuple((b, a) for a, b in pairs)
    scatter = Move(b.group, a.group, back, users, owners, freed=every, donates=True)
    before, inside, after = (
        [new for step in some if (new := _without(step, dropped)) is not None]
        for some in (steps[:first], steps[first : last + 1], steps[last + 1 :])
    )
    return dataclasses.replace(
        schedule,
        steps=(*before, gather, *(_keeping(step, whole) for step in inside), scatter, *after),
        leaves=tuple(tuple(v for v in places if v not in whole) for places in schedule.leaves),
        carry=tuple((end, start) for end, start in schedule.carry if start not in whole),
    )


def _gatherable(schedule: Schedule, change_of: ChangeOf) -> list[tuple[Value, Value]]:
    """Leaves of which a second group keeps larger parts that can be gathered: (primary, second)."""
    ends = {start: end for end, start in schedule.carry}
    moved = {b: a for step in schedule.steps if isinstance(step, Move) for a, b in step.pairs}
    used = {value for step in schedule.steps for value in uses(step)}
    loops = [step for step in schedule.steps if isinstance(step, Repeat)]
    carried = {b for loop in loops for _, b in loop.carry}
    entering = {outer for loop in loops for outer, inner in loop.enter if inner in carried}
    found = []
    for own, *others in schedule.leaves:
        for other in others:
            way = change_of(own, other)
            end, own_end = ends.get(other, other), ends.get(own, own)
            unchanged = end is other and own_end is own
            renewed = end in moved and moved[end] is own_end and end not in used
            if (
                way is not None
                and way.kind == GATHER
                and (unchanged or renewed)
                and other in used
                and other not in entering
                and other not in schedule.metrics
            ):
                found.append((own, other))
    return [(a, b) for a, b in found if (a.group, b.group) == (found[0][0].group, found[0][1].group)]


def _users(steps: Sequence[Step], values: set[Value]) -> tuple[str, ...]:
    """The fragments whose programs use some of the values."""
    calls = [step for step in steps if isinstance(step, Call) and not values.isdisjoint(uses(step))]
    return tuple(dict.fromkeys(name for call in calls for name in call.fragments))


def _keeping(step: Step, values: set[Value]) -> Step:
    """The step without freeing these values."""
    if isinstance(step, Repeat):
        return step
    kept = {i for i, value in enumerate(uses(step)) if value in values}
    freed = step.freed - kept
    if isinstance(step, Move):
        return dataclasses.replace(step, freed=freed)
    return dataclasses.replace(step, freed=freed, donated=step.donated - kept)


def _without(step: Step, dropped: set[Value]) -> Step | None:
    """A transfer without unused values; None if none is left."""
    if not isinstance(step, Move):
        return step
    left = [i for i, value in enumerate(defs(step)) if value not in dropped]
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
        whole = [(way, a) for way, (a, _) in zip(move.changes, move.pairs, strict=True) if a.axis is None]
        kinds: dict[tuple[str, int], list[int]] = {}
        for way, a in whole:
            kinds.setdefault((way.kind, way.neighbours), []).append(way.temporary(a.bytes))
        parts = []
        for (kind, neighbours), temporary in kinds.items():
            number = f"{len(temporary)} {'array' if len(temporary) == 1 else 'arrays'}"
            parts.append(f"{number} {_WORDS[kind].format(neighbours)}, {max(temporary):,} B aside at most")
        if parts:
            verb = "lends to" if move.donates else "to"
            found.append(f"resharding {move.source} {verb} {move.target}, x{times}: {'; '.join(parts)}")
        found += [
            f"  not contained: {a.variable.aval.str_short()} as ({spec_text(way.source.spec)}) ->"
            f" ({spec_text(way.target.spec)}), {way.temporary(a.bytes):,} B aside"
            for way, a in whole
            if way.kind == EXCHANGE
        ]
    return list(dict.fromkeys(found))


_WORDS = {
    STAYS: "as they are",
    GATHER: "gathered among {} neighbours",
    SLICE: "cut, which moves nothing",
    EXCHANGE: "exchanged by way of the whole",
}
