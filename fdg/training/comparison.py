"""`fdg.compare`: compares algorithms over environments, after Agarwal et al. 2021 (arXiv 2108.13264).

A comparison has final returns and areas under the curve, their interquartile means (IQM) with 95% stratified
bootstrap intervals, probabilities of improvement, and notes about settings that differ between the sides. A
side is an algorithm with its settings.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdg.arguments import checked
from fdg.errors import FdgError, listed, unknown_name
from fdg.files import check_results, writing
from fdg.kinds import dataclass_fields, to_json
from fdg.training import comparison_text, curves
from fdg.training.comparison_text import TOGETHER
from fdg.training.curves import Curves
from fdg.training.run_directory import json_line, read_config, read_metrics, read_summary
from fdg.training.statistics import (
    estimate_text,
    interquartile_mean,
    is_vital,
    probability_of_improvement,
    stratified_interval,
)

_MAX_LISTED = 6  # maximum number of sides, environments or settings in a sentence
# Entries of the configuration that are compared, in addition to hyperparameters.
_COMPARED_ENTRIES = ("algo", "policy", "staleness", "lag", "preset_name")
_PACKAGES = ("fdg", "jax")  # packages whose versions are compared


def _list_unequal(all_curves: Sequence[Curves]) -> list[str]:
    """Sentences about unequal budgets, seeds, presets, settings, measures or versions of the sides.

    Each side has one `Curves` in an environment.
    """
    sentences: dict[str, list[str]] = {}
    for env in dict.fromkeys(curve.env for curve in all_curves):
        sides = {curve.label: _compared_properties(curve) for curve in all_curves if curve.env == env}
        all_settings = [properties["settings"].items() for properties in sides.values()]
        for properties in sides.values():  # drops settings that all sides share
            properties["by hand"] = _list_settings(
                item
                for item in properties["by hand"].items()
                if not all(item in settings for settings in all_settings)
            )
        for name, beginning in _BEGINNINGS.items():
            values = {side: properties[name] for side, properties in sides.items()}
            nonempty = {side: value for side, value in values.items() if value}
            if len(set(map(str, values.values()))) == 1 and not (name in _ALWAYS and nonempty):
                continue
            if name == "sweep":
                text = _list_some([*nonempty])
            elif name in ("by hand", "within", "mixed", "repeated", "unfinished"):
                text = "; ".join(f"{side} {value}" for side, value in nonempty.items())
            else:
                groups: dict[str, list[str]] = {}
                for side, value in values.items():
                    groups.setdefault(str(value), []).append(side)
                text = "; ".join(f"{_list_some(names)} {value}" for value, names in groups.items())
            sentences.setdefault(f"{beginning}: {text}", []).append(env)
    return [f"{text} ({_list_some(envs)})" for text, envs in sentences.items()]


_BEGINNINGS = {  # how the sentence about each unequal property begins
    "steps": "budgets differ, in steps of each seed",
    "seeds": "numbers of seeds differ",
    "preset": "tuned settings on one side",
    "by hand": "settings by hand",
    "within": "settings within a side differ",
    "measure": "final returns are measured differently",
    "mixed": "final returns within a side are measured differently",
    "repeated": "runs of one side have the same seed, so they are not independent",
    "staleness": "staleness differs",
    "lag": "lag differs, in micro-batches",
    "sweep": "sides are points of a sweep, and choosing the best by these returns favours it",
    "versions": "versions differ",
    "unfinished": "runs have not ended",
}
_ALWAYS = ("within", "mixed", "repeated", "sweep", "unfinished")  # reported even if all sides are equal


def _compared_properties(side: Curves) -> dict[str, Any]:
    """Properties of one side that should be equal between sides, with the keys of `_BEGINNINGS`."""
    runs = list(dict.fromkeys(side.runs))
    configs = [read_config(path, prefix="") for path in runs]
    summaries = [read_summary(path) for path in runs]
    steps = {c["hyperparameters"].get("total_steps") or c.get("total_steps") or 0 for c in configs}
    config, measures = configs[0], _measure_counts(side, dict(zip(runs, summaries, strict=True)))
    measure_texts = [f"{text} in {n} of {sum(measures.values())} seeds" for text, n in measures.items()]
    versions = [(c.get("versions") or {}).items() for c in configs]
    unfinished = [
        run for run, summary in zip(runs, summaries, strict=True) if summary is None or summary.get("stopped")
    ]
    last_rows = [row for run in unfinished for row in list(read_metrics(run / "metrics.jsonl"))[-1:]]
    is_nonfinite = any(value is None and is_vital(name) for row in last_rows for name, value in row.items())
    loss_note = ", ended by a loss that is not finite" if is_nonfinite else ""
    return {
        "steps": " or ".join(f"{count:,}" for count in sorted(steps)),
        "seeds": len(side.seeds),
        "preset": "a preset" if config.get("preset_name") else "none",
        "settings": config["hyperparameters"],
        "by hand": _manual_settings(config),
        "within": _differing_settings(configs),
        "measure": " and ".join(measures) or "not at all, as all seeds failed",
        "mixed": ", ".join(measure_texts) if len(measures) > 1 else "",
        "repeated": _repeated_seeds(side),
        "staleness": config.get("staleness") or 0,
        "lag": config.get("lag") or 0,
        "sweep": config.get("sweep"),
        "versions": ", ".join(sorted({f"{x} {y}" for pairs in versions for x, y in pairs if x in _PACKAGES})),
        "unfinished": f"{len(unfinished)} of {len(runs)} runs{loss_note}" if unfinished else "",
    }


def _differing_settings(configs: Sequence[Mapping[str, Any]]) -> str:
    """The settings that runs of a side do not share, as text; "" if they share all."""
    described = [
        {**c["hyperparameters"], **{name: c.get(name) for name in _COMPARED_ENTRIES}} for c in configs
    ]
    values = {
        name: list(dict.fromkeys(str(settings.get(name)) for settings in described))
        for name in dict.fromkeys(itertools.chain(*described))
    }
    return _list_settings((name, " or ".join(texts)) for name, texts in values.items() if len(texts) > 1)


def _measure_counts(side: Curves, summaries: Mapping[Path, Mapping[str, Any] | None]) -> dict[str, int]:
    """The number of seeds of a side by the way in which their final returns are measured."""
    texts = []
    for run, is_evaluated, has_failed in zip(side.runs, side.evaluated, side.failed, strict=True):
        episodes = (summaries[run] or {}).get("eval_episodes")
        if not has_failed or is_evaluated:
            greedy = f"greedy evaluations of {episodes} episodes"
            texts.append(greedy if is_evaluated else "the last tenth of the training")
    return dict(sorted(collections.Counter(texts).items()))


def _repeated_seeds(side: Curves) -> str:
    """The seeds that several runs of a side share, with the runs, as text; "" if there are none."""
    runs: dict[int, list[str]] = {}
    for seed, run in zip(side.seeds, side.runs, strict=True):
        runs.setdefault(seed, []).append(str(run))
    pairs = [f"seed {seed} in {_list_some(names)}" for seed, names in runs.items() if len(names) > 1]
    return f"has {_list_some(pairs)}" if pairs else ""


def _manual_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that differ from the defaults and from the preset; empty for a user's class."""
    import algos

    try:
        fields = dataclass_fields(algos.get(str(config.get("algo"))))
    except (FdgError, ImportError):
        return {}
    preset_values = {**(config.get("preset") or {}), **(config.get("follows") or {})}
    defaults = {
        field.name: to_json(field.default) for field in fields if field.name not in ("env", "total_steps")
    }
    return {
        name: value
        for name, value in config["hyperparameters"].items()
        if name in defaults and value not in (defaults[name], preset_values.get(name, defaults[name]))
    }


