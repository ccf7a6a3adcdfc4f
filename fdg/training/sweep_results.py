"""Results of a sweep: the return of each point with its interval; a table, files and a plot."""

import csv
import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdg.errors import FdgError
from fdg.reading import read_json
from fdg.showing import words
from fdg.training.curves import RETURN, finish_figure, make_figure, metric_columns, style_of
from fdg.training.run_directory import RunDirectory, read_metrics, to_json_types
from fdg.training.space import flags_text, point_text
from fdg.training.statistics import (
    estimate_text,
    finite_mean,
    format_numbers,
    interquartile_mean,
    interval_of_returns,
)
from fdg.training.sweep import Sweep

_LAST_FRACTION = 0.1  # without evaluation, final returns are means over this last fraction of the training
_MAX_ROWS = 20  # maximum rows of a printed table; the files have all rows


@dataclasses.dataclass(frozen=True)
class PointResult:
    """The results of one point, which is a combination of hyperparameter values."""

    values: Mapping[str, float]  # the hyperparameters
    agents: Sequence[int]  # indices of its agents in the run
    returns: np.ndarray  # `[seeds]` float, the final return of each agent; NaN if unknown
    training: float  # mean return over the whole training and all agents: higher if agents learned faster
    failed_seeds: Sequence[int] = ()  # seeds of agents whose final losses are not finite

    @property
    def mean(self) -> float:
        """Mean over agents; NaN if an agent has no return."""
        return float(np.mean(self.returns))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the mean over seeds; None with one seed, or if an agent has no return."""
        return interval_of_returns(self.returns)

    @property
    def iqm(self) -> float:
        """Interquartile mean over agents; NaN if an agent has no return."""
        return float(interquartile_mean(self.returns)) if np.isfinite(self.returns).all() else math.nan

    def entry(self) -> dict[str, Any]:
        """The entry in `sweep.json`."""
        return {
            "values": dict(self.values),
            "mean": self.mean,
            "interval": None if self.interval is None else list(self.interval),
            "iqm": self.iqm,
            "mean_while_training": self.training,
            "returns": self.returns,
            "agents": list(self.agents),
            **({"failed_seeds": list(self.failed_seeds)} if self.failed_seeds else {}),
        }


def point_results(
    sweep: Sweep,
    rows: Sequence[Mapping[str, Any]],
    evaluated: Sequence[float] | np.ndarray | None,
    failed: Sequence[int] = (),
    seed: int = 0,
) -> list[PointResult]:
    """The results of each point, in the order of the sweep's points.

    In a population, whose hyperparameters change, each agent is a point with its final hyperparameters.
    `evaluated` has the mean returns `[agents]` of the evaluation after training; None: returns are means over
    the last tenth of the training. Agents with indices in `failed` have no return.
    """
    final, training = final_returns(rows, sweep.agents, evaluated, failed)
    seeds = sweep.seeds(seed)
    points = [(point, [*sweep.agents_of(i)]) for i, point in enumerate(sweep.points)]
    if sweep.exploit_every is not None:
        last_values = {name: rows[-1][f"{name}_per_seed"] for name, _ in sweep.grid}
        indices = range(sweep.agents)
        points = [({name: float(values[i]) for name, values in last_values.items()}, [i]) for i in indices]
    return [
        PointResult(
            values,
            agents,
            final[agents],
            float(np.mean(training[agents])),
            [seeds[i] for i in failed if i in agents],
        )
        for values, agents in points
    ]


def final_returns(
    rows: Sequence[Mapping[str, Any]],
    agents: int,
    evaluated: Sequence[float] | np.ndarray | None,
    failed: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """The final return and the mean return in training of each agent: two `[agents]`; see `point_results`."""
    steps, curves = metric_by_agent(rows, agents)
    last_rows = curves[steps > (1 - _LAST_FRACTION) * steps[-1]] if len(steps) else curves
    final = finite_mean(last_rows, 0) if evaluated is None else np.array(evaluated, float)
    final[list(failed)] = math.nan
    return final, finite_mean(curves, 0)


def metric_by_agent(
    rows: Sequence[Mapping[str, Any]], agents: int, metric: str = RETURN
) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps `[rows]`, and a metric by agent `[rows, agents]`; NaN if unknown."""
    steps, values, _ = metric_columns(rows, "env_steps", metric)
    return steps, values if values.shape[1] == agents else np.full((len(steps), agents), math.nan)


