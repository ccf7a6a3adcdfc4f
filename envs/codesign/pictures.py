"""Pictures of a search: Pareto front, schedule, utilisation by layer, progress."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.codesign import cost
from envs.codesign.report import Outcome, amounts
from fdg import files

NAMES = ("front.png", "gantt.png", "utilisation.png", "search.png")  # files, in the order of `draw`
# The colour-blind palette of Okabe and Ito.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_SPEC_STYLE = {"color": "#555555", "linestyle": "--", "linewidth": 1}


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """Draws all pictures; returns their paths."""
    figures = (_front(outcome), _gantt(outcome), _utilisation(outcome.layers), _progress(outcome))
    paths = [folder / name for name in NAMES]
    for path, figure in zip(paths, figures, strict=True):
        with files.replacing(path) as file:
            figure.savefig(file, dpi=150)
    return paths


def _figure(width: float, height: float) -> Any:
    """An empty figure without a window; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _front(outcome: Outcome) -> Any:
    """Score over latency, energy and area, with the specs."""
    figure = _figure(11.0, 4.0)
    panels = figure.subplots(1, 3, sharey=True)
    is_met = np.asarray(outcome.front.violation) == 0
    for axes, amount in zip(panels, amounts(outcome.problem), strict=True):
        x = np.asarray(getattr(outcome.front, amount.field), float) * amount.factor
        score, spec = np.asarray(outcome.front.score), getattr(outcome.problem.specs, amount.field)
        for fits, colour, label in (
            (is_met, _COLOURS[0], "meets the specs"),
            (~is_met, _COLOURS[1], "violates them"),
        ):
            if fits.any():
                axes.scatter(x[fits], score[fits], s=18, color=colour, label=label)
        best = float(getattr(outcome.best, amount.field)) * amount.factor
        best_style = {"marker": "*", "s": 140, "color": _COLOURS[4], "edgecolor": "black", "zorder": 3}
        axes.scatter([best], [float(outcome.best.score)], label="best", **best_style)
        if math.isfinite(spec):
            axes.axvline(spec * amount.factor, label="spec", **_SPEC_STYLE)
        axes.set_xlabel(f"{amount}, {amount.unit}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("score (weighted accuracy)")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"{_title(outcome)}: designs that no other one dominates")
    return figure


def _gantt(outcome: Outcome) -> Any:
    """The schedule: when and where each layer runs."""
    chips = outcome.chips
    figure = _figure(11.0, 1.8 + 0.8 * len(chips))
    axes = figure.subplots()
    microseconds = 1e6 / outcome.problem.technology.clock_hz
    tasks = [task.name for task in outcome.problem.tasks]
    end = max(row["end_cycle"] for row in outcome.layers) * microseconds
    labelled_tasks: set[str] = set()
    for row in outcome.layers:
        task, _, layer_number = row["layer"].rpartition(": ")
        start = row["start_cycle"] * microseconds
        width = row["end_cycle"] * microseconds - start
        colour = _COLOURS[tasks.index(task) % len(_COLOURS)]
        label = task if task not in labelled_tasks else None
        labelled_tasks.add(task)
        vertical = row["sub_accelerator"]
        axes.barh(vertical, width, left=start, color=colour, edgecolor="white", linewidth=0.5, label=label)
        if width > 0.015 * end:
            axes.text(
                start + width / 2, vertical, layer_number, ha="center", va="center", fontsize=7, color="white"
            )
    spec = outcome.problem.specs.latency_cycles * microseconds
    if spec <= 3 * end:
        axes.axvline(spec, label="spec", **_SPEC_STYLE)
    axes.set_yticks(
        range(len(chips)),
        [f"{chip.template}, {chip.rows} x {chip.columns} PEs" if chip.rows else "none" for chip in chips],
    )
    axes.set_ylim(len(chips) - 0.5, -0.5)
    axes.set_xlim(0, None)
    axes.set_xlabel("us; numbers are layers of a network")
    figure.legend(loc="outside upper center", ncols=9, fontsize=8)
    return figure


def _utilisation(layers: Sequence[Mapping[str, Any]]) -> Any:
    """Each layer's utilisation of the array, and its bound."""
    figure = _figure(max(6.0, 0.28 * len(layers) + 2), 4.2)
    axes = figure.subplots()
    for at, bound in enumerate(cost.BOUNDS):
        bars = [i for i, row in enumerate(layers) if row["bound"] == bound]
        heights = [layers[i]["utilization"] for i in bars]
        axes.bar(bars, heights, color=_COLOURS[at], label=f"bound: {bound}")
        no_height = [i for i in bars if not layers[i]["macs"]]  # pooling, additions
        axes.scatter(no_height, [0.01] * len(no_height), marker="x", s=14, color=_COLOURS[at])
    axes.set_xticks(range(len(layers)), [row["layer"] for row in layers], rotation=90, fontsize=7)
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.7, len(layers) - 0.3)
    axes.set_ylabel("utilisation of PEs while computing")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    return figure


def _progress(outcome: Outcome) -> Any:
    """The best score over the number of designs; the least violation while no design meets the specs."""
    curve = np.asarray(outcome.curve, float).reshape(-1, 3)
    finite = curve[np.isfinite(curve[:, 2])]
    met, not_yet = finite[finite[:, 2] == 0], finite[finite[:, 2] > 0]
    parts = [
        (met[:, 0], met[:, 1], _COLOURS[0], "score of the best\nthat meets the specs"),
        (not_yet[:, 0], not_yet[:, 2], _COLOURS[1], "least violation,\nwhile none meets them"),
    ]
    parts = [part for part in parts if len(part[0])] or parts[:1]
    figure = _figure(7.0, 1.4 + 2.4 * len(parts))
    panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (x, y, colour, label) in zip(panels, parts, strict=True):
        axes.plot(x, y, color=colour, drawstyle="steps-post", marker=".", markersize=4)
        if colour == _COLOURS[1]:
            axes.set_ylim(0, 1.1 * y.max())
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if colour == _COLOURS[1] and len(y) and max(y) > 10 * min(y):
            axes.set_yscale("log")
    panels[-1].set_xlabel("designs evaluated")
    panels[-1].set_xlim(0, outcome.samples)
    figure.suptitle(f"{_title(outcome)}: {outcome.samples:,} designs in {outcome.seconds:.0f} s", fontsize=11)
    return figure


def _title(outcome: Outcome) -> str:
    """The name of the problem's file without its folder."""
    return Path(outcome.problem.name).name
