"""Formats a comparison as tables in Markdown and LaTeX, and plots its intervals.

`comparison` is a `Comparison`. Its annotation is `Any`, because `comparison.py` imports this module.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from fdg.showing.words import escape_markdown
from fdg.training import curves
from fdg.training.statistics import RESAMPLES

TOGETHER = "all, normalised"  # stands for an environment's name: the shared environments together
_MARK = "†"  # marks a side at the level of random actions


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text; `bold` has the (row, column) of cells in bold print."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()


def tables(comparison: Any) -> list[Table]:
    """The tables of a comparison."""
    tables = [_measure_table(comparison, measure, title) for measure, title in _MEASURES.items()]
    if len(comparison.sides) > 1:
        tables.append(_improvement_table(comparison))
    return [table for table in tables if table.rows]  # sides may have no environment in common


_MEASURES = {  # field of `Cell` -> title of its table
    "returns": "Final return",
    "areas": "Mean return while training (area under the curve, divided by its length)",
}
_NO_NOTES = ("none of the compared properties",)


def sentences(comparison: Any) -> list[str]:
    """Sentences that explain how to read the tables of a comparison."""
    seeds = sorted({len(cell.seeds) for cell in comparison.cells})
    sentences = [
        f"Interquartile mean over seeds ({' or '.join(map(str, seeds))}), and in brackets its 95% interval by"
        f" the stratified bootstrap with {RESAMPLES:,} resamples (Agarwal et al. 2021, arXiv 2108.13264)."
        " Bold: the best side of each environment, and sides whose interval reaches the value of the best."
    ]
    if len(comparison.shared) > 1:
        shared = comparison.shared
        zero = (
            "random actions count"
            if all(env in comparison.random for env in shared)
            else "the worst seed counts"
        )
        sentences.append(
            f'"all, normalised": {zero} as 0 and the best seed as 1 in each of the {len(shared)}'
            " environments that all sides have; the interquartile mean is over all of their seeds."
        )
    if any(comparison.is_random(cell.label, cell.env) for cell in comparison.cells):
        sentences.append(f"{_MARK} not seen to be better than random actions.")
    return sentences


def _measure_table(comparison: Any, measure: str, title: str) -> Table:
    has_random = measure == "returns" and bool(comparison.random)
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for env in [*comparison.environments, TOGETHER]:
        estimates = [comparison.estimate(side, env, measure) for side in comparison.sides]
        if not any(estimates):
            continue
        values = [x.value for x in estimates if x is not None and not math.isnan(x.value)]
        best = max(values, default=-math.inf)
        cells = [env]
        for column, (side, estimate) in enumerate(zip(comparison.sides, estimates, strict=True), 1):
            mark = _MARK if measure == "returns" and comparison.is_random(side, env) else ""
            cells.append("-" if estimate is None else f"{estimate}{mark}")
            if estimate is None or best == -math.inf or mark:
                continue
            if (estimate.value if estimate.interval is None else estimate.interval[1]) >= best:
                bold.add((len(rows), column))
        if has_random:
            cells.append(str(comparison.random_estimate(env)) if env in comparison.random else "-")
        rows.append(cells)
    head = ["environment", *comparison.sides, *(["random"] if has_random else [])]
    return Table(title, head, rows, frozenset(bold))


def _improvement_table(comparison: Any) -> Table:
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for x, y in itertools.combinations(comparison.sides, 2):
        probability = comparison.improvement(x, y)
        if probability is None:
            continue
        value, (low, high) = probability
        rows.append([x, y, f"{value:.2f} [{low:.2f}, {high:.2f}]"])
        if low > 0.5 or high < 0.5:
            bold.add((len(rows) - 1, 2))
    head = ["X", "Y", "P(X > Y)"]
    title = "Probability of improvement: a seed of X is better than one of Y, over the environments of both"
    return Table(title, head, rows, frozenset(bold))


def markdown(comparison: Any) -> str:
    """A comparison in Markdown."""
    parts = ["# Comparison", *comparison.sentences, "**Unequal between the sides:**"]
    parts.append("\n".join(f"- {escape_markdown(note)}" for note in comparison.notes or _NO_NOTES))
    for table in comparison.tables:
        lines = [table.head, *table.rows]
        cells = [[escape_markdown(cell) for cell in line] for line in lines]
        for row, column in table.bold:
            cells[row + 1][column] = f"**{cells[row + 1][column]}**"
        rows = [f"| {' | '.join(line)} |" for line in cells]
        parts += [f"## {table.title}", "\n".join([rows[0], "|---" * len(table.head) + "|", *rows[1:]])]
    return "\n\n".join(parts) + "\n"


def latex(comparison: Any) -> str:
    """The tables in LaTeX with `booktabs`; notes become comments and captions."""
    parts = ["% needs \\usepackage{booktabs}", *(f"% {_one_line(s)}" for s in comparison.sentences)]
    parts += [f"% unequal: {_one_line(note)}" for note in comparison.notes or _NO_NOTES]
    for table in comparison.tables:
        cells = [[_escape_latex(cell) for cell in line] for line in [table.head, *table.rows]]
        for row, column in table.bold:
            cells[row + 1][column] = f"\\textbf{{{cells[row + 1][column]}}}"
        head, *rows = (" & ".join(line) + r" \\" for line in cells)
        lines = [
            r"\begin{table}",
            rf"\caption{{{_escape_latex(table.title)}}}",
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


_LATEX_ESCAPES = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    _MARK: r"\textdagger{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escape_latex(cell: str) -> str:
    return "".join(_LATEX_ESCAPES.get(c, c) for c in _one_line(cell))


def draw_intervals(comparison: Any) -> Any:
    """Plots final returns: a panel per environment, with the interval and the seeds of each side."""
    figure, *panels = curves.make_figure(len(comparison.environments))
    sides = comparison.sides
    for env, axes in zip(comparison.environments, panels, strict=True):
        for i, side in enumerate(sides):
            values, estimate = comparison.values(side, env), comparison.estimate(side, env)
            if values is None or estimate is None:
                continue
            colour = curves.style_of(i)[1]
            finite = values[values > -math.inf]
            axes.scatter(finite, [i] * len(finite), s=12, color=colour, alpha=0.5, linewidth=0, zorder=3)
            if estimate.value > -math.inf:
                low, high = estimate.interval or (estimate.value, estimate.value)
                axes.plot([max(low, finite.min()), high], [i, i], color=colour, linewidth=4, alpha=0.5)
                axes.plot(estimate.value, i, "|", color=colour, markersize=16, markeredgewidth=3)
        if env in comparison.random:
            mean = comparison.random_estimate(env).value
            axes.axvline(mean, color="#555555", linestyle="--", linewidth=1, label="random")
        axes.set_yticks(range(len(sides)), [curves.plot_label(side) for side in sides], fontsize="small")
        axes.set_ylim(len(sides) - 0.5, -0.5)
        axes.set(title=curves.plot_label(env), xlabel="final return")
    figure.suptitle("interquartile mean over seeds, 95% interval; each dot a seed", fontsize="medium")
    curves.finish_figure(figure, panels, "returns")
    return figure
