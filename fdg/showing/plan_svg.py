"""Draws plans as SVG, for notebooks.

There is one column per group, with its devices at the head; one iteration runs downwards. A program is a
card with its fragments, a transfer is an arrow from column to column, and a loop is a frame around its steps.
Programs side by side can run at the same time.
"""

import textwrap
from collections.abc import Iterable, Sequence

from fdg.placing.plans import BETWEEN, Plan
from fdg.showing.canvas import ARROW, GREY, Canvas
from fdg.showing.plan_outline import (
    Line,
    LoopLine,
    RunLine,
    TransferLine,
    all_lines,
    amount_text,
    batch_per_device,
    direction_text,
    notes,
    outline,
    split_fragments,
    title,
)
from fdg.showing.words import COLOURS, OTHER_COLOUR, ancestors, calls, clip, listed_within, quantity
from fdg.tracing.graph import Fragment

_COLUMN_WIDTH, _COLUMN_GAP, _MARGIN, _CARD_MARGIN, _ROW_HEIGHT = 250, 190, 26, 14, 40  # pixels
_BORDER = "#8a8a8a"
_LETTER_WIDTH = 0.56  # mean width of a letter, relative to the font size


def _fit(text: str, width: float, size: float) -> str:
    """The text, shortened to about `width` pixels at a font size."""
    return clip(text, max(int(width / (size * _LETTER_WIDTH)), 4))


def plan_svg(plan: Plan) -> str:
    """A self-contained drawing for notebooks."""
    return _Drawing(plan).markup()


