"""Plots learning curves of one run, and comparisons of several runs."""

import dataclasses
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdg.errors import FdgError, listed
from fdg.training.finite import failed_agents
from fdg.training.run_directory import RunDirectory, read_config, read_metrics, read_summary
from fdg.training.space import parse_grid, points_of
from fdg.training.statistics import STATISTICS, finite_mean, interval, intervals, with_interval

RETURN = "episode_return"
_POINTS = 200  # of a curve; more would show only noise at this figure size
# Okabe and Ito's colour-blind safe palette; further lines repeat it with other line styles.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STROKES = ("-", "--", ":", "-.")
_AXES = {"env_steps": "steps of each agent", "wall_s": "seconds of training"}
_SIZE = (7.0, 4.4)
_NAMES = ("algo", "env", "policy")
_OPPONENTS = ("self_play", "exploit_every")  # opponents in training; None for most runs
_PARTS = 5  # maximum parts of a label
_COLUMNS = 3  # of panels


@dataclasses.dataclass(frozen=True)
class Curves:
    """The learning curves of agents that differ only in their seed."""

    label: str  # a short name, for the legend
    env: str  # the environment
    x: Sequence[np.ndarray]  # for each agent, steps or seconds and the metric, `[points]` each
    y: Sequence[np.ndarray]
    # `[agents]` float, each agent's final return: its evaluation, else the end of its curve
    final: np.ndarray
    evaluated: bool  # whether `final` is from evaluations
    seeds: Sequence[int]  # of each agent
    failed: np.ndarray  # `[agents]` bool, whether its losses, or its evaluation, were not finite in the end
    runs: Sequence[Path]  # the run directory of each agent