def best_index(results: Sequence[PointResult]) -> int:
    """The index of the point with the highest mean (the first of equal ones)."""
    return max(range(len(results)), key=lambda i: _sort_value(results[i].mean))


def write_sweep(
    sweep: Sweep,
    run: RunDirectory,
    evaluated: Sequence[float] | np.ndarray | None,
    title: str,
    failed: Sequence[int] = (),
    seed: int = 0,
) -> list[str]:
    """Writes `sweep.json`, `sweep.csv` and `sweep.png`; returns the table and the best point as lines.

    Writes nothing for a population without metrics: agents' final hyperparameters are in their last row.
    """
    rows = list(read_metrics(run.path / "metrics.jsonl"))
    if not rows and sweep.exploit_every is not None:
        return [f"no sweep.json: {run.path / 'metrics.jsonl'} has no rows with hyperparameters"]
    results = point_results(sweep, rows, evaluated, failed, seed)
    measure = "greedy evaluation after training" if evaluated is not None else "last tenth of the training"
    index = best_index(results)
    best = results[index]
    points = [result.entry() for result in results]
    content = {
        "sweep": {name: list(values) for name, values in sweep.grid},
        "num_seeds": sweep.num_seeds,
        "exploit_every": sweep.exploit_every,
        "measure": measure,
        "points": points,
        "best": {"point": index, **{name: points[index][name] for name in ("values", "mean", "agents")}},
    }
    run.publish_json("sweep.json", content)
    run.publish("sweep.csv", lambda file: file.write(_csv_text(results).encode()))
    if sweep.exploit_every is None:
        run.publish("sweep.png", lambda file: draw_points(results, title, measure, file))
    else:
        run.publish("sweep.png", lambda file: draw_schedules(rows, sweep, index, title, file))
    lines = [points_table(results, measure)]
    if math.isfinite(best.mean):
        mean = estimate_text(best.mean, best.interval, " (95% interval {} to {})")
        lines += [f"best: return {mean} with {point_text(best.values)}", *_rivals_line(results, index)]
        lines.append(f"by flags: {flags_text(best.values)}")
    else:
        lines.append("best: none, since no point has a return")
    return [*lines, f"table: {run.path / 'sweep.csv'}", f"picture: {run.path / 'sweep.png'}"]


def points_table(results: Sequence[PointResult], measure: str) -> str:
    """A table of at most twenty points, best first."""
    rows = []
    for result in sorted(results, key=lambda result: -_sort_value(result.mean)):
        values = [f"{value:g}" for value in result.values.values()]
        mean, iqm, training = map(return_text, (result.mean, result.iqm, result.training))
        rows.append([*values, mean, interval_text(result.interval), iqm, training])
    return first_rows([*results[0].values, "return", "95% interval", "IQM", "training"], rows, measure)


