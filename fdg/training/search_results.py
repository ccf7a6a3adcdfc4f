"""Results of a hyperparameter search: its trials, best first, as a table, JSON and a plot."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fdg.training.curves import figure_of, style
from fdg.training.run_directory import RunDirectory
from fdg.training.space import Space, written
from fdg.training.statistics import format_numbers, interval
from fdg.training.sweep_results import first_rows, shown_interval, shown_return


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
      run: its directory, below `trials/`.
      values: hyperparameters by name, choices as they are written.
      state: "done", "ended early" (it was behind) or "refused" (it could not be trained).
      value: mean return (of a sweep, that of its best point); NaN unless the trial is done.
      returns: the return of each agent.
      refused: the error, if its state is "refused".
    """

    run: str
    values: Mapping[str, Any]
    state: str
    value: float
    returns: tuple[float, ...] = ()
    refused: str | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the mean over agents; None of one, or of a trial that is not done."""
        if self.state != "done" or len(self.returns) < 2 or not np.isfinite(self.returns).all():
            return None
        return interval(np.array(self.returns))


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the highest return, of equals the first; None while none is done."""
    done = [trial for trial in trials if trial.state == "done" and math.isfinite(trial.value)]
    return max(done, key=lambda trial: trial.value, default=None)


def write_results(run: RunDirectory, space: Space, trials: Sequence[Trial], agents: int | None) -> list[str]:
    """Writes `search.json` and `search.png`; returns the table, and which trial was best, as lines.

    Args:
      run: the search's directory.
      space: what was searched.
      trials: in the order in which they were made.
      agents: of each trial; None for one.
    """
    best = best_trial(trials)
    content = {
        "search": {one.name: str(one).partition("=")[2] for one in space},
        "agents": agents or 1,
        "trials": [{**dataclasses.asdict(trial), "interval": trial.interval} for trial in trials],
        "best": None if best is None else {"run": best.run, "values": best.values, "return": best.value},
    }
    run.publish_json("search.json", content)
    if not trials:
        return []
    run.publish("search.png", lambda file: _draw(trials, file))
    lines = [table(trials, [one.name for one in space])]
    if best is None:
        return [*lines, "best: none, for no trial is done"]
    flags = " ".join(f"--{name.replace('_', '-')} {written(value)}" for name, value in best.values.items())
    return [
        *lines,
        f"best: return {format_numbers(best.value)[0]} in {run.path / 'trials' / best.run}",
        f"by flags: {flags}",
    ]


def table(trials: Sequence[Trial], names: Sequence[str]) -> str:
    """The trials, best first, as a table of at most twenty lines."""
    rows = []
    for trial in sorted(trials, key=lambda trial: -trial.value if math.isfinite(trial.value) else math.inf):
        shown = (f"{v:.4g}" if isinstance(v := trial.values[name], float) else written(v) for name in names)
        state = "" if trial.state == "done" else trial.state
        rows.append([trial.run, *shown, shown_return(trial.value), shown_interval(trial.interval), state])
    return first_rows(["trial", *names, "return", "95% interval", ""], rows)


def _draw(trials: Sequence[Trial], picture: Any) -> None:
    """Draws each trial's return, and the best so far."""
    figure, axes = figure_of()
    (_, points), (_, line) = style(0), style(1)
    values = np.array([trial.value for trial in trials], float)
    axes.scatter(range(len(values)), values, color=points, s=20, label="a trial")
    known = np.where(np.isfinite(values), values, -np.inf)
    best = np.maximum.accumulate(known)
    axes.plot(np.flatnonzero(np.isfinite(best)), best[np.isfinite(best)], color=line, label="best so far")
    lost = np.flatnonzero(~np.isfinite(values))
    if len(lost):  # at the lower edge, so that they are seen
        low = values[np.isfinite(values)].min() if len(lost) < len(values) else 0.0
        axes.scatter(lost, [low] * len(lost), color="#999999", marker="x", label="ended early, or refused")
    axes.set(title="search", xlabel="trial", ylabel="mean return")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(picture, format="png", dpi=150)
