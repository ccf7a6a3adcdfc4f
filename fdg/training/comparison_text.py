"""A comparison as tables in Markdown and LaTeX, and a plot of its intervals.

`found` is a `Comparison` (`comparison.py`, which imports this module).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from fdg.training import curves
from fdg.training.statistics import RESAMPLES

TOGETHER = "all, normalised"  # replaces the environment's name
_MARK = "†"  # marks a side at the level of random actions


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text; `bold` has the (row, column) of the best cell of each row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of a comparison: how to read it, differences between sides, tables."""

    sentences: Sequence[str]
    notes: Sequence[str]
    tables: Sequence[Table]


def text(found: Any) -> Text:
    """The text of a comparison."""
    tables = [_of_measure(found, measure, title) for measure, title in _MEASURES.items()]
    if len(found.sides) > 1:
        tables.append(_improvements(found))
    tables = [table for table in tables if table.rows]  # sides without a common environment have no pairs
    return Text(_sentences(found), found.notes or ["nothing that was looked at"], tables)


_MEASURES = {
    "returns": "Final return",
    "areas": "Mean return while training (area under the curve by its length)",
}


def _sentences(found: Any) -> list[str]:
    seeds = sorted({len(cell.seeds) for cell in found.cells})
    said = [
        f"Interquartile mean over seeds ({' or '.join(map(str, seeds))}), and in brackets its 95% interval by"
        f" the stratified bootstrap with {RESAMPLES:,} resamples (Agarwal et al. 2021, arXiv 2108.13264)."
        " In bold the best of an environment, with those whose interval reaches the best's value."
    ]
    if len(found.shared) > 1:
        zero = "random actions" if all(env in found.random for env in found.shared) else "the worst seed"
        said.append(
            f'"all, normalised": {zero} count as 0 and the best seed as 1 in each of the {len(found.shared)}'
            " environments that all sides have; the interquartile mean is over all of their seeds."
        )
    if any(found.is_random(cell.label, cell.env) for cell in found.cells):
        said.append(f"{_MARK} not seen to be better than random actions.")
    return said


def _of_measure(found: Any, measure: str, title: str) -> Table:
    with_random = measure == "returns" and bool(found.random)
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for env in [*found.environments, TOGETHER]:
        estimates = [found.estimate(side, env, measure) for side in found.sides]
        if not any(estimates):
            continue
        known = [one.value for one in estimates if one is not None and not math.isnan(one.value)]
        best = max(known, default=-math.inf)
        cells = [env]
        for column, (side, one) in enumerate(zip(found.sides, estimates, strict=True), 1):
            mark = _MARK if measure == "returns" and found.is_random(side, env) else ""
            cells.append("-" if one is None else f"{one}{mark}")
            high = None if one is None else one.value if one.interval is None else one.interval[1]
            if high is not None and best > -math.inf and high >= best and not mark:
                bold.add((len(rows), column))
        if with_random:
            cells.append(str(found.random_estimate(env)) if env in found.random else "-")
        rows.append(cells)
    head = ["environment", *found.sides, *(["random"] if with_random else [])]
    return Table(title, head, rows, frozenset(bold))


def _improvements(found: Any) -> Table:
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for x, y in itertools.combinations(found.sides, 2):
        one = found.improvement(x, y)
        if one is None:
            continue
        value, (low, high) = one
        rows.append([x, y, f"{value:.2f} [{low:.2f}, {high:.2f}]"])
        if low > 0.5 or high < 0.5:
            bold.add((len(rows) - 1, 2))
    head = ["X", "Y", "P(X > Y)"]
    title = "Probability of improvement: a seed of X is better than one of Y, over the environments of both"
    return Table(title, head, rows, frozenset(bold))


def markdown(said: Text) -> str:
    """The text in Markdown."""
    parts = ["# Comparison", *said.sentences, "**Unequal between the sides:**"]
    parts.append("\n".join(f"- {_plain(note)}" for note in said.notes))
    for table in said.tables:
        lines = [table.head, *table.rows]
        cells = [[_plain(cell) for cell in line] for line in lines]
        for row, column in table.bold:
            cells[row + 1][column] = f"**{cells[row + 1][column]}**"
        text = [f"| {' | '.join(line)} |" for line in cells]
        parts += [f"## {table.title}", "\n".join([text[0], "|---" * len(table.head) + "|", *text[1:]])]
    return "\n\n".join(parts) + "\n"


def latex(said: Text) -> str:
    """The tables in LaTeX with `booktabs`; notes become comments and captions."""
    parts = ["% needs \\usepackage{booktabs}", *(f"% {_plain(one)}" for one in said.sentences)]
    parts += [f"% unequal: {_plain(note)}" for note in said.notes]
    for table in said.tables:
        cells = [[_escaped(cell) for cell in line] for line in [table.head, *table.rows]]
        for row, column in table.bold:
            cells[row + 1][column] = f"\\textbf{{{cells[row + 1][column]}}}"
        head, *rows = (" & ".join(line) + r" \\" for line in cells)
        lines = [
            r"\begin{table}",
            rf"\caption{{{_escaped(table.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n".join(parts) + "\n"


_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    _MARK: r"\textdagger{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def _escaped(cell: str) -> str:
    return "".join(_LATEX.get(c, c) for c in _plain(cell).replace("\\|", "|"))


def _plain(cell: str) -> str:
    """Escapes a cell: names may come from untrusted files."""
    return re.sub(r"\s+", " ", cell).replace("|", "\\|")


def draw_intervals(found: Any) -> Any:
    """Plots final returns: a panel for each environment, with each side's interval and seeds."""
    figure, *panels = curves.figure_of(len(found.environments))
    sides = found.sides
    for env, axes in zip(found.environments, panels, strict=True):
        for i, side in enumerate(sides):
            values, one = found.values(side, env), found.estimate(side, env)
            if values is None or one is None:
                continue
            colour = curves.style(i)[1]
            there = values[values > -math.inf]
            axes.scatter(there, [i] * len(there), s=12, color=colour, alpha=0.5, linewidth=0, zorder=3)
            if one.value > -math.inf:
                low, high = one.interval or (one.value, one.value)
                axes.plot([max(low, there.min()), high], [i, i], color=colour, linewidth=4, alpha=0.5)
                axes.plot(one.value, i, "|", color=colour, markersize=16, markeredgewidth=3)
        if env in found.random:
            mean = found.random_estimate(env).value
            axes.axvline(mean, color="#555555", linestyle="--", linewidth=1, label="random")
        axes.set_yticks(range(len(sides)), [curves.plot_label(side) for side in sides], fontsize="small")
        axes.set_ylim(len(sides) - 0.5, -0.5)
        axes.set(title=curves.plot_label(env), xlabel="final return")
    figure.suptitle("interquartile mean over seeds, 95% interval; each dot a seed", fontsize="medium")
    curves.finish(figure, panels, "returns")
    return figure
