"""The content that all drawings of a plan share: one iteration as nested loops of program runs, and notes."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import jax

from fdg import jaxprs
from fdg.placing.layout import MODEL, spec_text
from fdg.placing.plans import BETWEEN, Movement, Plan, PlannedProgram, SteppedPlan
from fdg.placing.scheduling.schedule import Call, Move, Step
from fdg.placing.sharded import axes_text
from fdg.showing.words import ancestors, device_ranges, joined_by_and, listed_within, quantity
from fdg.tracing.graph import FDG, Fragment


@dataclasses.dataclass(frozen=True)
class RunLine:
    """A run of a program on a group, with its `collectives`."""

    program: PlannedProgram
    collectives: tuple[Movement, ...]


@dataclasses.dataclass(frozen=True)
class TransferLine:
    """A transfer from one group to another."""

    source: str
    target: str
    movement: Movement


@dataclasses.dataclass(frozen=True)
class LoopLine:
    """A loop that the host steps."""

    count: int  # number of trips
    opened: tuple[str, ...]  # fragments that no program runs whole, because this loop inside them is split
    lines: "tuple[Line, ...]"


Line = RunLine | TransferLine | LoopLine
L = TypeVar("L", RunLine, TransferLine, LoopLine)


def outline(plan: Plan) -> tuple[Line, ...]:
    """One iteration of a plan, in order."""
    collectives = collections.defaultdict(list)
    for movement in plan.movements:
        if movement.program:
            collectives[movement.program].append(movement)
    runs = iter([RunLine(p, tuple(collectives[p.name])) for p in plan.programs])
    if not isinstance(plan, SteppedPlan):
        return tuple(runs)
    transfers = iter([movement for movement in plan.movements if movement.how == "transfer"])
    opened = split_fragments(plan)

    def lines(steps: Iterable[Step]) -> Iterator[Line]:
        for step in steps:
            if isinstance(step, Call):
                yield next(runs)
            elif isinstance(step, Move):
                yield TransferLine(step.source, step.target, next(transfers))
            else:
                inner_lines = tuple(lines(step.steps))
                names = {f for line in all_lines(inner_lines, RunLine) for f in line.program.fragments}
                enclosing = [ancestors(plan.graph, name) for name in names]
                common = set.intersection(*map(set, enclosing)) if enclosing else set()
                yield LoopLine(step.trips, tuple(name for name in opened if name in common), inner_lines)

    return tuple(lines(plan.schedule.steps))


def split_fragments(plan: Plan) -> tuple[str, ...]:
    """The fragments that no program runs whole, because their parts are on different groups."""
    whole_fragments = {name for program in plan.programs for name in program.fragments}
    return tuple(f.name for f in plan.graph.fragments if f.name not in whole_fragments)


def all_lines(lines: Iterable[Line], kind: type[L]) -> Iterator[L]:
    """Yields all lines of a kind, including those inside loops."""
    for line in lines:
        if isinstance(line, kind):
            yield line
        if isinstance(line, LoopLine):
            yield from all_lines(line.lines, kind)


# --- in words ---


def _outermost(graph: FDG, names: Sequence[str]) -> list[str]:
    """The fragments that are not nested in another fragment of `names`."""
    fragments = [name for name in names if name != BETWEEN]
    return [name for name in fragments if not set(ancestors(graph, name)) & set(fragments)]


def direction_text(plan: Plan, movement: Movement, width: int, arrow: str = " -> ") -> str:
    """The source and target of a movement, in about `width` characters."""
    delayed = plan.delayed is not None and movement.delay == "iteration"
    source = _outermost(plan.graph, movement.source.split(", ")) or [BETWEEN]
    target = _outermost(plan.graph, movement.target.split(", ")) or ["history" if delayed else BETWEEN]
    available = max(width - len(arrow), 10)
    start = listed_within(source, available - min(len(", ".join(target)), available // 2))
    return f"{start}{arrow}{listed_within(target, available - len(start))}"


def title(plan: Plan) -> str:
    """The first line of a plan: algorithm, devices and policy."""
    agents = "" if plan.graph.agents is None else f", {plan.graph.agents} agents"
    devices = f"{plan.num_devices} device{'s' if plan.num_devices != 1 else ''}"
    return f"{plan.policy} places {plan.graph.name} on {devices}{agents}"


def batch_per_device(plan: Plan, fragment: Fragment) -> int | None:
    """The batch size (or the number of agents) of one device."""
    total = fragment.batch_size if plan.graph.agents is None else plan.graph.agents
    return None if total is None else total // plan.group_of(fragment.name).num_batch_parts


def _traffic_note(plan: Plan) -> str:
    """The note on the bytes that move in an iteration."""
    total: collections.Counter[str] = collections.Counter()
    for m in plan.movements:
        total["between" if m.how == "transfer" else "within" if m.how else "local"] += m.bytes_per_iteration
    local = quantity(total["local"], "B")
    if len(plan.groups) == 1:
        return f"{local} per iteration pass between fragments on the same devices"
    within = f" and {quantity(total['within'], 'B')} within them" if total["within"] else ""
    moved = f"{quantity(total['between'], 'B')} an iteration move between groups"
    return f"{moved}{within}; {local} stay on their devices"


def _memory_note(plan: Plan) -> str:
    """The note on the memory of each group's devices."""
    sizes = dict(plan.memory)
    if len(plan.sharing) == 1:
        return f"memory per device, about: {quantity(plan.memory[0][1], 'B')}"
    entries = (f"{joined_by_and(list(names))} {quantity(sizes[names[0]], 'B')}" for names in plan.sharing)
    return f"memory per device, about: {', '.join(entries)}"


