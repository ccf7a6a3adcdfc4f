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
from fdg.training.curves import RETURN, columns, figure_of, finish, style
from fdg.training.run_directory import RunDirectory, plain, read_metrics
from fdg.training.space import flags_text, spelled
from fdg.training.statistics import (
    finite_mean,
    format_numbers,
    interquartile_mean,
    interval_of_returns,
    with_interval,
)
from fdg.training.sweep import Sweep

_LAST = 0.1  # of the training: the source of final returns without evaluation
_ROWS = 20  # of the printed table; the files hold all


@dataclasses.dataclass(frozen=True)
class PointResult:
    """The results of one combination of values."""

    values: Mapping[str, float]  # the hyperparameters
    agents: Sequence[int]  # positions of its agents in the run
    returns: np.ndarray  # `[seeds]` float, the final return of each agent; NaN if unknown
    training: float  # mean return over the whole training and all agents, which shows how fast it learned
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
        """Interquartile mean over agents."""
        return float(interquartile_mean(self.returns)) if np.isfinite(self.returns).all() else math.nan

    def said(self) -> dict[str, Any]:
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
    `evaluated` has the mean returns `[agents]` of the evaluation after training; None takes the last tenth of
    the training. Agents at positions `failed` have no return.
    """
    final, training = final_returns(rows, sweep.agents, evaluated, failed)
    seeds = sweep.seeds(seed)
    points = [(point, [*sweep.agents_of(i)]) for i, point in enumerate(sweep.points)]
    if sweep.exploit_every is not None:
        ended = {name: rows[-1][f"{name}_per_seed"] for name, _ in sweep.grid}
        each = range(sweep.agents)
        points = [({name: float(values[i]) for name, values in ended.items()}, [i]) for i in each]
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
    """The final return of each agent, and its mean in training, `[agents]` each; see `point_results`."""
    steps, curves = per_agent(rows, agents)
    late = curves[steps > (1 - _LAST) * steps[-1]] if len(steps) else curves
    final = finite_mean(late, 0) if evaluated is None else np.array(evaluated, float)
    final[list(failed)] = math.nan
    return final, finite_mean(curves, 0)


def per_agent(
    rows: Sequence[Mapping[str, Any]], agents: int, metric: str = RETURN
) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps `[rows]`, and a metric of each agent `[rows, agents]`; NaN if unknown."""
    steps, values, _ = columns(rows, "env_steps", metric)
    return steps, values if values.shape[1] == agents else np.full((len(steps), agents), math.nan)


def best_of(found: Sequence[PointResult]) -> int:
    """The position of the point with the highest mean; the first of equal ones."""
    return max(range(len(found)), key=lambda i: (math.isfinite(found[i].mean), _ranked(found[i].mean), -i))


def write_sweep(
    sweep: Sweep,
    run: RunDirectory,
    evaluated: Sequence[float] | np.ndarray | None,
    title: str,
    failed: Sequence[int] = (),
    seed: int = 0,
) -> list[str]:
    """Writes `sweep.json`, `sweep.csv` and `sweep.png`; returns the table and the best point as lines."""
    rows = list(read_metrics(run.path / "metrics.jsonl"))
    found = point_results(sweep, rows, evaluated, failed, seed)
    measure = "greedy evaluation after training" if evaluated is not None else "last tenth of the training"
    best = best_of(found)
    content = {
        "sweep": {name: list(values) for name, values in sweep.grid},
        "num_seeds": sweep.num_seeds,
        "exploit_every": sweep.exploit_every,
        "measure": measure,
        "points": [one.said() for one in found],
        "best": {
            "point": best,
            "values": dict(found[best].values),
            "mean": found[best].mean,
            "agents": list(found[best].agents),
        },
    }
    run.publish_json("sweep.json", content)
    run.publish("sweep.csv", lambda file: file.write(_csv(found).encode()))
    if sweep.exploit_every is None:
        run.publish("sweep.png", lambda file: draw_points(found, title, measure, file))
    else:
        run.publish("sweep.png", lambda file: draw_schedules(rows, sweep, best, title, file))
    lines = [points_table(found, measure)]
    if math.isfinite(found[best].mean):
        values = found[best].values
        mean = with_interval(found[best].mean, found[best].interval, " (95% interval {} to {})")
        lines += [f"best: return {mean} with {spelled(values)}", *_rivals(found, best)]
        lines.append(f"by flags: {flags_text(values)}")
    else:
        lines.append("best: none, for no point has a return")
    return [*lines, f"table: {run.path / 'sweep.csv'}", f"picture: {run.path / 'sweep.png'}"]


def points_table(found: Sequence[PointResult], measure: str) -> str:
    """A table of at most twenty points, best first."""
    rows = []
    for one in sorted(found, key=lambda one: -_ranked(one.mean)):
        values = [f"{value:g}" for value in one.values.values()]
        mean, iqm, training = map(shown_return, (one.mean, one.iqm, one.training))
        rows.append([*values, mean, shown_interval(one.interval), iqm, training])
    return first_rows([*found[0].values, "return", "95% interval", "IQM", "training"], rows, measure)


