"""`fdg.compare`: compares algorithms over environments, after Agarwal et al. 2021 (arXiv 2108.13264).

Final returns and areas under the curve, their interquartile means (IQM) with 95% stratified bootstrap
intervals, probabilities of improvement, and the settings that were unequal between sides.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdg import files
from fdg.arguments import checked
from fdg.errors import FdgError, listed, unknown_name
from fdg.kinds import dataclass_fields, to_json
from fdg.training import comparison_text, curves
from fdg.training.comparison_text import TOGETHER
from fdg.training.curves import Curves
from fdg.training.finite import is_vital
from fdg.training.run_directory import json_line, read_config, read_metrics, read_summary
from fdg.training.statistics import (
    interquartile_mean,
    probability_of_improvement,
    stratified_interval,
    with_interval,
)
from fdg.training.writable import check_results, writing

_MOST = 6  # sides or environments listed in a sentence


def unequal(found: Sequence[Curves]) -> list[str]:
    """Sentences about differences in budget, seeds, presets, settings, measures or versions between sides."""
    facts = [(one, _facts(one)) for one in found]
    said: dict[str, list[str]] = {}
    for env in dict.fromkeys(one.env for one in found):
        here = {one.label: known for one, known in facts if one.env == env}
        every = [known["settings"].items() for known in here.values()]
        for known in here.values():  # a setting of one side is said if another has another value, or none
            known["by hand"] = _listed(
                {
                    name: value
                    for name, value in known["by hand"].items()
                    if not all((name, value) in settings for settings in every)
                }
            )
        for name, sentence in _SENTENCES.items():
            values = {side: known[name] for side, known in here.items()}
            differ = len({str(value) for value in values.values()}) > 1
            if differ or (name in _ALWAYS and any(values.values())):
                said.setdefault(sentence(values), []).append(env)
    return [f"{text} ({_few(envs, 'and')})" for text, envs in said.items()]


def _facts(one: Curves) -> dict[str, Any]:
    """Properties that should be equal between sides, by name."""
    runs = list(dict.fromkeys(one.runs))
    configs = [read_config(path, prefix="") for path in runs]
    summaries = [read_summary(path) for path in runs]
    steps = {each["hyperparameters"].get("total_steps") or each.get("total_steps") or 0 for each in configs}
    config = configs[0]
    versions = {
        f"{name} {version}"
        for each in configs
        for name, version in (each.get("versions") or {}).items()
        if name in ("fdg", "jax")
    }
    ended = [summary is not None and not summary.get("stopped") for summary in summaries]
    return {
        "steps": " or ".join(f"{count:,}" for count in sorted(steps)),
        "seeds": len(one.seeds),
        "preset": "a preset" if config.get("preset_name") else "none",
        "settings": config["hyperparameters"],
        "by hand": _by_hand(config),
        "measure": _measure(one, summaries),
        "staleness": config.get("staleness") or 0,
        "lag": config.get("lag") or 0,
        "sweep": config.get("sweep"),
        "versions": ", ".join(sorted(versions)),
        "unfinished": "" if all(ended) else f"{ended.count(False)} of {len(ended)} runs{_why(runs, ended)}",
    }


def _measure(one: Curves, summaries: Iterable[Mapping[str, Any] | None]) -> str:
    if not one.evaluated:
        return "the last tenth of the training"
    episodes = {summary.get("eval_episodes") for summary in summaries if summary}
    return f"greedy evaluations of {listed(sorted(map(str, episodes)))} episodes"


def _why(runs: Sequence[Any], ended: Sequence[bool]) -> str:
    """Whether a run that has not ended was stopped by a loss that is not finite."""
    for run, whole in zip(runs, ended, strict=True):
        rows = [] if whole else list(read_metrics(run / "metrics.jsonl"))
        last = rows[-1] if rows else {}
        if any(value is None and is_vital(name) for name, value in last.items()):
            return ", ended by a loss that is not finite"
    return ""


def _by_hand(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that neither the algorithm's defaults nor a preset explain; empty for a user's class."""
    import algos

    try:
        fields = dataclass_fields(algos.get(str(config.get("algo"))))
    except (FdgError, ImportError):
        return {}
    explained = {**(config.get("preset") or {}), **(config.get("follows") or {})}
    defaults = {
        field.name: to_json(field.default) for field in fields if field.name not in ("env", "total_steps")
    }
    return {
        name: value
        for name, value in config["hyperparameters"].items()
        if name in defaults and value != defaults[name] and value != explained.get(name, defaults[name])
    }


def _listed(settings: Mapping[str, Any]) -> str:
    given = [f"{name}={_shown(value)}" for name, value in settings.items()]
    return f"{', '.join(given[:_MOST])}{f' and {len(given) - _MOST} more' if given[_MOST:] else ''}"


