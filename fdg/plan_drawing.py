"""Plans for people: text for terminals, Mermaid for documents, SVG for notebooks.

All three show the same outline: one iteration as the loop nest of programs and transfers that it becomes.
"""

import collections
import dataclasses
import html
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import jax

from fdg.drawing import COLOURS, OTHER, calls, depth, quantity, table
from fdg.graph import FDG, Fragment
from fdg.placement import BETWEEN, Group, Movement, Plan, PlannedProgram
from fdg.schedule import Call, Move, Step

COLUMNS = 110  # of a printed plan


# ---------------------------------------------------------------------------------------------------
# The outline: what the host does in one iteration
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A group runs a program, in which its devices exchange what `collectives` say."""

    program: PlannedProgram
    collectives: tuple[Movement, ...]


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Arrays go from one group to another."""

    source: str
    target: str
    movement: Movement


@dataclasses.dataclass(frozen=True)
class Trips:
    """A loop that is stepped from outside the programs.

    Attributes:
      opened: fragments that are nowhere a program of their own because this loop, which is theirs, is split.
    """

    count: int
    opened: tuple[str, ...]
    lines: "tuple[Line, ...]"


Line = Run | Crossing | Trips


def outline(plan: Plan) -> tuple[Line, ...]:
    """One iteration of a plan, in order."""
    collectives = collections.defaultdict(list)
    for m in plan.movements:
        if m.program:
            collectives[m.program].append(m)
    runs = iter([Run(p, tuple(collectives[p.name])) for p in plan.programs])
    if plan.schedule is None:
        return tuple(runs)
    crossings = iter([m for m in plan.movements if m.how == "transfer"])
    opened = _opened(plan)

    def lines(steps: Iterable[Step]) -> Iterator[Line]:
        for step in steps:
            if isinstance(step, Call):
                yield next(runs)
            elif isinstance(step, Move):
                yield Crossing(step.source, step.target, next(crossings))
            else:
                inner = tuple(lines(step.steps))
                around = [_ancestors(plan.graph, name) for name in _fragments(inner)]
                shared = set.intersection(*map(set, around)) if around else set()
                yield Trips(step.trips, tuple(name for name in opened if name in shared), inner)

    return tuple(lines(plan.schedule.steps))