class Drawn(NamedTuple):
    """A plot of runs: what `compare` returns.

    Attributes:
      figure: a `matplotlib.figure.Figure`.
      curves: the plotted curves.
    """

    figure: Any
    curves: list[Curves]

    def savefig(self, file: Any, **options: Any) -> None:
        """Writes the plot, as `figure.savefig` does."""
        self.figure.savefig(file, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()

    def __repr__(self) -> str:
        return returns_table(self.curves)


def draw_learning_curve(run: RunDirectory, title: str, solved: float | None = None, **how: Any) -> None:
    """Draws `learning_curve.png` of a run from its `metrics.jsonl`; arguments as for `draw_run`."""
    rows = list(read_metrics(run.path / "metrics.jsonl"))
    run.publish("learning_curve.png", lambda picture: draw_run(rows, title, solved, picture, **how))


def draw_run(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    solved: float | None,
    picture: Any,
    dpi: int = 150,
    points: Sequence[str] = (),
    counted: str = "steps",
    failed: Sequence[int] = (),
) -> None:
    """Plots a run's `shown_metric` over its steps as PNG: each agent in a faint line, and means.

    `solved` is a return to mark with a line, and `counted` the label of the x axis. The `points` of a sweep
    have equally many agents each; if there are few, each gets a mean. Failed agents are left out, unless all
    failed, and counted in the label. The plot is 7 inches wide.
    """
    figure, axes = figure_of()
    metric = shown_metric(rows) or RETURN
    name = metric.replace("_", " ")
    steps, values, weights = columns(rows, "env_steps", metric)
    agents = values.shape[1]
    lost = [i for i in failed if i < agents] if agents > 1 and len(set(failed)) < agents else []
    values[:, lost] = np.nan
    if np.isfinite(values).any():
        apart = 1 < len(points) <= len(_COLOURS) and agents % len(points) == 0
        each = agents // len(points) if apart else agents
        for i, column in enumerate(values.T if agents > 1 else ()):
            colour = _COLOURS[i // each]
            axes.plot(*_bins(steps, column, weights), color=colour, alpha=0.25, linewidth=0.8)
        if apart:
            for name, colour, some in zip(points, _COLOURS, np.split(values, len(points), 1), strict=False):
                axes.plot(*_bins(steps, finite_mean(some, 1), weights), color=colour, label=name)
        else:
            together = finite_mean(values, 1) if lost else np.array([row.get(metric) for row in rows], float)
            what = ("agents" if points else "seeds") + (f", {len(lost)} failed" if lost else "")
            label = f"mean of {agents - len(lost)} {what}" if agents > 1 else name
            axes.plot(*_bins(steps, together, weights), color=_COLOURS[0], label=label)
            _draw_evaluations(axes, rows)
    else:
        text = "no episode ended" if metric == RETURN else f"{name} is not a number"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([])
        if len(steps):
            axes.set_xlim(0, steps[-1])
        else:
            axes.set_xticks([])
    if solved is not None:
        _mark(axes, solved, f"solved: {solved:g}")
    label = "mean episode return" if metric == RETURN else plot_label(name)
    axes.set(title=title, xlabel=counted, ylabel=label, xlim=(0, None))
    finish(figure, [axes], "env_steps")
    figure.savefig(picture, format="png", dpi=dpi)


def shown_metric(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The metric to plot: `episode_return`, else one named after return or reward, else after loss, else the
    first metric.

    >>> shown_metric([{"iteration": 1, "env_steps": 8, "wall_s": 0.1, "loss": 2.0, "mean_reward": 1.0}])
    'mean_reward'
    >>> shown_metric([{"iteration": 1, "entropy": 0.5, "loss": 2.0}])
    'loss'
    """
    names = [
        name
        for row in rows[:1]
        for name in row
        if name not in ("iteration", *_AXES) and not name.startswith("eval_") and "_per_" not in name
    ]
    if RETURN in names:
        return RETURN
    named = [[name for name in names if re.search(words, name)] for words in ("return|reward", "loss", "")]
    return next((name for some in named for name in some), None)


def _draw_evaluations(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plots evaluations during training, if there are any."""
    kinds = (("eval_return", "o", "greedy evaluation"), ("eval_return_sampled", "s", "sampled evaluation"))
    for (name, marker, label), colour in zip(kinds, _COLOURS[1:], strict=False):
        there = [(row["env_steps"], row[name]) for row in rows if row.get(name) is not None]
        if there:
            axes.plot(
                *zip(*there, strict=True), marker=marker, markersize=4, linewidth=1, color=colour, label=label
            )


def compare(
    paths: Iterable[str | Path],
    *,
    metric: str = RETURN,
    x: str = "env_steps",
    statistic: str = "mean",
    labels: Sequence[str] = (),
) -> "Drawn":
    """Plots several runs: a statistic over seeds with its 95% bootstrap interval.

    Runs that differ only in their seeds form one curve, and so do the agents of a run with `num_seeds`. Each
    environment has a panel.

    Args:
      paths: run directories, or folders of them.
      metric: the metric to plot, from `metrics.jsonl`.
      x: the x axis: `env_steps` or `wall_s`.
      statistic: `mean`, or `iqm` (the interquartile mean).
      labels: labels of the runs, in their order; empty for the settings that differ.

    Returns:
      A plot that notebooks display, with its `matplotlib.figure.Figure` and its curves.

    Raises:
      FdgError: there is no run, a run is given twice, no run has the metric, `x` or `statistic` is unknown,
        or the number of labels is not that of the runs.
    """
    if x not in _AXES:
        raise FdgError(f"x={x}: it must be one of {', '.join(_AXES)}")
    if statistic not in STATISTICS:
        raise FdgError(f"statistic={statistic}: it must be one of {', '.join(STATISTICS)}")
    folders = runs_once(paths)
    curves = read_curves(folders, metric, x, labels)
    worlds = list(dict.fromkeys(curve.env for curve in curves))
    names = list(dict.fromkeys(curve.label for curve in curves))
    figure, *panels = figure_of(len(worlds))
    for env, axes in zip(worlds, panels, strict=True):
        for curve in (one for one in curves if one.env == env):
            stroke, colour = style(names.index(curve.label))
            grid, values = _on_one_grid(curve)
            alike = [one for one in curves if one.label == curve.label]
            counts = sorted({len(one.y) for one in alike})
            seeds = "1 seed" if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
            lost = sum(int(one.failed.sum()) for one in alike)
            seeds += f", {lost} failed" if lost else ""
            together = STATISTICS[statistic](values, axis=0)
            axes.plot(grid, together, stroke, color=colour, label=f"{curve.label} ({seeds})")
            if len(values) > 1:
                low, high = intervals(values, STATISTICS[statistic])
                axes.fill_between(grid, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(title=plot_label(env), xlabel=_AXES[x], ylabel=metric.replace("_", " "), xlim=(0, None))
    name = {"mean": "mean", "iqm": "interquartile mean"}[statistic]
    several = any(len(curve.y) > 1 for curve in curves)
    figure.suptitle(f"{name} over seeds, 95% interval" if several else "one seed each", fontsize="medium")
    finish(figure, panels, x)
    return Drawn(figure, curves)


def runs_in(paths: Iterable[str | Path]) -> list[Path]:
    """Expands folders of run directories to the run directories in them, sorted by name."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [] if (path / "config.json").exists() else sorted(path.glob("*/config.json"))
        found += [one.parent for one in inside] or [path]
    return found


def runs_once(paths: Iterable[str | Path]) -> list[Path]:
    """As `runs_in`, but refuses duplicates."""
    folders = runs_in(paths)
    real = [one.resolve() for one in folders]
    twice = next((one for i, one in enumerate(folders) if real[i] in real[:i]), None)
    if twice is not None:
        raise FdgError(f"{twice} is there twice, and would count as another seed: name each run once")
    return folders


def style(position: int) -> tuple[str, str]:
    """The line style and colour of line `i`, for matplotlib."""
    stroke, colour = divmod(position, len(_COLOURS))
    return _STROKES[stroke % len(_STROKES)], _COLOURS[colour]


def returns_table(curves: Sequence[Curves]) -> str:
    """A table of final returns, one line for each curve: mean and interquartile mean with their intervals.

    Failed seeds are left out, and named.
    """
    lines = []
    several = len({curve.env for curve in curves}) > 1
    for curve in curves:
        name = f"{curve.label} on {curve.env}" if several else curve.label
        final = curve.final[np.isfinite(curve.final) & ~curve.failed]
        lost = [str(seed) for seed, bad in zip(curve.seeds, curve.failed, strict=True) if bad]
        said = f"; left out: {'seed' if len(lost) == 1 else 'seeds'} {listed(lost, 'and')}, which failed"
        if not final.size:
            lines.append(f"{name}: no episode ended{said if lost else ''}")
            continue
        parts = []
        for kind, statistic in STATISTICS.items():
            ends = interval(final, statistic) if len(final) > 1 else None
            parts.append(f"{kind} {with_interval(float(statistic(final)), ends, ' ({} to {})')}")
        what = "evaluation" if curve.evaluated else "last tenth of training"
        count = f"{len(final)} {'seeds' if len(final) > 1 else 'seed'}"
        lines.append(f"{name}: {', '.join(parts)}; {count}, {what}{said if lost else ''}")
    return "\n".join(lines)


def read_curves(paths: Sequence[Path], metric: str, x: str, labels: Sequence[str] = ()) -> list[Curves]:
    """Reads the curves of runs; runs that differ only in seeds are merged. Arguments as for `compare`."""
    if not paths:
        raise FdgError("runs=[]: give at least one run directory")
    configs = [read_config(path, prefix="") for path in paths]
    of_agents = [_kinds(config) for config in configs]
    kinds = list(dict.fromkeys(kind for one in of_agents for kind in one))
    if labels and len(labels) != len(paths):
        count = f"{len(labels)} label{'s' if len(labels) > 1 else ''} for {len(paths)} runs"
        names = listed([str(path) for path in paths], "and")
        raise FdgError(f"{count}: give one for each, in this order: {names}")
    named = _labels(kinds)
    for own, label in reversed(list(zip(of_agents, labels, strict=False))):
        named |= {kind: label if len(own) == 1 else f"{label}, {named[kind]}" for kind in own}
    found: dict[Any, list[tuple[Any, ...]]] = {kind: [] for kind in kinds}
    for path, config, own in zip(paths, configs, of_agents, strict=True):
        rows = list(read_metrics(path / "metrics.jsonl"))
        if not any(metric in row for row in rows):
            known = sorted({name for row in rows for name in row} - {"iteration", *_AXES})
            raise FdgError(f"{path} has no metric '{metric}': it has {', '.join(known) or 'none yet'}")
        times, values, weights = columns(rows, x, metric)
        summary = read_summary(path) or {}
        evaluated = summary.get("eval_returns") or [summary.get("eval_return")] * values.shape[1]
        lost = np.zeros(values.shape[1], bool)
        lost[failed_agents(rows[-1] if rows else None, config, len(lost))] = True
        if "eval_return" in summary and len(evaluated) == len(lost):
            lost |= np.isnan(np.array(evaluated, float))
        first, each = config.get("seed") or 0, config.get("num_seeds") or 1
        # A metric recorded only as a mean over all agents cannot be attributed to a sweep's points.
        if len(own) > 1 and values.shape[1] != len(own):
            raise FdgError(f"{path} is a sweep, which has {metric} of all its agents together only")
        own = own * values.shape[1] if len(own) == 1 else own
        for i, (kind, column, value) in enumerate(zip(own, values.T, evaluated, strict=False)):
            grid, curve = _bins(times, column, weights)
            late = curve[grid >= 0.9 * times[-1]]
            in_the_end = float(late.mean()) if late.size else float("nan")
            of_evaluation = value is not None and metric == RETURN
            final = value if of_evaluation else in_the_end
            found[kind].append((grid, curve, final, of_evaluation, first + i % each, bool(lost[i]), path))
    return [_of_agents(named[kind], dict(kind)["env"], agents) for kind, agents in found.items()]


def _of_agents(label: str, env: str, agents: Sequence[tuple[Any, ...]]) -> Curves:
    x, y, final, evaluated, seeds, failed, runs = zip(*agents, strict=True)
    return Curves(label, env, x, y, np.array(final, float), all(evaluated), seeds, np.array(failed), runs)


def _kinds(config: Mapping[str, Any]) -> list[tuple[tuple[str, str], ...]]:
    """The configuration key of each agent of a sweep; of another run, one key for all its agents."""
    if config.get("sweep") is None or config.get("exploit_every") is not None:  # one population
        return [_kind(config)]
    points = points_of(parse_grid(str(config["sweep"])))
    changed = [{**config, "hyperparameters": {**config["hyperparameters"], **point}} for point in points]
    return [_kind(one) for one in changed for _ in range(config.get("num_seeds") or 1)]


def _kind(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """A run's configuration without its seeds, as a hashable key: runs with equal keys are one curve."""
    parts = {"algo": config.get("algo"), "env": config.get("env"), "policy": config.get("policy")}
    parts |= config.get("policy_fields", {})
    parts |= {name: config.get(name, 0) for name in ("staleness", "lag")}
    parts |= config.get("hyperparameters", {})
    parts |= {name: config.get(name) for name in _OPPONENTS}
    parts["population"] = None if parts["exploit_every"] is None else config.get("sweep")
    return tuple((name, str(value)) for name, value in parts.items())


def _labels(kinds: Sequence[tuple[tuple[str, str], ...]]) -> dict[Any, str]:
    """Short names for kinds of runs: the algorithm, and the settings that differ between runs of an
    environment.

    Hyperparameters are compared only between runs of the same algorithm; those that are None are left out.
    """
    asked = [dict(kind) for kind in kinds]
    labels: dict[Any, str] = {}
    for kind, one in zip(kinds, asked, strict=True):
        parts = [one["algo"].rpartition(":")[2]]
        if _differ("policy", [other for other in asked if other["env"] == one["env"]]):
            parts.append(one["policy"].rpartition(":")[2])
        alike = [other for other in asked if all(other[name] == one[name] for name in ("algo", "env"))]
        differing = [n for n in one if n not in _NAMES and one[n] != "None" and _differ(n, alike)]
        parts += [f"{name}={one[name]:.40}" for name in differing]
        more = f", and {len(parts) - _PARTS} more" if len(parts) > _PARTS else ""
        label = _plain(", ".join(parts[:_PARTS]) + more)
        same = [other for other in labels if labels[other] == label and dict(other)["env"] == one["env"]]
        labels[kind] = f"{label} ({len(same) + 1})" if same else label
    return labels


def plot_label(text: str) -> str:
    """Text from a file, safe to plot and of at most 48 characters."""
    return _plain(text if len(text) <= 48 else f"{text[:30]}...{text[-15:]}")


def _plain(text: str) -> str:
    """Makes text from a file safe to plot: replaces unprintable characters and escapes `$` (mathtext)."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")


def _differ(name: str, kinds: Sequence[Mapping[str, str]]) -> bool:
    return len({kind.get(name) for kind in kinds}) > 1


def columns(
    rows: Sequence[Mapping[str, Any]], x: str, metric: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps or seconds `[rows]`, the metric `[rows, agents]`, and the weight of each row `[rows]`."""
    times = np.array([row[x] for row in rows], float)
    each = f"{metric}_per_seed"
    if rows and rows[0].get(each) is not None:
        nothing = [None] * len(rows[0][each])
        given = (row.get(each) or nothing for row in rows)
        values = np.array([one if len(one) == len(nothing) else nothing for one in given], float)
    else:
        values = np.array([row.get(metric) for row in rows], float)[:, None]
    of_episodes = metric.startswith("episode_")
    weights = np.array([row.get("episodes") or 1 if of_episodes else 1 for row in rows], float)
    return times, values, weights


def _bins(steps: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted means over at most `_POINTS` equal bins of steps; empty bins are left out."""
    points = min(_POINTS, len(steps))
    edges = np.linspace(0, steps[-1], points + 1)
    which = np.clip(np.searchsorted(edges, steps) - 1, 0, points - 1)
    weights = np.where(np.isfinite(values), weights, 0)
    total = np.bincount(which, weights, minlength=points)
    mean = np.bincount(which, np.nan_to_num(values) * weights, minlength=points) / np.maximum(total, 1e-30)
    return edges[1:][total > 0], mean[total > 0]


def _on_one_grid(curve: Curves) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates agents to one grid where their curves overlap: `[points]` and `[agents, points]`.

    Failed agents are left out, unless all failed.
    """
    counts = ~curve.failed | curve.failed.all()
    there = [(x, y) for x, y, use in zip(curve.x, curve.y, counts, strict=True) if len(x) and use]
    if not there:
        return np.zeros(0), np.zeros((1, 0))
    low, high = max(x[0] for x, _ in there), min(x[-1] for x, _ in there)
    grid = np.linspace(low, high, _POINTS) if high > low else np.array([low])
    return grid, np.stack([np.interp(grid, x, y) for x, y in there])


def figure_of(panels: int = 1) -> tuple[Any, ...]:
    """A figure and the axes of its panels."""
    # Not pyplot: it picks a window system, and keeps figures alive. Imported here because it takes 0.4 s.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if panels == 4 else min(panels, _COLUMNS)
    rows = math.ceil(panels / columns)
    size = (_SIZE[0] * (1 if columns == 1 else 0.7 * columns), _SIZE[1] * (1 if rows == 1 else 0.85 * rows))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.remove()
    return figure, *axes[:panels]


def _mark(axes: Any, value: float, label: str) -> None:
    """Draws a horizontal line at a value; if it is far outside the curves' range, an arrow at the edge."""
    low, high = axes.get_ylim()
    span = high - low
    if low - 0.5 * span <= value <= high + 0.5 * span:
        axes.axhline(value, color="#555555", linestyle="--", linewidth=1, label=label)
        return
    up = value > high
    axes.set_ylim(low, high)
    edge, inside = (1.0, 0.9) if up else (0.0, 0.1)
    grey = {"color": "#555555"}
    arrow = {"arrowstyle": "-|>", **grey}
    axes.annotate("", xy=(0.02, edge), xytext=(0.02, inside), xycoords="axes fraction", arrowprops=arrow)
    text = f"{label} {'above' if up else 'below'}"
    axes.text(
        0.035, (edge + inside) / 2, text, transform=axes.transAxes, va="center", fontsize="small", **grey
    )


def finish(figure: Any, panels: Sequence[Any], x: str) -> None:
    """Adds the grid, units, and one legend below the axes."""
    from matplotlib.ticker import EngFormatter

    shown: dict[str, Any] = {}
    for axes in panels:
        if x == "env_steps":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.title.set_fontsize("medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        handles, labels = axes.get_legend_handles_labels()
        shown = {**dict(zip(labels, handles, strict=True)), **shown}
    if shown:
        room = int(90 * figure.get_figwidth() / _SIZE[0])  # characters in a line
        columns = max(1, min(4, len(shown), room // (max(map(len, shown)) + 8)))
        figure.legend(
            shown.values(), shown, loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
        )