def _list_settings(settings: Iterable[tuple[str, Any]]) -> str:
    """Text such as `has lr=0.1, hidden=64/64`; "" without settings."""
    texts = []
    for name, value in settings:
        text = "/".join(map(str, value)) if isinstance(value, list) else str(value)
        texts.append(f"{name}={' '.join(text.split())[:40]}")
    suffix = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return f"has {', '.join(texts[:_MAX_LISTED])}{suffix}" if texts else ""


def _list_some(words: Sequence[str]) -> str:
    suffix = f" ({len(words) - _MAX_LISTED} more)" if len(words) > _MAX_LISTED else ""
    return listed(words[:_MAX_LISTED], "and") + suffix


# The files that `Comparison.write` writes.
FILES = ("comparison.md", "comparison.tex", "comparison.json", "curves.png", "intervals.png")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The seeds of one side in one environment."""

    label: str  # the side
    env: str  # the environment
    # `[seeds]`, final returns: from the evaluation, else from the last tenth of the training; -inf for a
    # failed seed, which ranks it below all others
    returns: np.ndarray
    # `[seeds]`, the area under the training curve divided by its length: the mean return in training
    areas: np.ndarray
    seeds: Sequence[int]  # the seeds
    failed: Sequence[int]  # seeds whose losses or evaluations are not finite, or in which no episode ended


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An IQM over seeds with its 95% interval (None for one seed); -inf if too many seeds failed."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if math.isnan(self.value):  # no episode ended during training
            return "-"
        if not math.isfinite(self.value):
            return "failed"
        return estimate_text(self.value, self.interval)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Sides (algorithms with their settings) in environments. Prints as Markdown.

    Attributes:
      cells: one per side and environment with runs.
      notes: sentences about failed seeds and about unequal settings of the sides.
      random: returns `[episodes]` of uniformly random actions by environment, if known.
      runs: the run directories.
      labels: one label per run directory; empty: the settings that differ.
    """

    cells: Sequence[Cell]
    notes: Sequence[str] = ()
    random: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    runs: Sequence[Path] = ()
    labels: Sequence[str] = ()

    @property
    def sides(self) -> list[str]:
        """The labels of sides, in order."""
        return list(dict.fromkeys(cell.label for cell in self.cells))

    @property
    def environments(self) -> list[str]:
        """The names of environments, in order."""
        return list(dict.fromkeys(cell.env for cell in self.cells))

    def values(self, side: str, env: str, measure: str = "returns") -> np.ndarray | None:
        """The `measure` ("returns" or "areas") of a side in an environment, `[seeds]`; None without runs.

        Raises:
          UnknownNameError: no run has this side, or this environment.
        """
        for kind, name, names in (("side", side, self.sides), ("environment", env, self.environments)):
            if name not in names:
                raise unknown_name(f"{kind} of the comparison", name, names)
        cells = [cell for cell in self.cells if (cell.label, cell.env) == (side, env)]
        return getattr(cells[0], measure) if cells else None

    def estimate(self, side: str, env: str, measure: str = "returns") -> Estimate | None:
        """The IQM of a side in an environment, or in all shared ones (`TOGETHER`); None without runs."""
        if env == TOGETHER:
            if len(self.shared) < 2:
                return None
            groups = []
            for name in self.shared:
                values, (low, high) = self.values(side, name, measure), self.ends(name, measure)
                assert values is not None  # every side has runs there
                groups.append((values - low) / (high - low if high > low else 1.0))
        elif (values := self.values(side, env, measure)) is not None:
            groups = [values]
        else:
            return None
        value = float(interquartile_mean(np.concatenate(groups)))
        has_seeds = max(map(len, groups)) > 1
        return Estimate(value, stratified_interval(groups, interquartile_mean) if has_seeds else None)

    @functools.cached_property
    def shared(self) -> list[str]:
        """Environments in which all sides have runs."""
        pairs = {(cell.label, cell.env) for cell in self.cells}
        return [env for env in self.environments if all((side, env) in pairs for side in self.sides)]

    def ends(self, env: str, measure: str = "returns") -> tuple[float, float]:
        """The returns that count as 0 and as 1 when returns of an environment are normalised.

        0 is the mean of random actions, or else the worst seed; 1 is the best seed of all sides. `measure` is
        "returns" or "areas".
        """
        values = np.concatenate([getattr(cell, measure) for cell in self.cells if cell.env == env])
        values = values[np.isfinite(values)]
        if not values.size:
            return 0.0, 1.0
        low = float(np.mean(self.random[env])) if env in self.random else float(values.min())
        return low, float(values.max())

    def improvement(self, x: str, y: str) -> tuple[float, tuple[float, float]] | None:
        """P(`x` is better than `y`) and its 95% interval over common environments; None if there are none."""
        values = [(self.values(x, env), self.values(y, env)) for env in self.environments]
        pairs = [(a, b) for a, b in values if a is not None and b is not None]
        return probability_of_improvement(pairs) if pairs else None

    def is_random(self, side: str, env: str) -> bool:
        """Whether the interval of a side's IQM begins below the upper end of random actions' interval."""
        estimate = self.estimate(side, env)
        if estimate is None or env not in self.random:
            return False
        low = estimate.value if estimate.interval is None else estimate.interval[0]
        _, high = self.random_estimate(env).interval or (0, math.inf)
        return low <= high

    def random_estimate(self, env: str) -> Estimate:
        """Mean return of random actions, and its 95% interval over episodes."""
        returns = self.random[env]
        return Estimate(float(returns.mean()), stratified_interval([returns], np.mean))

    # Cached, because they compute bootstrap intervals.
    tables = functools.cached_property(comparison_text.tables)
    sentences = functools.cached_property(comparison_text.sentences)

    def markdown(self) -> str:
        """The comparison in Markdown."""
        return comparison_text.markdown(self)

    def latex(self) -> str:
        """The tables in LaTeX, with `booktabs`."""
        return comparison_text.latex(self)

    def content(self) -> dict[str, Any]:
        """The content of `comparison.json`; values of failed seeds become null."""
        return {
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
            "random": dict(self.random),
            "notes": list(self.notes),
            "improvement": {
                f"{x} over {y}": self.improvement(x, y) for x, y in itertools.combinations(self.sides, 2)
            },
        }

    @checked
    def write(self, folder: str | Path) -> list[Path]:
        """Writes `FILES` into a folder, creating it; replaces files of an earlier comparison.

        Raises:
          FdgError: a file cannot be written, or the folder is a run directory.
        """
        check_results(folder := Path(folder), FILES, " for the comparison")
        texts = {
            "comparison.md": self.markdown(),
            "comparison.tex": self.latex(),
            "comparison.json": json_line(self.content(), indent=1).decode(),
        }
        for name, text in texts.items():
            with writing(folder / name) as file:
                file.write(text.encode())
        for name, figure in self.pictures().items():
            with writing(folder / name) as file:
                figure.savefig(file, format="png", dpi=150)
        return [folder / name for name in FILES]

    def pictures(self) -> dict[str, Any]:
        """Figures by file name: learning curves and final returns, with a panel per environment."""
        plot, _ = curves.plot_runs(self.runs, statistic="iqm", labels=self.labels)
        return {"curves.png": plot, "intervals.png": comparison_text.draw_intervals(self)}

    def __str__(self) -> str:
        return self.markdown()