class _Drawing:
    """The drawing of one plan. Methods that draw at `y` return the `y` below what they drew."""

    def __init__(self, plan: Plan):
        self.plan, self.lines = plan, outline(plan)
        self.column_width = 320 if len(plan.groups) == 1 else _COLUMN_WIDTH
        self.margin = _MARGIN + 12 * _loop_depth(self.lines)
        in_order = sorted(plan.groups, key=lambda group: group.devices)
        pitch = self.column_width + _COLUMN_GAP
        # The left border of each group's column.
        self.left = {g.name: self.margin + i * pitch for i, g in enumerate(in_order)}
        self.width = 2 * self.margin + len(plan.groups) * pitch - _COLUMN_GAP
        self.labels_end = 0.0  # the lower end of the labels between the columns
        self.back, self.front = Canvas(), Canvas()  # `front` is drawn over `back`

    def markup(self) -> str:
        y = 26.0
        for line in self._wrap(title(self.plan), 14):
            self.front.text(self.margin, y, line, 14, font_weight="600")
            y += 20
        top = y - 2
        y = self._draw_heads(top)
        if len(self.plan.groups) > 1:
            y = max(self._draw_lines(self.lines, y + 16, 0), self.labels_end)
        else:
            y = self._draw_runs([line for line in self.lines if isinstance(line, RunLine)], y + 16)
        columns = Canvas()
        for left in self.left.values():
            columns.box(left, top, self.column_width, y - top + 4, "#f6f6f4", _BORDER, rx="10")
        height = self._draw_notes(y + 30)
        picture = Canvas()
        for layer in (columns, self.back, self.front):
            picture.draw(layer)
        return picture.picture(self.width, height, title(self.plan))

    # --- notes, and heads of the columns ---

    def _draw_notes(self, y: float) -> float:
        for note in notes(self.plan):
            if note.startswith("memory"):
                continue  # the heads of the columns show it
            for i, line in enumerate(self._wrap(note, 11.5)):
                self.front.text(self.margin + 10 * (i > 0), y, line, 11.5, GREY)
                y += 16
        return y + 4

    def _wrap(self, text: str, size: float) -> list[str]:
        return textwrap.wrap(text, max(int((self.width - 2 * self.margin) / (size * _LETTER_WIDTH)), 20))

    def _draw_heads(self, y: float) -> float:
        """Draws each group's name, devices and memory."""
        memory = dict(self.plan.memory)
        in_loops = {name for loop in all_lines(self.lines, LoopLine) for name in loop.opened}
        split = [f for f in split_fragments(self.plan) if f not in in_loops]  # no loop's label names them
        for group in self.plan.groups:
            x = self.left[group.name] + _CARD_MARGIN
            inner = self.column_width - 2 * _CARD_MARGIN
            self.front.text(x, y + 24, _fit(group.name, inner * 0.55, 15), 15, font_weight="600")
            count = f"{len(group)} device{'s' if len(group) > 1 else ''}"
            self.front.text(x + inner, y + 24, count, 11.5, GREY, text_anchor="end")
            self._draw_devices(group.devices, x, y + 34, inner)
            size = f"about {quantity(memory[group.name], 'B')} each"
            self.front.text(x, y + 68, size, 11.5, GREY)
            partial = [f for f in split if self.plan.group_of(f) == group]
            if partial:
                self.front.text(x, y + 84, _fit(f"{', '.join(partial)}: in parts", inner, 11), 11, GREY)
        return y + (90 if split else 74)

    def _draw_devices(self, devices: Sequence[int], x: float, y: float, width: float) -> None:
        """Draws a small square per device; if there are many, only the first devices and the last."""
        max_squares = int(width // 22)
        labels = [str(device) for device in devices]
        if len(labels) > max_squares:
            labels = [*labels[: max_squares - 2], "…", labels[-1]]
        for i, label in enumerate(labels):
            left = x + 22 * i
            if label != "…":
                self.front.box(left, y, 19, 17, "#fff", "#444", rx="3")
            self.front.text(left + 9.5, y + 12.5, label, 10, text_anchor="middle")

    # --- steps ---

    def _draw_lines(self, lines: Sequence[Line], y: float, level: int) -> float:
        """Draws lines downwards from `y`. Successive runs of different groups share a row."""
        row: list[RunLine] = []
        for line in lines:
            if isinstance(line, RunLine) and line.program.group not in [run.program.group for run in row]:
                row.append(line)
                continue
            y, row = self._draw_runs(row, y), []
            if isinstance(line, RunLine):
                row = [line]
            elif isinstance(line, TransferLine):
                y = self._draw_transfer(line, y)
            else:
                y = self._draw_loop(line, y, level)
        return self._draw_runs(row, y)

    def _draw_loop(self, loop: LoopLine, y: float, level: int) -> float:
        """Draws the steps of a loop, and a labelled frame around them; `level` is the nesting depth."""
        opened = f" of {listed_within(loop.opened, 24)}" if loop.opened else ""
        inset = 14 + 12 * level
        y = max(y, self.labels_end + 4)
        self.labels_end = y + 8
        end = max(self._draw_lines(loop.lines, y + 30, level + 1), self.labels_end + 2)
        self.labels_end = end + 4
        self.back.box(inset, y, self.width - 2 * inset, end - y, "#000", "#555", fill_opacity="0.035", rx="8",
                      stroke_dasharray="2 3")  # fmt: skip
        label = f"for {loop.count} steps{opened}"
        self.back.box(inset, y, len(label) * 12 * _LETTER_WIDTH + 20, 21, "#555", "none", rx="6")
        self.front.text(inset + 9, y + 15, label, 12, "#fff", font_weight="600")
        return end + 14

    def _draw_runs(self, runs: Sequence[RunLine], y: float) -> float:
        return max((self._draw_run(run, y) for run in runs), default=y)

    def _draw_run(self, run: RunLine, y: float) -> float:
        """Draws a program with its fragments and collectives."""
        program = run.program
        x, width = self.left[program.group] + _CARD_MARGIN, self.column_width - 2 * _CARD_MARGIN
        top, graph = y, self.plan.graph
        y += 20
        scope = ", for all iterations" if len(self.plan.groups) == 1 else ""
        title = _fit(f"program {program.name}{scope}", width - 20, 11)
        body = Canvas()
        body.text(x + 10, y - 5, title, 11, GREY)
        for name in program.fragments:
            nested = len([a for a in ancestors(graph, name) if a in program.fragments])
            self._draw_fragment(body, graph.fragment(name), x + 8 + 12 * nested, y, width - 16 - 12 * nested)
            y += _ROW_HEIGHT
        for m in run.collectives:
            source = f" of {m.source}" if m.source != BETWEEN else ""
            # two opposite arrows, the symbol of a collective
            body.line(
                f"M{x + 10:g} {y + 5:g} h15 m-4 -3.5 l4 3.5 l-4 3.5"
                f" M{x + 25:g} {y + 15:g} h-15 m4 -3.5 l-4 3.5 l4 3.5"
            )
            body.text(x + 34, y + 12, _fit(f"{m.how}{source}", width - 40, 11), 11)
            body.text(x + 34, y + 26, amount_text(m, "× "), 11, GREY)
            y += 32
        y += 6
        self.front.box(x, top, width, y - top, "#fff", _BORDER, rx="7")
        self.front.draw(body)
        return y + 12

    def _draw_fragment(self, canvas: Canvas, fragment: Fragment, x: float, y: float, width: float) -> None:
        canvas.box(x, y, width, _ROW_HEIGHT - 5, COLOURS.get(fragment.role, OTHER_COLOUR), "none", rx="5")
        canvas.box(x, y, 4, _ROW_HEIGHT - 5, _STRONG_COLOURS.get(fragment.role, "#8c8c8c"), "none", rx="2")
        share = batch_per_device(self.plan, fragment)
        canvas.text(x + 12, y + 15, _fit(fragment.name, width - 70, 12.5), 12.5, font_weight="600")
        canvas.text(x + width - 8, y + 15, f"× {calls(fragment)}", 11.5, text_anchor="end")
        unit = "agents" if self.plan.graph.agents is not None else "batch"
        share_text = "" if share is None else f"{unit} {share}/device"
        canvas.text(x + 12, y + 29, _fit(fragment.role, width - 20 - len(share_text) * 6, 10.5), 10.5, GREY)
        if share_text:
            canvas.text(x + width - 8, y + 29, share_text, 10.5, GREY, text_anchor="end")

    def _draw_transfer(self, line: TransferLine, y: float) -> float:
        """Draws an arrow between two columns, labelled with fragments and bytes."""
        m = line.movement
        source, target = self.left[line.source], self.left[line.target]
        rightwards = source < target
        start = source + self.column_width if rightwards else source
        end = target if rightwards else target + self.column_width
        top = max(y + 6, self.labels_end + 24)
        self.front.line(
            f"M{start:g} {top:g} H{end:g}",
            stroke_width=1.4,
            stroke_dasharray="6 4" if m.delay else "",
            marker_end=ARROW,
            tooltip=f"{m.source} -> {m.target}",
        )
        middle = start + (_COLUMN_GAP if rightwards else -_COLUMN_GAP) / 2
        self.front.text(middle, top - 7, direction_text(self.plan, m, 31, " → "), 11, text_anchor="middle")
        self.front.text(middle, top + 15, amount_text(m, "× "), 11, GREY, text_anchor="middle")
        self.labels_end = top + 18
        if m.delay:
            delay = f"next {m.delay}"
            self.front.text(middle, top + 29, delay, 11, GREY, text_anchor="middle", font_style="italic")
            self.labels_end += 14
        return top + 14


_STRONG_COLOURS = {  # the same palette as COLOURS, at full strength
    "environment": "#009e73",
    "actor": "#0072b2",
    "buffer": "#e69f00",
    "learner": "#d55e00",
    "gradient": "#d55e00",
    "update": "#d55e00",
}


def _loop_depth(lines: Iterable[Line]) -> int:
    """The largest number of nested loops."""
    return max((1 + _loop_depth(line.lines) for line in lines if isinstance(line, LoopLine)), default=0)
