"""Metrics on their way from the devices to the run directory, the display, loggers and callbacks."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fdg.arguments import quoted
from fdg.errors import FdgError, FdgWarning, RunError, raised
from fdg.processes import distributed
from fdg.running.metrics import PendingMetrics
from fdg.training.curves import RETURN, shown_metric
from fdg.training.finite import Finite, failed_agents, is_vital
from fdg.training.hints import ConstantReturns, LargeUpdates
from fdg.training.job import Job
from fdg.training.loggers import Logger
from fdg.training.losses import LostEpisodes
from fdg.training.progress import Progress, stream_line
from fdg.training.run_directory import RunDirectory
from fdg.training.samples import sample_lines


@dataclasses.dataclass(frozen=True)
class Report:
    """What callbacks are told: the iterations that were recorded since they were last called.

    Attributes:
      iteration: the last of them.
      num_iterations: of the whole run.
      env_steps: of one agent, until then.
      wall_s: seconds of training, until then.
      rows: what `metrics.jsonl` got, one for each iteration.
      evaluation: what the evaluation said that was made after the last of them, such as
        `{"eval_return": 498.2, "eval_return_sampled": 431.0, ...}`; empty if there was none.
    """

    iteration: int
    num_iterations: int
    env_steps: int
    wall_s: float
    rows: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any]


Callback = Callable[[Report], Any]  # one that returns true ends the run


class Recorder:
    """Records the metrics of each call of `start` one call late, so that no device waits for it.

    Attributes:
      wall_s: seconds spent in training until the last call that was recorded.
      wants_to_stop: whether a callback has said so.

    Args:
      eta: the most updates by which a token of a stream may be older than the newest parameters, a column of
        the metrics; None without a stream.
    """

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        progress: Progress,
        iteration: int,
        wall_s: float,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Callback] = (),
        finite: Finite | None = None,
        lost: LostEpisodes | None = None,
        samples: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        busy: Callable[[], Mapping[str, float]] = dict,
        last_row: Mapping[str, Any] | None = None,
        eta: int | None = None,
    ):
        self.wall_s, self.wants_to_stop = wall_s, False
        self._job, self._run, self._progress, self._iteration = job, run, progress, iteration
        self._loggers, self._callbacks = loggers, callbacks
        self._finite, self._lost, self._last_row = finite, lost, last_row
        self._per_agent = getattr(job.algorithm, "recorded_per_agent", ())
        self._samples = samples
        self._eta = {} if eta is None else {"eta": eta}
        self._busy, self._busy_s = busy, dict(busy())
        self._constant_returns = ConstantReturns(
            job.num_iterations,
            iteration,
            getattr(job.algorithm, "advice_without_rewards", None),
            getattr(job.algorithm, "iterations_without_rewards", None),
        )
        self._large_updates = LargeUpdates(job.described["hyperparameters"].get("learning_rate"))
        self._clock = time.perf_counter()
        self._latest: tuple[PendingMetrics, dict[str, Any]] | None = None

    @property
    def failed(self) -> list[int]:
        """Positions of the agents whose losses are not finite in the last row that was recorded."""
        return failed_agents(self._last_row, self._job.config, self._job.agents)

    def add(self, metrics: PendingMetrics) -> None:
        """Takes the metrics of a call just made, and records those of the one before."""
        self.flush()
        self._latest = metrics, {}

    def annotate(self, evaluation: Mapping[str, Any]) -> None:
        """Adds what an evaluation said to the last iteration that was added."""
        if self._latest is not None:
            self._latest[1].update(evaluation)

    def flush(self) -> None:
        """Waits for the metrics that were added, and records them."""
        if self._latest is None:
            return
        (pending, evaluation), self._latest = self._latest, None
        metrics = distributed.fetch(pending.result())
        lost = self._lost.row() if self._lost is not None else {}
        if metrics is None:
            return
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        iterations = pending.iterations
        rows: list[dict[str, Any]] = []
        for i in range(iterations):
            iteration = self._iteration + i + 1
            rows.append(
                {
                    "iteration": iteration,
                    "env_steps": iteration * self._job.steps_per_iteration,
                    "wall_s": round(self.wall_s + seconds * (i + 1) / iterations, 4),
                    **_row({name: values[i] for name, values in metrics.items()}, self._per_agent),
                    **lost,
                    **self._eta,
                    **_rate(metrics, i, seconds / iterations),
                }
            )
        rows[-1].update(evaluation)
        before = self._iteration
        self._iteration += iterations
        self.wall_s += seconds
        self._run.append_metrics(rows)
        self._last_row = rows[-1]
        if self._finite is not None:
            self._finite.look(before, metrics)
        returns = [
            row["episode_return"] for row in rows if math.isfinite(row.get("episode_return", math.nan))
        ]
        stream = stream_line(rows, self._shares(seconds))
        self._progress.update(self._iteration, float(np.mean(returns)) if returns else None, stream)
        if before == 0 and (shown_instead := shown_metric(rows)) != RETURN:
            shows = f"learning_curve.png shows '{shown_instead}'" if shown_instead else "curves are empty"
            self._progress.say(f"the algorithm's metrics have no '{RETURN}': {shows}")
        everyone = np.ravel(metrics.get("episode_return", ()))
        unchanged = self._constant_returns.look(self._iteration, rows[-1]["env_steps"], everyone.tolist())
        for line in filter(None, (unchanged, self._large_updates.look(rows))):
            if shown := sample_lines(self._samples()):  # what was said tells why, be it shown or not
                warnings.warn("\n".join([line.removeprefix("hint: "), *shown]), FdgWarning, stacklevel=2)
            else:
                self._progress.say(line)
        self._tell(rows, evaluation)

    def _shares(self, seconds: float) -> dict[str, float]:
        """How much of the time since the last call each group was busy."""
        before, self._busy_s = self._busy_s, dict(self._busy())
        gone = {group: now - before.get(group, 0.0) for group, now in self._busy_s.items()}
        return {group: min(max(busy / max(seconds, 1e-9), 0.0), 1.0) for group, busy in gone.items()}

    def _tell(self, rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> None:
        if self._loggers:
            merged = _merged(rows)
            for logger in self._loggers:
                logger.log(rows[-1]["env_steps"], {**merged, **_scalars(evaluation)})
        report = Report(
            self._iteration,
            self._job.num_iterations,
            rows[-1]["env_steps"],
            self.wall_s,
            rows,
            evaluation,
        )
        for callback in self._callbacks:
            try:
                self.wants_to_stop |= bool(callback(report))
            except FdgError:
                raise
            except Exception as error:  # whatever the code of a user's own raises
                raise RunError(
                    f"callback {quoted(callback)} raised {raised(error)} at iteration {self._iteration}:"
                    " mend it, and continue from the last checkpoint with resume=True"
                ) from error


def _row(metrics: Mapping[str, np.ndarray], per_agent: Sequence[str]) -> dict[str, Any]:
    """Metrics of one iteration, scalars or `[agents]`: means over the agents, and some one by one."""
    row: dict[str, Any] = {name: _mean(values) for name, values in metrics.items()}
    for name in ("episode_return", *per_agent):
        if np.ndim(metrics.get(name, 0.0)):
            row[f"{name}_per_seed"] = metrics[name]
    for name, values in metrics.items():  # names the agents that have failed, while others go on
        if np.ndim(values) and is_vital(name) and 0 < np.isfinite(values).sum() < values.size:
            row[f"{name}_per_seed"] = values
    return row


def _rate(metrics: Mapping[str, np.ndarray], i: int, seconds: float) -> dict[str, float]:
    """Tokens a second of an iteration, all agents together, where an algorithm counts its tokens."""
    if "tokens" not in metrics or seconds <= 0:
        return {}
    return {"tokens_per_s": round(float(np.sum(metrics["tokens"][i])) / seconds, 1)}


def _mean(values: np.ndarray) -> Any:
    """A scalar as it is; of several agents the mean over those that have a number."""
    if np.ndim(values) == 0:
        return values
    if not np.issubdtype(values.dtype, np.floating):
        return values.mean()
    there = values[np.isfinite(values)]
    return there.mean(dtype=values.dtype) if there.size else math.nan


def _merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Rows as one: the mean of each metric over those in which it is a number."""
    merged = {}
    for name in rows[-1]:
        if name == "env_steps" or name.endswith("_per_seed") or name.startswith("eval_"):
            continue
        values = [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]
        if values:
            merged[name] = values[-1] if name in ("iteration", "wall_s") else math.fsum(values) / len(values)
    return merged


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
