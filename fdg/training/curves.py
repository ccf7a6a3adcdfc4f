"""Plots learning curves of one run, and comparisons of several runs."""

import collections
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdg.arguments import checked
from fdg.errors import FdgError, listed, one_line
from fdg.settings.moved import moved
from fdg.showing.canvas import PALETTE
from fdg.training.finite import failed_agents
from fdg.training.run_directory import RunDirectory, read_config, read_metrics, read_summary
from fdg.training.space import parse_grid, points_of
from fdg.training.statistics import STATISTICS, estimate_text, finite_mean, interval, intervals

__getattr__ = moved(__name__, "fdg.training.curves", {"compare": "plot_runs"})  # the old name
RETURN = "episode_return"
_MAX_POINTS = 200  # points per curve; more would show only noise at this size of figure
_COLOURS = (*PALETTE, "#000000")  # further lines repeat them with other line styles
_LINE_STYLES = ("-", "--", ":", "-.")
_AXES = {"env_steps": "steps of each agent", "wall_s": "seconds of training"}  # labels of the x axis
_FIGURE_INCHES = (7.0, 4.4)  # width and height of a figure with one panel
_LABEL_FIELDS = ("algo", "env", "policy")  # labels and panels show these without the field's name
_MAX_PARTS = 5  # maximum number of settings in a label


@dataclasses.dataclass(frozen=True)
class Curves:
    """The learning curves of agents that differ only in their seed."""

    label: str  # a short name, for the legend
    env: str  # the environment
    x: Sequence[np.ndarray]  # per agent `[points]`, steps or seconds
    y: Sequence[np.ndarray]  # per agent `[points]`, the metric
    final: np.ndarray  # `[agents]` float, from the evaluation, else the mean over the last tenth of the curve
    evaluated: Sequence[bool]  # of each agent, whether `final` is from an evaluation
    seeds: Sequence[int]  # the seed of each agent
    failed: np.ndarray  # `[agents]` bool, whether the final losses or the evaluation are not finite
    runs: Sequence[Path]  # the run directory of each agent


