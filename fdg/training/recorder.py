"""Metrics on their way from the devices to the run directory and the display."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fdg.processes import distributed
from fdg.running.metrics import PendingMetrics
from fdg.training.finite import Finite
from fdg.training.job import Job
from fdg.training.progress import Progress
from fdg.training.run_directory import RunDirectory


class Recorder:
    """Records the metrics of each call of `start` one call late, so that no device waits for it.

    Attributes:
      wall_s: seconds spent in training until the last call that was recorded.
    """

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        progress: Progress,
        iteration: int,
        wall_s: float,
        finite: Finite | None = None,
    ):
        self.wall_s = wall_s
        self._job, self._run, self._progress, self._iteration = job, run, progress, iteration
        self._finite = finite
        self._clock = time.perf_counter()
        self._latest: tuple[int, PendingMetrics] | None = None

    def add(self, iterations: int, metrics: PendingMetrics) -> None:
        """Takes the metrics of a call just made, and records those of the one before."""
        self.flush()
        self._latest = iterations, metrics

    def flush(self) -> None:
        """Waits for the metrics that were added, and records them."""
        if self._latest is None:
            return
        iterations, pending = self._latest
        metrics, self._latest = distributed.fetch(pending.result()), None
        if metrics is None:
            return
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        rows = []
        for i in range(iterations):
            iteration = self._iteration + i + 1
            rows.append(
                {
                    "iteration": iteration,
                    "env_steps": iteration * self._job.steps_per_iteration,
                    "wall_s": round(self.wall_s + seconds * (i + 1) / iterations, 4),
                    **_row({name: values[i] for name, values in metrics.items()}),
                }
            )
        before = self._iteration
        self._iteration += iterations
        self.wall_s += seconds
        self._run.append_metrics(rows)
        if self._finite is not None:
            self._finite.look(before, metrics)
        returns = [
            row["episode_return"] for row in rows if math.isfinite(row.get("episode_return", math.nan))
        ]
        self._progress.update(self._iteration, float(np.mean(returns)) if returns else None)


def _row(metrics: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics of one iteration, scalars or `[seeds]`: means over the seeds, and the returns one by one."""
    row: dict[str, Any] = {name: _mean(values) for name, values in metrics.items()}
    if np.ndim(metrics.get("episode_return", 0.0)):
        row["episode_return_per_seed"] = metrics["episode_return"]
    return row


def _mean(values: np.ndarray) -> Any:
    """A scalar as it is; of several agents the mean over those that have a number."""
    if np.ndim(values) == 0:
        return values
    if not np.issubdtype(values.dtype, np.floating):
        return values.mean()
    there = values[np.isfinite(values)]
    return there.mean(dtype=values.dtype) if there.size else math.nan