def _staleness_notes(plan: Plan) -> list[str]:
    """The notes on staleness: which leaves are read late, and whether that saves time."""
    delayed = plan.delayed
    if delayed is None:
        return []
    age, lag, micro_batches = delayed.staleness, delayed.lag, delayed.micro_batches
    setting = f"lag {lag}" if lag else f"staleness {age}"
    if not delayed.leaves:
        return [f"{setting}: has no effect: no group with an actor reads a result of another group"]
    readers = joined_by_and(list(delayed.readers))
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(plan.graph.state.state)
    paths, leaves = zip(*(paths_and_leaves[i] for i in delayed.leaves), strict=True)
    names = dict.fromkeys(jax.tree_util.keystr(path[:1], simple=True) for path in paths)
    size = quantity(sum(map(jaxprs.bytes_of, leaves)), "B")
    leaf_names = listed_within([name or "the state" for name in names], 32)
    verb = "reads" if len(delayed.readers) == 1 else "read"
    age_text = f"as at the start of iteration t-{age}"
    if num_older := lag and lag % micro_batches:
        newer = f"t-{age - 1}" if age > 1 else "t"
        first_batches = f"the first {num_older} of {micro_batches} micro-batches"
        age_text += f" in {first_batches}, of iteration {newer} in the others"
    lines = [f"{setting}: in iteration t, {readers} {verb} {leaf_names} ({size}) {age_text}"]
    if len(plan.groups) == 1:
        shared = "the one device" if len(plan.groups[0]) == 1 else "all devices"
        lines.append(
            f"{setting}: actors and learners share {shared}, so they never run at the same time: use"
            f" more (--devices 2), or leave {setting.partition(' ')[0]} out"
        )
    return lines


def idle_notes(plan: Plan) -> list[str]:
    """Notes on idle devices."""
    if plan.graph.agents is not None:
        width = len(plan.groups[0])
        reason = f"the largest number of them that divides {plan.graph.agents} agents is {width}"
        return [f"idle: {device_ranges(plan.idle, 40)} ({reason})"] if plan.idle else []
    lines, unexplained = [], set(plan.idle)
    for name, devices in plan.unfit:
        unfit = [device for device in devices if device in unexplained]
        if not unfit:
            continue
        unexplained -= set(unfit)
        group = next(g for g in plan.groups if g.name == name)
        own_fragments = [f for f in plan.graph.fragments if plan.group_of(f.name) == group]
        sizes = [str(n) for n in sorted({f.batch_size for f in own_fragments if f.batch_size})]
        plural = len(sizes) != 1
        divide = f"batches of {joined_by_and(sizes)} divide" if plural else f"a batch of {sizes[0]} divides"
        ratio = f"{len(group)} of {len(group) + len(devices)} devices"
        lines.append(f"idle: {device_ranges(unfit, 40)} ({name}: {divide} over {ratio})")
    if unexplained:
        reason = f"{type(plan.policy).__name__} places no fragment there"
        lines.append(f"idle: {device_ranges(sorted(unexplained), 40)} ({reason})")
    return lines