class CurvePlot(NamedTuple):
    """A plot of runs: the result of `plot_runs`."""

    figure: Any  # a `matplotlib.figure.Figure`
    curves: list[Curves]  # the plotted curves

    def savefig(self, file: Any, **options: Any) -> None:
        """Writes the plot, as `figure.savefig` does."""
        self.figure.savefig(file, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()

    def __repr__(self) -> str:
        return returns_table(self.curves)


def draw_learning_curve(run: RunDirectory, title: str, solved: float | None = None, **options: Any) -> None:
    """Draws `learning_curve.png` of a run from its `metrics.jsonl`; passes other arguments to `draw_run`."""
    rows = list(read_metrics(run.path / "metrics.jsonl"))
    run.publish("learning_curve.png", lambda picture: draw_run(rows, title, solved, picture, **options))


def draw_run(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    solved: float | None,
    picture: Any,
    dpi: int = 150,
    points: Sequence[str] = (),
    x_label: str = "steps",
    failed: Sequence[int] = (),
) -> None:
    """Plots a run's `metric_to_plot` over its steps as PNG: a faint line per agent, and the mean.

    `rows` are those of `metrics.jsonl`; `picture` is the file to write. A line marks the return `solved`.
    `points` names the points of a sweep, which have equally many agents. With two to seven points, each point
    has its own mean; else there is one mean over all agents. Agents at the positions `failed` are left out,
    unless all failed; the label counts them.
    """
    figure, axes = make_figure()
    metric = metric_to_plot(rows) or RETURN
    name = metric.replace("_", " ")
    steps, values, weights = metric_columns(rows, "env_steps", metric)
    agents = values.shape[1]
    left_out = [i for i in failed if i < agents] if agents > 1 and len(set(failed)) < agents else []
    values[:, left_out] = np.nan
    if np.isfinite(values).any():
        has_point_means = 1 < len(points) <= len(_COLOURS) and agents % len(points) == 0
        groups = np.split(values, len(points) if has_point_means else 1, 1)
        for group, colour in zip(groups, _COLOURS, strict=False):
            for column in group.T if agents > 1 else ():
                axes.plot(*_bin_means(steps, column, weights), color=colour, alpha=0.25, linewidth=0.8)
        if has_point_means:
            for point, colour, group in zip(points, _COLOURS, groups, strict=False):
                means = _bin_means(steps, finite_mean(group, 1), weights)
                axes.plot(*means, color=colour, label=_escape_text(point))
        else:
            mean = finite_mean(values, 1) if left_out else np.array([row.get(metric) for row in rows], float)
            unit = ("agents" if points else "seeds") + (f", {len(left_out)} failed" if left_out else "")
            label = f"mean of {agents - len(left_out)} {unit}" if agents > 1 else name
            axes.plot(*_bin_means(steps, mean, weights), color=_COLOURS[0], label=label)
            _draw_evaluations(axes, rows)
    else:
        text = "no episode ended" if metric == RETURN else f"{name} is not a number"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        axes.set(yticks=[])
        if len(steps):
            axes.set_xlim(0, steps[-1])
        else:
            axes.set_xticks([])
    if solved is not None:
        _draw_threshold(axes, solved, f"solved: {solved:g}")
    label = "mean episode return" if metric == RETURN else plot_label(name)
    axes.set(title=title, xlabel=x_label, ylabel=label, xlim=(0, None))
    finish_figure(figure, [axes], "env_steps")
    figure.savefig(picture, format="png", dpi=dpi)


def metric_to_plot(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The metric to plot: `episode_return`, else the first with "return" or "reward" in its name, else with
    "loss", else the first metric.

    >>> metric_to_plot([{"iteration": 1, "env_steps": 8, "wall_s": 0.1, "loss": 2.0, "mean_reward": 1.0}])
    'mean_reward'
    >>> metric_to_plot([{"iteration": 1, "entropy": 0.5, "loss": 2.0}])
    'loss'
    """
    names = [name for name in (rows[0] if rows else ()) if name not in ("iteration", *_AXES)]
    names = [name for name in names if not name.startswith("eval_") and "_per_" not in name]
    patterns = (f"^{RETURN}$", "return|reward", "loss", "")
    return next((name for pattern in patterns for name in names if re.search(pattern, name)), None)


def _draw_evaluations(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plots the returns of evaluations during training, if rows have them."""
    kinds = (("eval_return", "o", "greedy evaluation"), ("eval_return_sampled", "s", "sampled evaluation"))
    for (name, marker, label), colour in zip(kinds, _COLOURS[1:], strict=False):
        pairs = [(row["env_steps"], row[name]) for row in rows if row.get(name) is not None]
        if pairs:
            x, y = zip(*pairs, strict=True)
            axes.plot(x, y, marker=marker, markersize=4, linewidth=1, color=colour, label=label)


@checked
def plot_runs(
    paths: Iterable[str | Path],
    *,
    metric: str = RETURN,
    x: str = "env_steps",
    statistic: str = "mean",
    labels: Sequence[str] = (),
) -> "CurvePlot":
    """Plots several runs: a statistic over seeds with its 95% bootstrap interval.

    Runs that differ only in their seeds, and the agents of a run with `num_seeds`, form one curve. Each
    environment has a panel.

    Args:
      paths: run directories, or folders of them.
      metric: the metric to plot, from `metrics.jsonl`.
      x: the x axis: `env_steps` or `wall_s`.
      statistic: `mean`, or `iqm` (the interquartile mean).
      labels: one label per run, in the order of runs; empty: labels list the settings that differ.

    Returns:
      A plot that notebooks display, with its `matplotlib.figure.Figure` and its curves.

    Raises:
      FdgError: there is no run, a run is given twice, no run has the metric, `x` or `statistic` is unknown,
        or the numbers of labels and runs differ.
    """
    if x not in _AXES:
        raise FdgError(f"x={x}: it must be one of {', '.join(_AXES)}")
    if statistic not in STATISTICS:
        raise FdgError(f"statistic={statistic}: it must be one of {', '.join(STATISTICS)}")
    folders = find_unique_runs(paths)
    curves = read_curves(folders, metric, x, labels)
    environments = list(dict.fromkeys(curve.env for curve in curves))
    names = list(dict.fromkeys(curve.label for curve in curves))
    figure, *panels = make_figure(len(environments))
    for env, axes in zip(environments, panels, strict=True):
        for curve in (c for c in curves if c.env == env):
            line_style, colour = style_of(names.index(curve.label))
            grid, values = _interpolate_curves(curve)
            center = STATISTICS[statistic](values, axis=0)
            seeds = _seeds_text([c for c in curves if c.label == curve.label])
            axes.plot(grid, center, line_style, color=colour, label=f"{_escape_text(curve.label)} ({seeds})")
            if len(values) > 1:
                low, high = intervals(values, STATISTICS[statistic])
                axes.fill_between(grid, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(title=plot_label(env), xlabel=_AXES[x], ylabel=metric.replace("_", " "), xlim=(0, None))
    title = {"mean": "mean", "iqm": "interquartile mean"}[statistic]
    has_seeds = any(len(curve.y) > 1 for curve in curves)
    figure.suptitle(f"{title} over seeds, 95% interval" if has_seeds else "one seed each", fontsize="medium")
    finish_figure(figure, panels, x)
    return CurvePlot(figure, curves)


def _seeds_text(curves: Sequence[Curves]) -> str:
    """The numbers of seeds and of failed seeds of curves with the same label, as text."""
    counts = sorted({len(curve.y) for curve in curves})
    num_failed = sum(int(curve.failed.sum()) for curve in curves)
    text = "1 seed" if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
    return f"{text}, {num_failed} failed" if num_failed else text


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """`paths`, with each folder of runs replaced by its run directories, sorted by name."""
    runs: list[Path] = []
    for path in map(Path, paths):
        configs = [] if (path / "config.json").exists() else sorted(path.glob("*/config.json"))
        runs += [config.parent for config in configs] or [path]
    return runs


def find_unique_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The paths of `find_runs`; raises `FdgError` if a run is given twice."""
    try:
        folders = find_runs(paths)
        resolved = [folder.resolve() for folder in folders]
    except (OSError, TypeError, ValueError) as error:  # a name is too long, or a value is no path
        raise FdgError(f"run directories cannot be found: {one_line(error)}") from None
    duplicate = next((folder for i, folder in enumerate(folders) if resolved[i] in resolved[:i]), None)
    if duplicate is not None:
        raise FdgError(f"{duplicate} is given twice, and would count as two seeds: name each run once")
    return folders


def style_of(position: int) -> tuple[str, str]:
    """The line style and colour of the line at `position`, for matplotlib."""
    line_style, colour = divmod(position, len(_COLOURS))
    return _LINE_STYLES[line_style % len(_LINE_STYLES)], _COLOURS[colour]


def returns_table(curves: Sequence[Curves]) -> str:
    """A table of final returns, one line per curve: mean and interquartile mean with their intervals.

    Failed seeds are left out; the line names them.
    """
    lines = []
    show_env = len({curve.env for curve in curves}) > 1
    for curve in curves:
        name = _make_printable(f"{curve.label} on {curve.env}" if show_env else curve.label)
        is_used = np.isfinite(curve.final) & ~curve.failed
        final = curve.final[is_used]
        failed = [str(seed) for seed, has_failed in zip(curve.seeds, curve.failed, strict=True) if has_failed]
        note = f"; left out: {'seed' if len(failed) == 1 else 'seeds'} {listed(failed, 'and')}, which failed"
        if not final.size:
            lines.append(f"{name}: no finite value in the last tenth of training{note if failed else ''}")
            continue
        estimates = []
        for title, statistic in STATISTICS.items():
            bounds = interval(final, statistic) if len(final) > 1 else None
            estimates.append(f"{title} {estimate_text(float(statistic(final)), bounds, ' ({} to {})')}")
        used = itertools.compress(curve.evaluated, is_used)
        counts = collections.Counter("evaluation" if x else "last tenth of training" for x in used)
        measure = " and ".join(f"{kind} of {n}" if len(counts) > 1 else kind for kind, n in counts.items())
        count = f"{len(final)} {'seeds' if len(final) > 1 else 'seed'}"
        lines.append(f"{name}: {', '.join(estimates)}; {count}, {measure}{note if failed else ''}")
    return "\n".join(lines)


def read_curves(
    paths: Sequence[Path], metric: str, x: str, labels: Sequence[str], by_label: bool = False
) -> list[Curves]:
    """The curves of `plot_runs`; with `by_label`, runs of equal labels in an environment are one curve."""
    if not paths:
        raise FdgError("runs=[]: give at least one run directory")
    configs = [read_config(path, prefix="") for path in paths]
    _check_ids(paths, configs)
    run_keys = [_curve_keys(config) for config in configs]
    if labels and len(labels) != len(paths):
        count = f"{len(labels)} label{'s' if len(labels) > 1 else ''} for {len(paths)} runs"
        names = listed([str(path) for path in paths], "and")
        raise FdgError(f"{count}: give one for each, in this order: {names}")
    label_of = _make_labels(list(dict.fromkeys(key for keys in run_keys for key in keys)))
    for keys, label in reversed(list(zip(run_keys, labels, strict=False))):
        label_of |= {key: label if len(keys) == 1 else f"{label}, {label_of[key]}" for key in keys}
    agents_of: dict[Any, list[tuple[Any, ...]]] = {}  # for each curve: its fields from `x` to `runs`
    for path, config, keys in zip(paths, configs, run_keys, strict=True):
        rows = list(read_metrics(path / "metrics.jsonl"))
        # Lists have one value per agent; `metric_columns` reads them by the name of their mean.
        metrics = {name for row in rows for name, value in row.items() if not isinstance(value, list)}
        if metric not in metrics:
            names = ", ".join(sorted(metrics - {"iteration", *_AXES})) or "none yet"
            raise FdgError(f"{path} has no metric '{metric}': it has {names}")
        times, values, weights = metric_columns(rows, x, metric)
        num_agents = values.shape[1]
        # A metric recorded only as a mean over all agents cannot be attributed to a sweep's points.
        if len(keys) not in (1, num_agents):
            raise FdgError(f"{path} is a sweep, and has {metric} only as a mean over all agents")
        summary = read_summary(path) or {}
        evaluated = summary.get("eval_returns") or [summary.get("eval_return")] * num_agents
        failed = np.isin(np.arange(num_agents), failed_agents(rows[-1], config, num_agents))
        if "eval_return" in summary and len(evaluated) == num_agents:
            failed |= np.isnan(np.array(evaluated, float))
        seed, num_seeds = config.get("seed") or 0, config.get("num_seeds") or 1
        if config.get("exploit_every") is not None:  # the agents of a population have different seeds
            num_seeds = num_agents
        for i, (column, final) in enumerate(zip(values.T, evaluated, strict=False)):
            grid, curve = _bin_means(times, column, weights)
            is_evaluated = final is not None and metric == RETURN
            if not is_evaluated:
                tail = curve[grid >= 0.9 * times[-1]]
                final = tail.mean() if tail.size else math.nan
            agent = grid, curve, final, is_evaluated, seed + i % num_seeds, failed[i], path
            key = keys[i % len(keys)]
            side = label_of[key], dict(key)["env"], None if by_label else key
            agents_of.setdefault(side, []).append(agent)
    curves = []
    for (label, env, _), agents in agents_of.items():
        all_x, all_y, finals, evaluated, seeds, failures, runs = zip(*agents, strict=True)
        final, failed = np.array(finals, float), np.array(failures)
        curves.append(Curves(label, env, all_x, all_y, final, evaluated, seeds, failed, runs))
    return curves


def _check_ids(paths: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> None:
    """Raises `FdgError` if a run directory is a copy of another."""
    path_of: dict[Any, Path] = {}
    for path, config in zip(paths, configs, strict=True):
        first = path_of.setdefault(config.get("id") or path, path)
        if first is not path:
            raise FdgError(
                f"{first} and {path} are one run and its copy (both have the id {config['id']!s:.40}), and"
                " would count as two seeds: leave out one of them"
            )


def _curve_keys(config: Mapping[str, Any]) -> list[tuple[tuple[str, str], ...]]:
    """The `_curve_key` of each agent of a sweep; for other runs, a single key for all agents."""
    if config.get("sweep") is None or config.get("exploit_every") is not None:  # one population
        return [_curve_key(config)]
    points = points_of(parse_grid(str(config["sweep"])))
    configs = [{**config, "hyperparameters": {**config["hyperparameters"], **point}} for point in points]
    return [_curve_key(point_config) for point_config in configs for _ in range(config.get("num_seeds") or 1)]


def _curve_key(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """A run's configuration without seeds, as a hashable key: runs with equal keys form one curve."""
    parts = {name: config.get(name) for name in _LABEL_FIELDS}
    parts |= config.get("policy_fields", {})
    parts |= {name: config.get(name, 0) for name in ("staleness", "lag")}
    parts |= config.get("hyperparameters", {})
    parts |= {name: config.get(name) for name in ("self_play", "exploit_every")}
    parts["population"] = None if parts["exploit_every"] is None else config.get("sweep")
    return tuple((name, str(value)) for name, value in parts.items())


def _make_labels(keys: Sequence[tuple[tuple[str, str], ...]]) -> dict[Any, str]:
    """A short label for each curve key: the algorithm, and the settings that differ within an environment.

    Hyperparameters are compared only between runs of the same algorithm; None values are left out.
    """
    configs = [dict(key) for key in keys]
    labels: dict[Any, str] = {}
    for key, config in zip(keys, configs, strict=True):
        parts = [config["algo"].rpartition(":")[2]]
        if _is_unequal("policy", [peer for peer in configs if peer["env"] == config["env"]]):
            parts.append(config["policy"].rpartition(":")[2])
        peers = [peer for peer in configs if all(peer[name] == config[name] for name in ("algo", "env"))]
        differing = [
            n for n in config if n not in _LABEL_FIELDS and config[n] != "None" and _is_unequal(n, peers)
        ]
        parts += [f"{name}={config[name]:.40}" for name in differing]
        suffix = f", and {len(parts) - _MAX_PARTS} more" if len(parts) > _MAX_PARTS else ""
        label = _make_printable(", ".join(parts[:_MAX_PARTS]) + suffix)
        equal = [peer for peer in labels if labels[peer] == label and dict(peer)["env"] == config["env"]]
        labels[key] = f"{label} ({len(equal) + 1})" if equal else label
    return labels


def plot_label(text: str) -> str:
    """Shortens text from a file to 48 characters and makes it safe to plot."""
    return _escape_text(text if len(text) <= 48 else f"{text[:30]}...{text[-15:]}")


def _escape_text(text: str) -> str:
    """Makes text from a file safe to plot: unprintable characters become "?", `$` (mathtext) is escaped."""
    return _make_printable(text).replace("$", r"\$")


def _make_printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _is_unequal(name: str, configs: Sequence[Mapping[str, str]]) -> bool:
    return len({config.get(name) for config in configs}) > 1


def metric_columns(
    rows: Sequence[Mapping[str, Any]], x: str, metric: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps or seconds `[rows]`, the metric `[rows, agents]`, and weights `[rows]` (episodes, or 1)."""
    times = np.array([row[x] for row in rows], float)
    per_seed = f"{metric}_per_seed"
    if rows and rows[0].get(per_seed) is not None:
        unknown = [None] * len(rows[0][per_seed])
        entries = (row.get(per_seed) or unknown for row in rows)
        values = np.array([entry if len(entry) == len(unknown) else unknown for entry in entries], float)
    else:
        values = np.array([row.get(metric) for row in rows], float)[:, None]
    is_per_episode = metric.startswith("episode_")
    weights = np.array([row.get("episodes") or 1 if is_per_episode else 1 for row in rows], float)
    return times, values, weights


def _bin_means(steps: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted means over at most `_MAX_POINTS` equal bins of steps: ends and means of nonempty bins."""
    points = min(_MAX_POINTS, len(steps))
    edges = np.linspace(0, steps[-1], points + 1)
    bins = np.clip(np.searchsorted(edges, steps) - 1, 0, points - 1)
    weights = np.where(np.isfinite(values), weights, 0)
    total = np.bincount(bins, weights, minlength=points)
    mean = np.bincount(bins, np.nan_to_num(values) * weights, minlength=points) / np.maximum(total, 1e-30)
    return edges[1:][total > 0], mean[total > 0]


def _interpolate_curves(curve: Curves) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates all agents' curves to a common grid where they overlap: `[points]`, `[agents, points]`.

    Failed agents are left out, unless all failed.
    """
    is_used = ~curve.failed | curve.failed.all()
    curves = [(x, y) for x, y, used in zip(curve.x, curve.y, is_used, strict=True) if len(x) and used]
    if not curves:
        return np.zeros(0), np.zeros((1, 0))
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(low, high, _MAX_POINTS) if high > low else np.array([low])
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def make_figure(panels: int = 1) -> tuple[Any, ...]:
    """A figure and the axes of its panels."""
    # Not pyplot, which selects a window system and keeps figures alive. The import takes 0.4 s.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if panels == 4 else min(panels, 3)
    rows = math.ceil(panels / columns)
    width, height = 1 if columns == 1 else 0.7 * columns, 1 if rows == 1 else 0.85 * rows
    figure = Figure(figsize=(_FIGURE_INCHES[0] * width, _FIGURE_INCHES[1] * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.remove()
    return figure, *axes[:panels]


def _draw_threshold(axes: Any, value: float, label: str) -> None:
    """Draws a horizontal line at a value, or an arrow at the edge if the value is far outside the y range."""
    low, high = axes.get_ylim()
    span = high - low
    if low - 0.5 * span <= value <= high + 0.5 * span:
        axes.axhline(value, color="#555555", linestyle="--", linewidth=1, label=label)
        return
    axes.set_ylim(low, high)
    edge, tail, side = (1.0, 0.9, "above") if value > high else (0.0, 0.1, "below")
    grey = {"color": "#555555"}
    arrow = {"arrowstyle": "-|>", **grey}
    axes.annotate("", xy=(0.02, edge), xytext=(0.02, tail), xycoords="axes fraction", arrowprops=arrow)
    place: Any = {"transform": axes.transAxes, "va": "center", "fontsize": "small", **grey}
    axes.text(0.035, (edge + tail) / 2, f"{label} {side}", **place)


def finish_figure(figure: Any, panels: Sequence[Any], x: str) -> None:
    """Adds a grid, and one legend below all panels; steps (`x="env_steps"`) get SI prefixes, as in 1M."""
    from matplotlib.ticker import EngFormatter

    lines: dict[str, Any] = {}
    for axes in panels:
        if x == "env_steps":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.title.set_fontsize("medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        handles, labels = axes.get_legend_handles_labels()
        lines = {**dict(zip(labels, handles, strict=True)), **lines}
    if lines:
        width = int(90 * figure.get_figwidth() / _FIGURE_INCHES[0])  # characters in a line
        columns = max(1, min(4, len(lines), width // (max(map(len, lines)) + 8)))
        figure.legend(
            lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
        )