def first_rows(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> str:
    """The first twenty rows of a table, right-aligned, and the number of further rows."""
    lines = words.table(header, [tuple(row) for row in rows[:_MAX_ROWS]], range(len(header)))
    suffix = [f"... and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []
    return "\n".join([*([title] if title else []), *lines, *suffix])


def interval_text(ends: tuple[float, float] | None) -> str:
    """Both ends of an interval as text; "-" for None."""
    return "-" if ends is None else " to ".join(format_numbers(*ends))


def draw_points(results: Sequence[PointResult], title: str, measure: str, picture: Any) -> None:
    """Plots results over the hyperparameter with the most values; values of the others are separate lines."""
    names = list(results[0].values)
    counts = {name: len({r.values[name] for r in results}) for name in names}
    x_name = max(names, key=lambda name: counts[name])
    lines: dict[str, list[PointResult]] = {}
    for r in results:
        others = {name: value for name, value in r.values.items() if name != x_name and counts[name] > 1}
        lines.setdefault(point_text(others), []).append(r)
    figure, axes = make_figure()
    for i, (label, points) in enumerate(lines.items()):
        finite = sorted((r for r in points if math.isfinite(r.mean)), key=lambda r: r.values[x_name])
        positions, means = [r.values[x_name] for r in finite], [r.mean for r in finite]
        dashes, colour = style_of(i)
        axes.plot(positions, means, dashes, marker="o", markersize=4, color=colour, label=label or None)
        ends = [r.interval or (r.mean, r.mean) for r in finite]
        if any(r.interval for r in finite):
            low, high = zip(*ends, strict=True)
            axes.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
        for r in finite:
            axes.scatter([r.values[x_name]] * len(r.returns), r.returns, s=6, color=colour, alpha=0.35)
    values = sorted({r.values[x_name] for r in results})
    if values[0] > 0 and values[-1] > 5 * values[0]:
        axes.set_xscale("log")
    axes.set(title=title, xlabel=x_name.replace("_", " "), ylabel=f"return: {measure}")
    finish_figure(figure, [axes], x_name)
    figure.savefig(picture, format="png", dpi=150)


def draw_schedules(
    rows: Sequence[Mapping[str, Any]], sweep: Sweep, best: int, title: str, picture: Any
) -> None:
    """Plots the hyperparameters of a population over the training; the best agent has a strong line."""
    from matplotlib.figure import Figure

    names = [name for name, values in sweep.grid if len(values) > 1] or [sweep.grid[0][0]]
    figure = Figure(figsize=(7.0, 1.0 + 2.4 * len(names)), layout="constrained")
    (_, faint), (_, strong) = style_of(0), style_of(1)
    panels = np.ravel(figure.subplots(len(names), 1, sharex=True))
    for name, axes in zip(names, panels, strict=True):
        steps, values = metric_by_agent(rows, sweep.agents, name)
        axes.plot(steps, values, color=faint, alpha=0.3, linewidth=0.8)
        axes.plot(steps, values[:, best], color=strong, label=f"agent {best}, the best in the end")
        if np.nanmin(values) > 0 and np.nanmax(values) > 5 * np.nanmin(values):
            axes.set_yscale("log")
        axes.set_ylabel(name.replace("_", " "))
    axes.set_xlabel("steps of each agent")
    figure.suptitle(title, fontsize="medium")
    finish_figure(figure, list(panels), "env_steps")
    figure.savefig(picture, format="png", dpi=150)


def best_agents(path: Path, agents: int) -> list[int]:
    """The agents of the best point, read from the `sweep.json` of a run with `agents` agents."""
    file = path / "sweep.json"
    if not os.path.lexists(file):
        raise FdgError(f"{path} has no sweep.json: it is not a sweep, or the sweep has not finished")
    try:
        indices = read_json(file, 64 << 20)["best"]["agents"]
        if indices and all(type(i) is int and 0 <= i < agents for i in indices):
            return indices
    except (LookupError, TypeError):
        indices = None
    raise FdgError(
        f"{file}: best.agents is {indices!r:.60}; this sweep has agents 0 to {agents - 1}: restore the file"
    )


def _sort_value(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def return_text(value: float) -> str:
    """A return as text; "-" if unknown."""
    return format_numbers(value)[0] if math.isfinite(value) else "-"


def _rivals_line(results: Sequence[PointResult], best: int) -> list[str]:
    """A line that counts the other points whose means are within the interval of the best point."""
    interval = results[best].interval
    if interval is None:
        return []
    count = sum(i != best and result.mean >= interval[0] for i, result in enumerate(results))
    subject = "1 other point is" if count == 1 else f"{count} other points are"
    return [f"{subject} within its interval: more seeds would tell them apart"] if count else []


def _csv_text(results: Sequence[PointResult]) -> str:
    out = io.StringIO()
    seeds = [f"return_{i}" for i in range(len(results[0].returns))]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*results[0].values, "mean", "low", "high", "iqm", "mean_while_training", *seeds])
    for r in results:
        ends = r.interval or (None, None)
        numbers = [*r.values.values(), r.mean, *ends, r.iqm, r.training, *r.returns.tolist()]
        writer.writerow(["" if value is None else value for value in to_json_types(numbers)])
    return out.getvalue()