def _fragments(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        if isinstance(line, Run):
            yield from line.program.fragments
        elif isinstance(line, Trips):
            yield from _fragments(line.lines)


def _opened(plan: Plan) -> tuple[str, ...]:
    """Fragments that are in no program as a whole, since the policy places their parts apart."""
    whole = {name for program in plan.programs for name in program.fragments}
    return tuple(f.name for f in plan.graph.fragments if f.name not in whole)


# ---------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------


def _ancestors(graph: FDG, name: str) -> list[str]:
    parent = graph.fragment(name).parent
    return [] if parent is None else [parent, *_ancestors(graph, parent)]


def _outermost(graph: FDG, names: Sequence[str]) -> list[str]:
    """Without those that are nested in another of them."""
    known = [name for name in names if name != BETWEEN]
    return [name for name in known if not set(_ancestors(graph, name)) & set(known)]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _listed(names: Sequence[str], width: int, separator: str = ", ") -> str:
    """Names in at most `width` characters; those that do not fit are counted.

    >>> _listed(["act", "step", "judge", "learn"], 18)
    'act, step, +2 more'
    """
    for count in range(len(names), 0, -1):
        rest = [f"+{len(names) - count} more"] * (count < len(names))
        text = separator.join([*names[:count], *rest])
        if len(text) <= width:
            return text
    others = f" +{len(names) - 1}" if len(names) > 1 else ""
    return _clip(names[0], width - len(others)) + others


def _and(names: Sequence[str], width: int = 40) -> str:
    if len(names) < 2 or len(" and ".join(names)) > width:
        return _listed(names, width)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def span(devices: Sequence[int], width: int = 16) -> str:
    """Positions as ranges: (0, 1, 2, 5) is "0-2, 5"; many of them are counted."""
    runs: list[list[int]] = []
    for d in devices:
        if runs and d == runs[-1][-1] + 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    ranges = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    text = ", ".join(ranges)
    return text if len(text) <= width else f"{ranges[0]}, ..., {ranges[-1]} ({len(devices)})"


def _ends(plan: Plan, movement: Movement, width: int, arrow: str = " -> ") -> str:
    """What a movement goes from and to, in about `width` characters."""
    delayed = plan.delayed is not None and movement.delay == "iteration"
    source = _outermost(plan.graph, movement.source.split(", ")) or [BETWEEN]
    target = _outermost(plan.graph, movement.target.split(", ")) or ["history" if delayed else BETWEEN]
    room = max(width - len(arrow), 10)
    start = _listed(source, room - min(len(", ".join(target)), room // 2))
    return f"{start}{arrow}{_listed(target, room - len(start))}"


def _title(plan: Plan) -> str:
    agents = "" if plan.num_seeds is None else f", {plan.num_seeds} agents"
    number = f"{plan.num_devices} device{'s' if plan.num_devices != 1 else ''}"
    return f"{plan.policy} places {plan.graph.name} on {number}{agents}"


def _per_device(plan: Plan, fragment: Fragment) -> int | None:
    """How much of the batch (or how many agents) one device has."""
    share = plan.num_seeds if plan.num_seeds is not None else fragment.batch_size
    return None if share is None else share // len(plan.group_of(fragment.name))


def _traffic(plan: Plan) -> str:
    total: collections.Counter[str] = collections.Counter()
    for m in plan.movements:
        total["between" if m.how == "transfer" else "within" if m.how else "kept"] += m.bytes_per_iteration
    kept = quantity(total["kept"], "B")
    if len(plan.groups) == 1:
        return f"{kept} an iteration pass between fragments on the same devices"
    within = f" and {quantity(total['within'], 'B')} within them" if total["within"] else ""
    moved = f"{quantity(total['between'], 'B')} an iteration move between groups"
    return f"{moved}{within}; {kept} stay on their devices"


def _memory(plan: Plan) -> str:
    if len(plan.memory) == 1:
        return f"memory per device, at least: {quantity(plan.memory[0][1], 'B')}"
    each = (f"{group} {quantity(size, 'B')}" for group, size in plan.memory)
    return f"memory per device, at least: {', '.join(each)}"


def _staleness(plan: Plan) -> list[str]:
    """What is delayed, and by how much."""
    if plan.delayed is None:
        return []
    back = plan.delayed.staleness
    actors = _and([f.name for f in plan.graph.fragments if f.role == "actor"]) or "no fragment"
    if not plan.delayed.leaves:
        return [f"staleness {back}: delays nothing, for no actor uses what another group makes"]
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(plan.graph.state.state)[0]]
    leaves = jax.tree.leaves(plan.graph.state.state)
    names = dict.fromkeys(jax.tree_util.keystr(paths[i][:1], simple=True) for i in plan.delayed.leaves)
    size = quantity(sum(leaves[i].size * leaves[i].dtype.itemsize for i in plan.delayed.leaves), "B")
    what = _listed([name or "the state" for name in names], 32)
    verb = "reads" if " " not in actors else "read"
    late = f"as at the start of iteration t-{back}"
    return [f"staleness {back}: in iteration t, {actors} {verb} {what} ({size}) {late}"]


def _idle(plan: Plan) -> list[str]:
    """Idle devices, and why."""
    if plan.num_seeds is not None:
        width = len(plan.groups[0])
        reason = f"the largest number of them that divides {plan.num_seeds} agents is {width}"
        return [f"idle: {span(plan.idle, 40)} ({reason})"] if plan.idle else []
    found, unasked = [], set(plan.idle)
    for name, devices in plan.unfit:
        here = [d for d in devices if d in unasked]
        if not here:
            continue
        unasked -= set(here)
        group = next(g for g in plan.groups if g.name == name)
        sizes = sorted({f.batch_size for f in plan.graph.fragments
                        if f.batch_size and plan.group_of(f.name) == group})  # fmt: skip
        batches = (
            f"a batch of {sizes[0]}" if len(sizes) == 1 else f"batches of {_and([str(n) for n in sizes])}"
        )
        divides = "divides" if len(sizes) == 1 else "divide"
        asked = len(group) + len(devices)
        found.append(
            f"idle: {span(here, 40)} ({name}: {batches} {divides} over {len(group)} of {asked} devices)"
        )
    if unasked:
        found.append(f"idle: {span(sorted(unasked), 40)} ({type(plan.policy).__name__} places nothing there)")
    return found


def _notes(plan: Plan) -> list[str]:
    return [_traffic(plan), _memory(plan), *_staleness(plan), *_idle(plan)]


# ---------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------


def plan_text(plan: Plan) -> str:
    """What `print(engine.plan)` shows."""
    lines = [*textwrap.wrap(_title(plan), COLUMNS, subsequent_indent="  "), ""]
    split = "agents/device" if plan.num_seeds is not None else "batch/device"
    rows = []
    for f in plan.graph.fragments:
        group, share = plan.group_of(f.name), _per_device(plan, f)
        rows.append(
            (_clip("  " * depth(plan.graph, f) + f.name, 30), _clip(f.role, 18), _clip(group.name, 18),
             span(group.devices), calls(f), "-" if share is None else str(share))
        )  # fmt: skip
    lines += table(("fragment", "role", "group", "devices", "calls", split), rows, (4, 5))
    lines.append("")
    if len(plan.groups) > 1:
        iteration = outline(plan)
        where = [*map(_where, _crossings(iteration)), *(_clip(g.name, 24) for g in plan.groups)]
        width = (
            COLUMNS
            - len("  " * 5 + "bytes/crossing" + "crossings" + "bytes/iteration")
            - max(map(len, where))
        )
        header = ("each iteration", "where", "bytes/crossing", "crossings", "bytes/iteration")
        lines += table(header, list(_nest(plan, iteration, width)), (2, 3, 4))
    elif moving := [m for m in plan.movements if m.how]:
        header = ("moves between devices", "how", "bytes/crossing", "crossings", "bytes/iteration")
        lines += table(header, [(_clip(m.source, 40), m.how, *_amounts(m)) for m in moving], (2, 3, 4))
    else:
        lines.append("  nothing moves between devices")
    for note in _notes(plan):
        lines += textwrap.wrap(note, COLUMNS, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _amounts(m: Movement) -> tuple[str, str, str]:
    sizes = quantity(m.bytes_per_crossing, "B"), quantity(m.bytes_per_iteration, "B")
    return sizes[0], str(m.crossings_per_iteration), sizes[1]


def _nest(plan: Plan, lines: Iterable[Line], width: int, level: int = 0) -> Iterator[tuple[str, ...]]:
    """Rows of the loop nest: what, where, and the bytes of what moves."""
    indent = "  " * level
    for line in lines:
        if isinstance(line, Trips):
            inside = f" of {_listed(line.opened, 20)}" if line.opened else ""
            yield _clip(f"{indent}for {line.count} steps{inside}:", width), "", "", "", ""
            yield from _nest(plan, line.lines, width, level + 1)
        elif isinstance(line, Crossing):
            late = f" (next {line.movement.delay})" if line.movement.delay else ""
            ends = _ends(plan, line.movement, width - len(f"{indent}move {late}"))
            yield f"{indent}move {ends}{late}", _where(line), *_amounts(line.movement)
        else:
            run = f"{indent}run {_program(line.program, width - len(indent) - 4)}"
            yield run, _clip(line.program.group, 24), "", "", ""
            for m in line.collectives:
                what = f"of {m.source}" if m.source != BETWEEN else BETWEEN
                yield _clip(f"{indent}  {m.how} {what}", width), _clip(m.where, 24), *_amounts(m)


def _where(line: Crossing) -> str:
    where = line.movement.where
    return where if len(where) <= 24 else f"{_clip(line.source, 10)} -> {_clip(line.target, 10)}"


def _program(program: PlannedProgram, width: int) -> str:
    if " " in program.name:
        return _clip(program.name, width)
    return _listed(program.name.split("+"), width, "+")


# ---------------------------------------------------------------------------------------------------
# Mermaid
# ---------------------------------------------------------------------------------------------------


def plan_mermaid(plan: Plan) -> str:
    """A Mermaid flowchart: boxes for groups, arrows for transfers, dotted to the next step or iteration."""
    lines = ["flowchart LR"]
    fragments = {f.name: f"f{i}" for i, f in enumerate(plan.graph.fragments)}
    groups = {group.name: f"g{i}" for i, group in enumerate(plan.groups)}
    collectives = [m for m in plan.movements if m.program]
    styles = []
    memory = dict(plan.memory)

    def node(f: Fragment, group: Group, indent: str) -> None:
        inside = [c for c in plan.graph.fragments if c.parent == f.name and plan.group_of(c.name) == group]
        label = f'{fragments[f.name]}["{_quoted(f.name)}<br/><i>{_quoted(f.role)}</i> x{calls(f)}"]'
        styles.append(f"  style {fragments[f.name]} fill:{COLOURS.get(f.role, OTHER)},stroke:#555,color:#111")
        if not inside:
            lines.append(indent + label)
            return
        lines.append(f"{indent}subgraph {label}")
        for child in inside:
            node(child, group, indent + "  ")
        lines.append(f"{indent}end")

    for group in plan.groups:
        plural = "s" if len(group) > 1 else ""
        size = quantity(memory[group.name], "B")
        where = f"device{plural} {span(group.devices, 30)}, {size}{' each' * bool(plural)}"
        lines.append(f'  subgraph {groups[group.name]}["{_quoted(group.name)}<br/>{where}"]')
        for f in plan.graph.fragments:
            parent = f.parent and plan.group_of(f.parent)
            if plan.group_of(f.name) == group and parent != group:
                node(f, group, "    ")
        for i, m in enumerate(collectives):
            if m.where == group.name:
                inside = "" if m.source == BETWEEN else f" of {_quoted(m.source)}"
                lines.append(f'    c{i}{{{{"{m.how}{inside}<br/>{_times(m, "x")}"}}}}')
        lines.append("  end")
    for line in _crossings(outline(plan)):
        m = line.movement
        label = f"{_quoted(_ends(plan, m, 60, ' to '))}<br/>{_times(m, 'x')}"
        link = f'-. "{label}, next {m.delay}" .->' if m.delay else f'-- "{label}" -->'
        lines.append(f"  {groups[line.source]} {link} {groups[line.target]}")
    for i, m in enumerate(collectives):
        if m.source in fragments:
            lines.append(f"  {fragments[m.source]} --- c{i}")
    if plan.idle:
        lines.append(f'  idle["idle: {span(plan.idle, 40)}"]')
        styles.append("  style idle fill:#fff,stroke:#999,color:#555,stroke-dasharray:4 3")
    styles += [f"  style {name} fill:#f6f6f4,stroke:#8a8a8a,color:#111" for name in groups.values()]
    return "\n".join([*lines, *styles])


def _crossings(lines: Iterable[Line]) -> Iterator[Crossing]:
    for line in lines:
        if isinstance(line, Crossing):
            yield line
        elif isinstance(line, Trips):
            yield from _crossings(line.lines)


def _quoted(text: str) -> str:
    return html.escape(text).replace("#", "&#35;")


def _times(m: Movement, sign: str) -> str:
    return f"{quantity(m.bytes_per_crossing, 'B')} {sign}{m.crossings_per_iteration}"


# ---------------------------------------------------------------------------------------------------
# SVG: a column for each group, with its devices at the head; one iteration runs downwards. A program is a
# card with its fragments, a transfer an arrow from column to column, a loop a frame around its steps. Cards
# side by side run at the same time.
# ---------------------------------------------------------------------------------------------------

_LANE, _GAP, _MARGIN, _CARD, _ROW = 250, 190, 26, 14, 40
_INK, _FAINT, _LINE = "#1a1a1a", "#5c5c5c", "#8a8a8a"
_LETTER = 0.56  # mean width of a letter, in font sizes


class _Canvas:
    """Markup, piece by piece."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, size: float = 12, fill: str = _INK, **more: str) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{extra}>{html.escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str, **more: str
    ) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{stroke}"{extra}/>'
        )


def _fit(text: str, width: float, size: float) -> str:
    return _clip(text, max(int(width / (size * _LETTER)), 4))


def plan_svg(plan: Plan) -> str:
    """A self-contained drawing for notebooks."""
    return _Drawing(plan).markup()


class _Drawing:
    def __init__(self, plan: Plan):
        self.plan, self.lines = plan, outline(plan)
        self.lane = 320 if len(plan.groups) == 1 else _LANE
        nesting = _nesting(self.lines)
        self.margin = _MARGIN + 12 * nesting
        in_order = sorted(plan.groups, key=lambda group: group.devices)
        self.left = {g.name: self.margin + i * (self.lane + _GAP) for i, g in enumerate(in_order)}
        self.width = 2 * self.margin + len(plan.groups) * (self.lane + _GAP) - _GAP
        self.labels = 0.0  # where the labels between the columns end
        self.back, self.front = _Canvas(), _Canvas()

    def markup(self) -> str:
        y = self._title(26)
        top, y = y, self._heads(y)
        if len(self.plan.groups) > 1:
            y = max(self._arrange(self.lines, y + 16, 0), self.labels)
        else:
            y = self._cards([line for line in self.lines if isinstance(line, Run)], y + 16)
        lanes = _Canvas()
        for left in self.left.values():
            lanes.box(left, top, self.lane, y - top + 4, "#f6f6f4", _LINE, rx="10")
        height = self._footer(y + 30)
        label = html.escape(_title(self.plan), quote=True)
        body = "".join([*lanes.parts, *self.back.parts, *self.front.parts])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{height:g}" '
            f'viewBox="0 0 {self.width:g} {height:g}" font-family="system-ui,-apple-system,Helvetica,Arial,'
            f'sans-serif" style="background:#fff" role="img" aria-label="{label}">'
            '<defs><marker id="fdg-move" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_INK}"/></marker></defs>'
            f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>'
        )

    # --- around the columns ---

    def _title(self, y: float) -> float:
        for line in self._wrapped(_title(self.plan), 14):
            self.front.text(self.margin, y, line, 14, font_weight="600")
            y += 20
        return y - 2

    def _footer(self, y: float) -> float:
        for note in _notes(self.plan):
            if note.startswith("memory"):
                continue  # at the heads of the columns
            for i, line in enumerate(self._wrapped(note, 11.5)):
                self.front.text(self.margin + 10 * (i > 0), y, line, 11.5, _FAINT)
                y += 16
        return y + 4

    def _wrapped(self, text: str, size: float) -> list[str]:
        return textwrap.wrap(text, max(int((self.width - 2 * self.margin) / (size * _LETTER)), 20))

    def _heads(self, y: float) -> float:
        """Each group's name, devices and memory."""
        memory = dict(self.plan.memory)
        missing = [f for f in _opened(self.plan) if f not in _in_loops(self.lines)]
        for group in self.plan.groups:
            x = self.left[group.name] + _CARD
            inner = self.lane - 2 * _CARD
            self.front.text(x, y + 24, _fit(group.name, inner * 0.55, 15), 15, font_weight="600")
            count = f"{len(group)} device{'s' if len(group) > 1 else ''}"
            self.front.text(x + inner, y + 24, count, 11.5, _FAINT, text_anchor="end")
            self._chips(group.devices, x, y + 34, inner)
            size = f"at least {quantity(memory[group.name], 'B')} each"
            self.front.text(x, y + 68, size, 11.5, _FAINT)
            apart = [f for f in missing if self.plan.group_of(f) == group]
            if apart:
                self.front.text(x, y + 84, _fit(f"{', '.join(apart)}: in parts", inner, 11), 11, _FAINT)
        return y + (90 if missing else 74)

    def _chips(self, devices: Sequence[int], x: float, y: float, width: float) -> None:
        """A small square for each device; of many, the first and the last."""
        room = int(width // 22)
        shown: list[int | None] = list(devices)
        if len(shown) > room:
            shown = [*shown[: room - 2], None, shown[-1]]
        for i, device in enumerate(shown):
            at = x + 22 * i
            if device is not None:
                self.front.box(at, y, 19, 17, "#fff", "#444", rx="3")
            word = "…" if device is None else str(device)
            self.front.text(at + 9.5, y + 12.5, word, 10, text_anchor="middle")

    # --- inside ---

    def _arrange(self, lines: Sequence[Line], y: float, level: int) -> float:
        """Draws lines downwards from y; returns where they end. Runs of different groups share a row."""
        row: list[Run] = []
        for line in lines:
            if isinstance(line, Run) and line.program.group not in [run.program.group for run in row]:
                row.append(line)
                continue
            y, row = self._cards(row, y), []
            if isinstance(line, Run):
                row = [line]
            elif isinstance(line, Crossing):
                y = self._arrow(line, y)
            else:
                y = self._frame(line, y, level)
        return self._cards(row, y)

    def _frame(self, loop: Trips, y: float, level: int) -> float:
        inside = f" of {_listed(loop.opened, 24)}" if loop.opened else ""
        inset = 14 + 12 * level
        y = max(y, self.labels + 4)
        self.labels = y + 8
        end = max(self._arrange(loop.lines, y + 30, level + 1), self.labels + 2)
        self.labels = end + 4
        self.back.box(inset, y, self.width - 2 * inset, end - y, "#000", "#555", fill_opacity="0.035", rx="8",
                      stroke_dasharray="2 3")  # fmt: skip
        label = f"for {loop.count} steps{inside}"
        self.back.box(inset, y, len(label) * 12 * _LETTER + 20, 21, "#555", "none", rx="6")
        self.front.text(inset + 9, y + 15, label, 12, "#fff", font_weight="600")
        return end + 14

    def _cards(self, runs: Sequence[Run], y: float) -> float:
        return max((self._card(run, y) for run in runs), default=y)

    def _card(self, run: Run, y: float) -> float:
        """A program: its fragments, and what its devices exchange."""
        program = run.program
        x, width = self.left[program.group] + _CARD, self.lane - 2 * _CARD
        top, graph = y, self.plan.graph
        y += 20
        whole = ", for all iterations" if self.plan.schedule is None else ""
        title = _fit(f"program {program.name}{whole}", width - 20, 11)
        body = _Canvas()
        body.text(x + 10, y - 5, title, 11, _FAINT)
        for name in program.fragments:
            nested = len([a for a in _ancestors(graph, name) if a in program.fragments])
            self._fragment(body, graph.fragment(name), x + 8 + 12 * nested, y, width - 16 - 12 * nested)
            y += _ROW
        for m in run.collectives:
            where = f" of {m.source}" if m.source != BETWEEN else ""
            first, second = _fit(f"{m.how}{where}", width - 40, 11), _times(m, "× ")
            self._exchange(body, x + 10, y + 5)
            body.text(x + 34, y + 12, first, 11)
            body.text(x + 34, y + 26, second, 11, _FAINT)
            y += 32
        y += 6
        self.front.box(x, top, width, y - top, "#fff", _LINE, rx="7")
        self.front.parts += body.parts
        return y + 12

    def _fragment(self, canvas: _Canvas, f: Fragment, x: float, y: float, width: float) -> None:
        canvas.box(x, y, width, _ROW - 5, COLOURS.get(f.role, OTHER), "none", rx="5")
        canvas.box(x, y, 4, _ROW - 5, _STRONG.get(f.role, "#8c8c8c"), "none", rx="2")
        share = _per_device(self.plan, f)
        canvas.text(x + 12, y + 15, _fit(f.name, width - 70, 12.5), 12.5, font_weight="600")
        canvas.text(x + width - 8, y + 15, f"× {calls(f)}", 11.5, text_anchor="end")
        unit = "agents" if self.plan.num_seeds is not None else "batch"
        per = f"{unit} {share}/device" if share is not None else ""
        canvas.text(x + 12, y + 29, _fit(f.role, width - 20 - len(per) * 6, 10.5), 10.5, _FAINT)
        if per:
            canvas.text(x + width - 8, y + 29, per, 10.5, _FAINT, text_anchor="end")

    def _exchange(self, canvas: _Canvas, x: float, y: float) -> None:
        """Two arrows, there and back."""
        canvas.parts.append(
            f'<path d="M{x:g} {y:g} h15 m-4 -3.5 l4 3.5 l-4 3.5 '
            f'M{x + 15:g} {y + 10:g} h-15 m4 -3.5 l-4 3.5 l4 3.5" fill="none" stroke="{_INK}" '
            f'stroke-width="1.2"/>'
        )

    def _arrow(self, line: Crossing, y: float) -> float:
        m = line.movement
        source, target = self.left[line.source], self.left[line.target]
        rightwards = source < target
        start = source + self.lane if rightwards else source
        end = target if rightwards else target + self.lane
        dashes = ' stroke-dasharray="6 4"' if m.delay else ""
        at = max(y + 6, self.labels + 24)
        self.front.parts.append(
            f'<path d="M{start:g} {at:g} H{end:g}" fill="none" stroke="{_INK}" stroke-width="1.4"{dashes} '
            f'marker-end="url(#fdg-move)"><title>{html.escape(f"{m.source} -> {m.target}")}</title></path>'
        )
        middle = start + (_GAP if rightwards else -_GAP) / 2
        self.front.text(middle, at - 7, _ends(self.plan, m, 31, " → "), 11, text_anchor="middle")
        self.front.text(middle, at + 15, _times(m, "× "), 11, _FAINT, text_anchor="middle")
        self.labels = at + 18
        if m.delay:
            later = f"next {m.delay}"
            self.front.text(middle, at + 29, later, 11, _FAINT, text_anchor="middle", font_style="italic")
            self.labels += 14
        return at + 14


_STRONG = {  # the same palette as COLOURS, at full strength
    "environment": "#009e73",
    "actor": "#0072b2",
    "buffer": "#e69f00",
    "learner": "#d55e00",
    "gradient": "#d55e00",
    "update": "#d55e00",
}


def _nesting(lines: Iterable[Line]) -> int:
    return max((1 + _nesting(line.lines) for line in lines if isinstance(line, Trips)), default=0)


def _in_loops(lines: Iterable[Line]) -> set[str]:
    """Fragments that a loop's label names."""
    found: set[str] = set()
    for line in lines:
        if isinstance(line, Trips):
            found |= {*line.opened, *_in_loops(line.lines)}
    return found
