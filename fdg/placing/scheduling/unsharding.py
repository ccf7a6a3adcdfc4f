"""Resharding between groups on the same devices: parameters are gathered before their use, then sliced.

Two groups on the same devices may keep the same leaf, one of them in smaller parts. Then the devices would
store both copies between iterations:

    generation: act([w])                          training: learn(w) -> w'
    training -> generation: w', for the next iteration

If the parts can be gathered (`placing.resharding`), only the group with the smaller parts keeps the leaf. It
lends the leaf to the other group for its use. Fully sharded data parallelism does the same for each pass:

    training lends to generation: w     gathered; the parts are freed
    generation: act(w)
    generation lends to training: w     sliced
    training: learn([w]) -> w'
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from fdg.placing.layout import spec_text
from fdg.placing.policy import Group
from fdg.placing.resharding import EXCHANGE, GATHER, SLICE, STAYS, Change, change, common_mesh
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value, defs, uses

# (value on the source, its copy on the target) -> resharding; None if the groups are on different devices
ChangeOf = Callable[[Value, Value], Change | None]


def reshard(schedule: Schedule, groups: Sequence[Group], unshards: bool = True) -> Schedule:
    """Adds resharding between groups on the same devices to a schedule.

    If `unshards` is True, a group may have parameters only while it uses them. `unshards` must be False
    if a group reads older parameters.
    """
    by_name = {group.name: group for group in groups}
    meshes = {(a, b): common_mesh(by_name[a], by_name[b]) for a in by_name for b in by_name if a != b}
    if all(mesh is None for mesh in meshes.values()):
        return schedule

    def change_of(a: Value, b: Value) -> Change | None:
        mesh = meshes.get((a.group, b.group))
        return None if mesh is None else change(mesh, a.laid_out, b.laid_out)

    if unshards:
        schedule = _gather_for_use(schedule, change_of)
    return dataclasses.replace(schedule, steps=tuple(_with_changes(schedule.steps, change_of)))


def _with_changes(steps: Iterable[Step], change_of: ChangeOf) -> Iterable[Step]:
    """Sets the resharding of each transfer between groups on the same devices."""
    for step in steps:
        if isinstance(step, Move):
            resharding = (change_of(a, b) for a, b in step.pairs)  # either all are None, or none is
            changes = tuple(c for c in resharding if c is not None)
            yield dataclasses.replace(step, changes=changes)
        elif isinstance(step, Repeat):
            yield dataclasses.replace(step, steps=tuple(_with_changes(step.steps, change_of)))
        else:
            yield step


def _gather_for_use(schedule: Schedule, change_of: ChangeOf) -> Schedule:
    """Adds a move that gathers leaves before the first step that uses them, and one that slices them back."""
    steps, pairs = schedule.steps, _gatherable_leaves(schedule, change_of)
    # One move gathers all leaves, and one slices all. Leave out a leaf if the primary group uses it between
    # the two moves, or has freed it before the first. The two moves of the remaining leaves may be closer to
    # each other, so repeat.
    while pairs:
        sharded, gathered = {a for a, _ in pairs}, {b for _, b in pairs}
        positions = [i for i, step in enumerate(steps) if not gathered.isdisjoint(uses(step))]
        first, last = min(positions), max(positions)
        used_between = {value for step in steps[first : last + 1] for value in uses(step)}
        unavailable = sharded & used_between.union(*map(_freed_by, steps[:first]))
        if not unavailable:
            break
        pairs = [(a, b) for a, b in pairs if a not in unavailable]
    if not pairs:
        return schedule
    ends = {start: end for end, start in schedule.carry}
    dropped = {ends[b] for _, b in pairs if b in ends} - gathered  # their transfers are no longer needed
    feeders = (step.sources for step in steps if isinstance(step, Move) for b in defs(step) if b in dropped)
    sources = tuple(dict.fromkeys(name for names in feeders for name in names))
    (a, b), all_pairs = pairs[0], frozenset(range(len(pairs)))
    users, owners = _fragments_using(steps, gathered), _fragments_using(steps, sharded)
    gather = Move(a.group, b.group, tuple(pairs), sources, users, freed=all_pairs, donates=True)
    reversed_pairs = tuple((b, a) for a, b in pairs)
    slice_back = Move(b.group, a.group, reversed_pairs, users, owners, freed=all_pairs, donates=True)
    before, between, after = (
        [new for step in part if (new := _without_values(step, dropped)) is not None]
        for part in (steps[:first], steps[first : last + 1], steps[last + 1 :])
    )
    return dataclasses.replace(
        schedule,
        steps=(
            *before,
            gather,
            *(_without_freeing(step, gathered) for step in between),
            slice_back,
            *after,
        ),
        leaves=tuple(tuple(v for v in values if v not in gathered) for values in schedule.leaves),
        carry=tuple((end, start) for end, start in schedule.carry if start not in gathered),
    )


def _gatherable_leaves(schedule: Schedule, change_of: ChangeOf) -> list[tuple[Value, Value]]:
    """Pairs (primary, copy) of a leaf's values, where the copy has larger parts that can be gathered."""
    ends = {start: end for end, start in schedule.carry}
    source_of = {b: a for step in schedule.steps if isinstance(step, Move) for a, b in step.pairs}
    used = {value for step in schedule.steps for value in uses(step)}
    loops = [step for step in schedule.steps if isinstance(step, Repeat)]
    carried = {b for loop in loops for _, b in loop.carry}
    carried_in = {outer for loop in loops for outer, inner in loop.enter if inner in carried}
    pairs = []
    for primary, *copies in schedule.leaves:
        for copy in copies:
            change = change_of(primary, copy)
            end, primary_end = ends.get(copy, copy), ends.get(primary, primary)
            is_unchanged = end is copy and primary_end is primary
            is_copied_at_end = end in source_of and source_of[end] is primary_end and end not in used
            if (
                change is not None
                and change.kind == GATHER
                and (is_unchanged or is_copied_at_end)
                and copy in used
                and copy not in carried_in
                and copy not in schedule.metrics
            ):
                pairs.append((primary, copy))
    return [(a, b) for a, b in pairs if (a.group, b.group) == (pairs[0][0].group, pairs[0][1].group)]