def first_rows(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> str:
    """The first twenty rows of a table, right-aligned, and the number of further ones."""
    lines = words.table(header, [tuple(row) for row in rows[:_ROWS]], range(len(header)))
    left = [f"... and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else []
    return "\n".join([*([title] if title else []), *lines, *left])


def shown_interval(ends: tuple[float, float] | None) -> str:
    """Both ends of an interval; "-" for none."""
    return "-" if ends is None else " to ".join(format_numbers(*ends))


def draw_points(found: Sequence[PointResult], title: str, measure: str, picture: Any) -> None:
    """Plots means and intervals over the hyperparameter with the most values."""
    names = list(found[0].values)
    counts = {name: len({one.values[name] for one in found}) for name in names}
    x = max(names, key=lambda name: counts[name])
    lines: dict[str, list[PointResult]] = {}
    for one in found:
        rest = {name: value for name, value in one.values.items() if name != x and counts[name] > 1}
        lines.setdefault(spelled(rest), []).append(one)
    figure, axes = figure_of()
    for i, (label, points) in enumerate(lines.items()):
        there = sorted((one for one in points if math.isfinite(one.mean)), key=lambda one: one.values[x])
        places, means = [one.values[x] for one in there], [one.mean for one in there]
        stroke, colour = style(i)
        axes.plot(places, means, stroke, marker="o", markersize=4, color=colour, label=label or None)
        ends = [one.interval or (one.mean, one.mean) for one in there]
        if any(one.interval for one in there):
            low, high = zip(*ends, strict=True)
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        for one in there:
            axes.scatter([one.values[x]] * len(one.returns), one.returns, s=6, color=colour, alpha=0.35)
    values = sorted({one.values[x] for one in found})
    if values[0] > 0 and values[-1] > 5 * values[0]:
        axes.set_xscale("log")
    axes.set(title=title, xlabel=x.replace("_", " "), ylabel=f"return: {measure}")
    finish(figure, [axes], x)
    figure.savefig(picture, format="png", dpi=150)


def draw_schedules(
    rows: Sequence[Mapping[str, Any]], sweep: Sweep, best: int, title: str, picture: Any
) -> None:
    """Plots the hyperparameters of a population's agents over the training, the best agent's on top."""
    from matplotlib.figure import Figure

    names = [name for name, values in sweep.grid if len(values) > 1] or [sweep.grid[0][0]]
    figure = Figure(figsize=(7.0, 1.0 + 2.4 * len(names)), layout="constrained")
    (_, faint), (_, strong) = style(0), style(1)
    panels = np.ravel(figure.subplots(len(names), 1, sharex=True))
    for name, axes in zip(names, panels, strict=True):
        steps, values = per_agent(rows, sweep.agents, name)
        axes.plot(steps, values, color=faint, alpha=0.3, linewidth=0.8)
        axes.plot(steps, values[:, best], color=strong, label=f"agent {best}, the best in the end")
        if np.nanmin(values) > 0 and np.nanmax(values) > 5 * np.nanmin(values):
            axes.set_yscale("log")
        axes.set_ylabel(name.replace("_", " "))
    axes.set_xlabel("steps of each agent")
    figure.suptitle(title, fontsize="medium")
    finish(figure, list(panels), "env_steps")
    figure.savefig(picture, format="png", dpi=150)


def best_agents(path: Path, agents: int) -> list[int]:
    """The agents of the best point, by the `sweep.json` of a run with `agents` agents."""
    file = path / "sweep.json"
    if not os.path.lexists(file):
        raise FdgError(f"{path} has no sweep.json: it is not a sweep, or the sweep has not finished")
    try:
        found = read_json(file, 64 << 20)["best"]["agents"]
        if found and all(type(one) is int and 0 <= one < agents for one in found):
            return found
    except (LookupError, TypeError):
        found = None
    raise FdgError(
        f"{file}: best.agents is {found!r:.60}; this sweep has the agents 0 to {agents - 1}: restore the file"
    )


def _ranked(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def shown_return(value: float) -> str:
    """A return as text; "-" if unknown."""
    return format_numbers(value)[0] if math.isfinite(value) else "-"


def _rivals(found: Sequence[PointResult], best: int) -> list[str]:
    """A message about other points whose mean is within the interval of the best."""
    interval = found[best].interval
    if interval is None:
        return []
    others = sum(i != best and one.mean >= interval[0] for i, one in enumerate(found))
    few = "1 other point is" if others == 1 else f"{others} other points are"
    return [f"{few} within its interval: more seeds would tell them apart"] if others else []


def _csv(found: Sequence[PointResult]) -> str:
    out = io.StringIO()
    seeds = [f"return_{i}" for i in range(len(found[0].returns))]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*found[0].values, "mean", "low", "high", "iqm", "mean_while_training", *seeds])
    for one in found:
        ends = one.interval or (None, None)
        numbers = [*one.values.values(), one.mean, *ends, one.iqm, one.training, *one.returns.tolist()]
        writer.writerow(["" if value is None else value for value in plain(numbers)])
    return out.getvalue()