def _shown(value: Any) -> str:
    return re.sub(r"\s+", " ", "/".join(map(str, value)) if isinstance(value, list) else str(value))[:40]


def _few(words: Sequence[Any], last: str) -> str:
    more = f" ({len(words) - _MOST} more)" if len(words) > _MOST else ""
    return listed(words[:_MOST], last) + more


def _each(values: Mapping[str, Any]) -> str:
    """Sides grouped by value: `ppo 5; a2c and dqn 3`."""
    sides: dict[str, list[str]] = {}
    for side, value in values.items():
        sides.setdefault(str(value), []).append(side)
    return "; ".join(f"{_few(names, 'and')} {value}" for value, names in sides.items())


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "steps": lambda values: f"budgets differ, in steps of each seed: {_each(values)}",
    "seeds": lambda values: f"numbers of seeds differ: {_each(values)}",
    "preset": lambda values: f"tuned settings on one side: {_each(values)}",
    "by hand": lambda values: (
        "settings by hand: " + "; ".join(f"{side} has {text}" for side, text in values.items() if text)
    ),
    "measure": lambda values: f"final returns are measured differently: {_each(values)}",
    "staleness": lambda values: f"staleness differs: {_each(values)}",
    "lag": lambda values: f"lag differs, in micro-batches: {_each(values)}",
    "sweep": lambda values: (
        "points of a sweep, of which the best is chosen by its own result: "
        + _few([side for side, text in values.items() if text], "and")
    ),
    "versions": lambda values: f"versions differ: {_each(values)}",
    "unfinished": lambda values: (
        "runs have not ended: " + "; ".join(f"{side} {text}" for side, text in values.items() if text)
    ),
}
_ALWAYS = ("sweep", "unfinished")  # reported even if all sides are equal


FILES = ("comparison.md", "comparison.tex", "comparison.json", "curves.png", "intervals.png")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One side in one environment."""

    label: str  # the side
    env: str  # the environment
    # `[seeds]`, final returns: of the evaluation, else of the last tenth of the training; -inf for a failed
    # seed, which ranks it below all others
    returns: np.ndarray
    # `[seeds]`, the area under the training curve divided by its length: the mean return in training
    areas: np.ndarray
    seeds: Sequence[int]  # the seeds
    failed: Sequence[int]  # the failed seeds: losses or evaluations are not finite, or no episode ended


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
        return with_interval(self.value, self.interval)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Sides (algorithms with their settings) in environments. Prints as Markdown.

    Attributes:
      cells: one for each side and environment with runs.
      notes: sentences about failed seeds and about what was unequal between sides.
      random: returns `[episodes]` of uniformly random actions by environment, if known.
      runs: the run directories, and `labels` of each; empty for the settings that differ.
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
        """`[seeds]` of a side in an environment; None without runs.

        Raises:
          UnknownNameError: no run is of this side, or of this environment.
        """
        for kind, name, known in (("side", side, self.sides), ("environment", env, self.environments)):
            if name not in known:
                raise unknown_name(f"{kind} of the comparison", name, known)
        found = [cell for cell in self.cells if (cell.label, cell.env) == (side, env)]
        return getattr(found[0], measure) if found else None

    def estimate(self, side: str, env: str, measure: str = "returns") -> Estimate | None:
        """The IQM of a side in an environment, or over the environments that all sides share (`TOGETHER`)."""
        if env == TOGETHER:
            if len(self.shared) < 2:
                return None
            groups = [self._normalised(side, one, measure) for one in self.shared]
        else:
            values = self.values(side, env, measure)
            if values is None:
                return None
            groups = [values]
        value = float(interquartile_mean(np.concatenate(groups)))
        several = max(map(len, groups)) > 1
        return Estimate(value, stratified_interval(groups, interquartile_mean) if several else None)

    @functools.cached_property
    def shared(self) -> list[str]:
        """Environments in which all sides have runs."""
        there = {(cell.label, cell.env) for cell in self.cells}
        return [env for env in self.environments if all((side, env) in there for side in self.sides)]

    def ends(self, env: str, measure: str = "returns") -> tuple[float, float]:
        """The returns normalised to 0 and 1: the random mean (else the worst seed), and the best seed."""
        known = np.concatenate([getattr(cell, measure) for cell in self.cells if cell.env == env])
        known = known[np.isfinite(known)]
        if not known.size:
            return 0.0, 1.0
        low = float(np.mean(self.random[env])) if env in self.random else float(known.min())
        return low, float(known.max())

    def _normalised(self, side: str, env: str, measure: str) -> np.ndarray:
        low, high = self.ends(env, measure)
        values = self.values(side, env, measure)
        assert values is not None
        return (values - low) / (high - low) if high > low else values - low

    def improvement(self, x: str, y: str) -> tuple[float, tuple[float, float]] | None:
        """The probability that `x` is better than `y` over their common environments; None without any."""
        both = [(self.values(x, env), self.values(y, env)) for env in self.environments]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        return probability_of_improvement(pairs) if pairs else None

    def is_random(self, side: str, env: str) -> bool:
        """Whether the interval of a side's IQM overlaps that of random actions."""
        found = self.estimate(side, env)
        if found is None or env not in self.random:
            return False
        low = found.value if found.interval is None else found.interval[0]
        _, high = self.random_estimate(env).interval or (0, math.inf)
        return low <= high

    def random_estimate(self, env: str) -> Estimate:
        """Mean return of random actions, and its 95% interval over episodes."""
        returns = self.random[env]
        return Estimate(float(returns.mean()), stratified_interval([returns], np.mean))

    @functools.cached_property
    def text(self) -> comparison_text.Text:
        """The tables and sentences of the comparison."""
        return comparison_text.text(self)

    def markdown(self) -> str:
        """The comparison in Markdown."""
        return comparison_text.markdown(self.text)

    def latex(self) -> str:
        """The tables in LaTeX, with `booktabs`."""
        return comparison_text.latex(self.text)

    def content(self) -> dict[str, Any]:
        """All figures for `comparison.json`; null for failed seeds."""
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
        """Writes `FILES` into a folder, which is created; earlier files are replaced.

        Raises:
          FdgError: they cannot be written, or the folder is a run directory.
        """
        folder = check_folder(folder)
        texts = {
            "comparison.md": self.markdown(),
            "comparison.tex": self.latex(),
            "comparison.json": json_line(self.content(), indent=1).decode(),
        }
        for name, text in texts.items():
            with writing(folder / name):
                files.write(folder / name, text.encode())
        for name, figure in self.pictures().items():
            with writing(folder / name), files.replacing(folder / name) as file:
                figure.savefig(file, format="png", dpi=150)
        return [folder / name for name in FILES]

    def pictures(self) -> dict[str, Any]:
        """Figures by file name: learning curves and final returns, with a panel for each environment."""
        drawn, _ = curves.compare(self.runs, statistic="iqm", labels=self.labels)
        return {"curves.png": drawn, "intervals.png": comparison_text.draw_intervals(self)}

    def __str__(self) -> str:
        return self.markdown()