def _freed_by(step: Step) -> set[Value]:
    """The values that a step frees or donates. A loop donates what it carries, except copies."""
    if isinstance(step, Repeat):
        carried = {start for _, start in step.carry}
        entered = (pair for i, pair in enumerate(step.enter) if i not in step.copied)
        return {outer for outer, inner in entered if inner in carried}
    return {
        value for i, value in enumerate(uses(step)) if i in step.freed or i in getattr(step, "donated", ())
    }


def _fragments_using(steps: Sequence[Step], values: set[Value]) -> tuple[str, ...]:
    """The fragments whose programs use some of the values."""
    calls = [step for step in steps if isinstance(step, Call) and not values.isdisjoint(uses(step))]
    return tuple(dict.fromkeys(name for call in calls for name in call.fragments))


def _without_freeing(step: Step, values: set[Value]) -> Step:
    """The step, changed so that it does not free these values."""
    if isinstance(step, Repeat):
        return step
    positions = {i for i, value in enumerate(uses(step)) if value in values}
    freed = step.freed - positions
    if isinstance(step, Move):
        return dataclasses.replace(step, freed=freed)
    return dataclasses.replace(step, freed=freed, donated=step.donated - positions)


def _without_values(step: Step, dropped: set[Value]) -> Step | None:
    """Removes the values `dropped` from a transfer; None if no value remains."""
    if not isinstance(step, Move):
        return step
    remaining = [i for i, value in enumerate(defs(step)) if value not in dropped]
    freed = frozenset(new for new, old in enumerate(remaining) if old in step.freed)
    pairs = tuple(step.pairs[i] for i in remaining)
    return dataclasses.replace(step, pairs=pairs, freed=freed) if pairs else None


def resharding_notes(schedule: Schedule) -> list[str]:
    """A line per transfer between groups on the same devices, with kinds of resharding and temporary memory.

    Values that can be neither gathered nor sliced get a line of their own, because they need more memory.
    """
    notes = []
    for move, times in schedule.moves():
        if not move.changes:
            continue
        replicated = [(c, a) for c, (a, _) in zip(move.changes, move.pairs, strict=True) if a.axis is None]
        kinds: dict[tuple[str, int], list[int]] = {}
        for c, a in replicated:
            kinds.setdefault((c.kind, c.gather_size), []).append(c.temporary_bytes(a.bytes))
        parts = []
        for (kind, gather_size), temporary in kinds.items():
            count = f"{len(temporary)} {'array' if len(temporary) == 1 else 'arrays'}"
            parts.append(
                f"{count} {_KIND_TEXTS[kind].format(gather_size)}, {max(temporary):,} B temporary at most"
            )
        if parts:
            verb = "lends to" if move.donates else "to"
            notes.append(f"resharding {move.source} {verb} {move.target}, x{times}: {'; '.join(parts)}")
        notes += [
            f"  neither gathered nor sliced: {a.variable.aval.str_short()} as ({spec_text(c.source.spec)}) ->"
            f" ({spec_text(c.target.spec)}), {c.temporary_bytes(a.bytes):,} B temporary"
            for c, a in replicated
            if c.kind == EXCHANGE
        ]
    return list(dict.fromkeys(notes))


_KIND_TEXTS = {  # by `Change.kind`; `{}` is `Change.gather_size`
    STAYS: "as they are",
    GATHER: "gathered among {} neighbours",
    SLICE: "cut, which moves nothing",
    EXCHANGE: "exchanged through the whole array",
}
