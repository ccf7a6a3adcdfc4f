"""Periodic evaluation during training, the best checkpoint, and early stopping at a return."""

from collections.abc import Sequence
from typing import Any

import fdg
from fdg.processes import distributed
from fdg.training.checkpoint import Checkpoints
from fdg.training.evaluation import episodes_of, evaluate, summarized
from fdg.training.job import Job
from fdg.training.run_directory import RunDirectory, read_metrics
from fdg.training.statistics import format_numbers

# Episodes for each agent in each evaluation: a tenth of those after training. An algorithm with cheap
# evaluations may set `episodes_while_training` instead.
EPISODES = 16


class PeriodicEvaluation:
    """Evaluates a run's agents in separate environments and a separate program; saves the best state.

    Attributes:
      stopped: why training has to stop (an evaluation reached the job's `stop_at`); None if it need not.
    """

    def __init__(self, job: Job, engine: fdg.Engine, run: RunDirectory):
        self.stopped: str | None = None
        self._job, self._engine, self._run = job, engine, run
        self._best: tuple[float, int] | None = None
        if job.eval_every and job.resumes:
            rows = read_metrics(run.path / "metrics.jsonl")
            known = [
                (row["eval_return"], row["iteration"]) for row in rows if row.get("eval_return") is not None
            ]
            self._best = max(known, key=lambda pair: (pair[0], -pair[1]), default=None)
        self._checkpoints: Checkpoints | None = Checkpoints(run.best) if job.eval_every else None

    def evaluate(self, state: Any, iteration: int, failed: Sequence[int] = ()) -> dict[str, Any]:
        """Evaluates greedy and sampled actions; saves `state` if the greedy return is the best so far.

        A collective: all processes call it. Agents at positions `failed` count in no mean.

        Returns:
          The entries for `metrics.jsonl`; empty if the algorithm has no actor to evaluate.
        """
        job = self._job
        most = getattr(job.algorithm, "episodes_while_training", EPISODES)
        episodes = min(most, episodes_of(job.algorithm, job.eval_episodes or most))
        both = (True, False)
        evaluations = evaluate(job, self._engine, state, episodes, iteration, both, failed)
        said = summarized(evaluations)
        mine = evaluations[0].mean if evaluations and evaluations[0].greedy else None
        value = next((other for other in distributed.exchange(mine) if other is not None), None)
        if value is None or value != value:
            return said
        if self._best is None or value > self._best[0]:
            self._best = value, iteration
            assert self._checkpoints is not None
            self._checkpoints.save(iteration, state)
        if job.stop_at is not None and value >= job.stop_at and self.stopped is None:
            self.stopped = f"its evaluation return, {format_numbers(value)[0]}, has reached {job.stop_at:g}"
        return said

    def best_summary(self) -> dict[str, Any]:
        """The best evaluation, for `summary.json`; empty if there was none."""
        if self._best is None:
            return {}
        return {"best_eval_return": self._best[0], "best_iteration": self._best[1]}

    def close(self) -> None:
        """Waits until the best checkpoint is written."""
        if self._checkpoints is not None:
            self._checkpoints.close()