@checked
def compare(
    runs: Sequence[str | Path],
    *,
    labels: Sequence[str] = (),
    random: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compares algorithms over environments: tables with intervals, and notes about unequal settings.

    Runs that differ only in their seeds form one side in their environment. The name of a side is its
    algorithm and the settings that differ between runs of this algorithm in an environment.

    Args:
      runs: run directories, or folders of them.
      labels: names of sides, one per run directory; empty: names list the settings that differ.
      random: returns of random actions by environment (`fdg.training.evaluation.random_returns`): sides that
        are not better than random are marked, and the mean of `random` counts as 0 in normalised scores.

    Raises:
      FdgError: there is no run, a run is given twice, or it has no episode returns.

    Example::

        comparison = fdg.compare(["runs/ppo", "runs/a2c"])
        print(comparison)
        comparison.write("comparison")
    """
    folders = curves.find_unique_runs(runs)
    sides = curves.read_curves(folders, curves.RETURN, "env_steps", labels, by_label=True)
    cells = [_make_cell(side) for side in sides]
    failures = [
        f"{cell.label} on {cell.env}: {len(cell.failed)} of {len(cell.seeds)} seeds failed"
        f" ({', '.join(map(str, cell.failed))}); a failed seed counts as worse than all others"
        for cell in cells
        if cell.failed
    ]
    random_returns = {env: np.asarray(values, float) for env, values in (random or {}).items()}
    return Comparison(cells, [*_list_unequal(sides), *failures], random_returns, folders, tuple(labels))


def _make_cell(side: Curves) -> Cell:
    returns, areas, failed = [], [], []
    agents = zip(side.seeds, side.x, side.y, side.final, side.failed, strict=True)
    # In the order of seeds, not of runs, because bootstrap intervals depend on it.
    for seed, x, y, final, has_failed in sorted(agents, key=lambda agent: agent[0]):
        has_failed = has_failed or not math.isfinite(final)
        returns.append(-math.inf if has_failed else final)
        areas.append(-math.inf if has_failed else _area_by_length(x, y))
        failed += [seed] if has_failed else []
    return Cell(side.label, side.env, np.array(returns), np.array(areas), sorted(side.seeds), failed)


def _area_by_length(x: np.ndarray, y: np.ndarray) -> float:
    """The area under a curve divided by its length (trapezoidal rule); NaN for an empty curve."""
    if not len(y):
        return math.nan
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 and x[-1] > x[0] else float(y.mean())