@checked
def compare(
    runs: Sequence[str | Path],
    *,
    labels: Sequence[str] = (),
    random: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compares algorithms over environments: tables with intervals, and the settings that were unequal.

    Runs that differ only in their seeds form one side in their environment. A side is named by its algorithm
    and by the other settings that differ between runs of that algorithm in an environment.

    Args:
      runs: run directories, or folders of them.
      labels: names of sides, one for each run directory; empty for the settings that differ.
      random: returns of random actions by environment (`fdg.training.evaluation`): sides that are no better
        are marked, and scores are normalised by them.

    Raises:
      FdgError: there is no run, a run is given twice, or it has no episode returns.

    Example::

        found = fdg.compare(["runs/ppo", "runs/a2c"])
        print(found)
        found.write("comparison")
    """
    folders = curves.runs_once(runs)
    found = curves.read_curves(folders, curves.RETURN, "env_steps", labels)
    sides: dict[tuple[str, str], list[Curves]] = {}
    for one in found:
        sides.setdefault((one.label, one.env), []).append(one)
    cells = [_cell(label, env, group) for (label, env), group in sides.items()]
    failures = [
        f"{cell.label} on {cell.env}: {len(cell.failed)} of {len(cell.seeds)} seeds failed"
        f" ({', '.join(map(str, cell.failed))}); a failed seed counts as worse than all others"
        for cell in cells
        if cell.failed
    ]
    measured = {env: np.asarray(values, float) for env, values in (random or {}).items()}
    return Comparison(cells, [*unequal(found), *failures], measured, folders, tuple(labels))


def _cell(label: str, env: str, group: Iterable[Curves]) -> Cell:
    returns, areas, seeds, failed = [], [], [], []
    for one in group:
        for x, y, final, seed, lost in zip(one.x, one.y, one.final, one.seeds, one.failed, strict=True):
            bad = bool(lost) or not math.isfinite(final)
            returns.append(-math.inf if bad else final)
            areas.append(-math.inf if bad else _area(x, y))
            seeds.append(seed)
            failed += [seed] if bad else []
    return Cell(label, env, np.array(returns), np.array(areas), seeds, failed)


def _area(x: np.ndarray, y: np.ndarray) -> float:
    """The area under a curve divided by its length (trapezoidal rule); NaN for an empty curve."""
    if not len(y):
        return math.nan
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 and x[-1] > x[0] else float(y.mean())


def check_folder(folder: str | Path) -> Path:
    """Checks that a comparison can be written to a folder."""
    path = Path(folder)
    check_results(path, FILES, " for the comparison")
    return path
