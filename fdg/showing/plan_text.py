"""Draws plans as text, for terminals."""

import textwrap
from collections.abc import Iterable, Iterator

from fdg.placing.plans import BETWEEN, Movement, Plan, PlannedProgram
from fdg.showing.plan_outline import (
    Line,
    LoopLine,
    TransferLine,
    all_lines,
    batch_per_device,
    direction_text,
    notes,
    outline,
    title,
)
from fdg.showing.words import ancestors, calls, clip, device_ranges, listed_within, quantity, table

COLUMNS = 110  # width of a printed plan
_AMOUNTS = ("bytes/crossing", "crossings", "bytes/iteration")  # headers of the columns of `_amounts`


def plan_text(plan: Plan) -> str:
    """The text of a plan, which `print(engine.plan)` prints."""
    lines = [*textwrap.wrap(title(plan), COLUMNS, subsequent_indent="  "), ""]
    share_header = "agents/device" if plan.graph.agents is not None else "batch/device"
    rows: list[tuple[str, ...]] = []
    for fragment in plan.graph.fragments:
        group, batch = plan.group_of(fragment.name), batch_per_device(plan, fragment)
        indent = "  " * len(ancestors(plan.graph, fragment.name))
        rows.append(
            (clip(f"{indent}{fragment.name}", 30), clip(fragment.role, 18), clip(group.name, 18),
             device_ranges(group.devices), calls(fragment), "-" if batch is None else str(batch))
        )  # fmt: skip
    lines += table(("fragment", "role", "group", "devices", "calls", share_header), rows, (4, 5))
    lines.append("")
    if len(plan.groups) > 1:
        iteration = outline(plan)
        groups_texts = [
            *map(_groups_text, all_lines(iteration, TransferLine)),
            *(clip(g.name, 24) for g in plan.groups),
        ]
        width = COLUMNS - len("  " * 5 + "".join(_AMOUNTS)) - max(map(len, groups_texts))
        rows = list(_nest_rows(plan, iteration, width))
        lines += table(("each iteration", "where", *_AMOUNTS), rows, (2, 3, 4))
    elif moves := [m for m in plan.movements if m.how]:
        rows = [(clip(m.source, 40), m.how, *_amounts(m)) for m in moves]
        lines += table(("moves between devices", "how", *_AMOUNTS), rows, (2, 3, 4))
    elif not plan.unpredicted:
        lines.append("  nothing moves between devices")
    for note in notes(plan):
        lines += textwrap.wrap(note, COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _amounts(m: Movement) -> tuple[str, str, str]:
    """The cells of a movement in the columns `_AMOUNTS`."""
    crossing, iteration = quantity(m.bytes_per_crossing, "B"), quantity(m.bytes_per_iteration, "B")
    return crossing, str(m.crossings_per_iteration), iteration


def _nest_rows(plan: Plan, lines: Iterable[Line], width: int, level: int = 0) -> Iterator[tuple[str, ...]]:
    """Yields the table rows of the loop nest: steps, groups, and moved bytes."""
    indent = "  " * level
    for line in lines:
        if isinstance(line, LoopLine):
            opened = f" of {listed_within(line.opened, 20)}" if line.opened else ""
            yield clip(f"{indent}for {line.count} steps{opened}:", width), "", "", "", ""
            yield from _nest_rows(plan, line.lines, width, level + 1)
        elif isinstance(line, TransferLine):
            delay = f" (next {line.movement.delay})" if line.movement.delay else ""
            direction = direction_text(plan, line.movement, width - len(f"{indent}move {delay}"))
            yield f"{indent}move {direction}{delay}", _groups_text(line), *_amounts(line.movement)
        else:
            run = f"{indent}run {_program_text(line.program, width - len(indent) - 4)}"
            yield run, clip(line.program.group, 24), "", "", ""
            for m in line.collectives:
                source = f"of {m.source}" if m.source != BETWEEN else BETWEEN
                yield clip(f"{indent}  {m.how} {source}", width), clip(m.where, 24), *_amounts(m)


def _groups_text(line: TransferLine) -> str:
    """The groups of a transfer, in at most 24 characters."""
    text = line.movement.where
    return text if len(text) <= 24 else f"{clip(line.source, 10)} -> {clip(line.target, 10)}"


def _program_text(program: PlannedProgram, width: int) -> str:
    """The name of a program, in at most `width` characters."""
    if " " in program.name:
        return clip(program.name, width)
    return listed_within(program.name.split("+"), width, "+")