def _sharding_notes(plan: Plan) -> list[str]:
    """Notes on sharded parameters, leaves that stay whole, and unknown collectives."""
    lines, state_leaves = [], jax.tree.leaves(plan.graph.state)
    for group in plan.groups:
        if not group.shards:
            continue
        positions = _leaves_on(plan, group.name)
        leaves = [leaf for leaf in plan.sharded if leaf.group == group.name and leaf.position in positions]
        assert not isinstance(group.parameters, str)  # "declared" is resolved in plans
        splitting_rules = {rule for rule, spec in group.parameters if any(spec)}
        split_leaves = [leaf for leaf in leaves if leaf.layout.num_parts > 1]
        sizes = [jaxprs.bytes_of(state_leaves[leaf.position]) for leaf in split_leaves]
        parts = (size // leaf.layout.num_parts for size, leaf in zip(sizes, split_leaves, strict=True))
        lines.append(
            f"sharded on {group.name} ({axes_text(group)}): {len(split_leaves)} leaves of"
            f" {quantity(sum(sizes), 'B')}, {quantity(sum(parts), 'B')} a device"
        )
        rows: dict[tuple[str, str], list[str]] = {}
        for leaf in split_leaves:
            rows.setdefault((leaf.rule, spec_text(leaf.layout.spec)), []).append(leaf.path)
        for (rule, spec), paths in rows.items():
            lines.append(f"  '{rule}' as ({spec}): {listed_within(paths, 60)}")
        if group.model > 1 and not any(MODEL in axes for leaf in split_leaves for axes in leaf.layout.spec):
            lines.append(
                f"  no rule splits over model: the {group.model} devices of a row compute the same; use"
                " --parameters declared, or rules with 'model'"
            )
        unsplit = [leaf for leaf in leaves if leaf.layout.num_parts == 1]
        if whole := [leaf.path for leaf in unsplit if leaf.rule in splitting_rules]:
            lines.append(f"  whole, for no dimension divides: {listed_within(whole, 60)}")
    lines += [f"rule '{rule}' of {group} takes no leaf" for group, rule in plan.unused_rules]
    lines += [f"collectives of group {group}: known after compiling" for group in plan.unpredicted]
    measured = dict.fromkeys(m.where for m in plan.movements if m.read)
    return lines + [f"collectives of group {group}: read from its compiled programs" for group in measured]


def _leaves_on(plan: Plan, group: str) -> set[int]:
    """The positions of the state's leaves that a group keeps, or receives in an iteration."""
    if not isinstance(plan, SteppedPlan):
        return {leaf.position for leaf in plan.sharded}
    arriving = {b.variable for move, _ in plan.moves() for _, b in move.pairs if b.group == group}
    return {
        i
        for i, values in enumerate(plan.schedule.leaves)
        if any(value.group == group or value.variable in arriving for value in values)
    }


def notes(plan: Plan) -> list[str]:
    """Sentences on bytes, memory, shards, staleness and idle devices, and then `plan.notes`."""
    return [
        _traffic_note(plan),
        _memory_note(plan),
        *_sharding_notes(plan),
        *_staleness_notes(plan),
        *idle_notes(plan),
        *plan.notes,
    ]


def amount_text(movement: Movement, sign: str) -> str:
    """The bytes of a crossing, then `sign` and the number of crossings per iteration."""
    return f"{quantity(movement.bytes_per_crossing, 'B')} {sign}{movement.crossings_per_iteration}"
