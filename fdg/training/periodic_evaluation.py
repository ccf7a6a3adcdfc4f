"""Evaluates a run during and after its training."""

from collections.abc import Sequence
from typing import Any

import jax

import fdg
from fdg.processes import distributed
from fdg.training.checkpoint import Checkpoints
from fdg.training.evaluation import (
    Evaluation,
    can_evaluate,
    episode_count,
    evaluate,
    evaluation_keys,
    summary_entries,
)
from fdg.training.job import Job
from fdg.training.run_directory import RunDirectory, read_metrics
from fdg.training.statistics import format_numbers

# Episodes per agent in an evaluation during training; the attribute `episodes_while_training` of an algorithm
# with cheap evaluations replaces it.
EPISODES = 16


class Evaluator:
    """Evaluates a run's agents during and after training, in a separate program; saves the best state.

    `start` is the number of iterations before a resume: later best states are removed. All processes must
    construct one.

    Attributes:
      stopped: the reason to stop (an evaluation reached the job's `stop_at`), or None.
    """

    def __init__(self, job: Job, engine: fdg.Engine, run: RunDirectory, start: int = 0):
        self.stopped: str | None = None
        self._job, self._engine, self._run = job, engine, run
        self._checkpoints = Checkpoints(run.best)
        evaluations: list[tuple[float, int]] = []
        if job.resumes and distributed.is_first():
            self._checkpoints.remove_after(start)
            saved = self._checkpoints.iterations()  # a killed process may not have written the last one
            evaluations = [
                (row["eval_return"], row["iteration"])
                for row in (read_metrics(run.path / "metrics.jsonl") if job.eval_every else ())
                if row.get("eval_return") is not None and row["iteration"] in saved
            ]
        best = max(evaluations, key=lambda pair: (pair[0], -pair[1]), default=None)
        self._best: tuple[float, int] | None = distributed.exchange(best)[0]

    def while_training(self, state: Any, iteration: int, failed: Sequence[int]) -> dict[str, Any]:
        """Evaluates greedy and sampled actions; saves `state` if the greedy return is the best so far.

        A collective: all processes call it. Means exclude the agents at indices `failed`. Returns the entries
        for `metrics.jsonl`; empty if the algorithm cannot be evaluated.
        """
        job = self._job
        limit = getattr(job.algorithm, "episodes_while_training", EPISODES)
        episodes = min(limit, episode_count(job.algorithm, job.eval_episodes or limit))
        evaluations = self._evaluate(state, episodes, iteration, (True, False), failed)
        entries = summary_entries(evaluations)
        local_mean = evaluations[0].mean if evaluations and evaluations[0].greedy else None
        mean = next((x for x in distributed.exchange(local_mean) if x is not None), None)
        if mean is None or mean != mean:  # NaN if all agents have failed
            return entries
        if self._best is None or mean > self._best[0]:
            self._best = mean, iteration
            self._checkpoints.save(iteration, state)
        if job.stop_at is not None and mean >= job.stop_at and self.stopped is None:
            self.stopped = f"its evaluation return, {format_numbers(mean)[0]}, has reached {job.stop_at:g}"
        return entries

    def after_training(self, state: Any, failed: Sequence[int]) -> tuple[Evaluation | None, dict[str, Any]]:
        """Evaluates greedy actions, as `fdg.load(...).evaluate()` does. A collective: process 0 has results.

        Returns the evaluation (None if the algorithm cannot be evaluated) and the entries for `summary.json`.
        """
        episodes = episode_count(self._job.algorithm, self._job.eval_episodes)
        evaluations = self._evaluate(state, episodes, None, (True,), failed)
        best = dict(zip(("best_eval_return", "best_iteration"), self._best or (), strict=False))
        return next(iter(evaluations), None), {**summary_entries(evaluations), **best}

    def _evaluate(
        self,
        state: Any,
        episodes: int,
        iteration: int | None,
        modes: Sequence[bool],
        failed: Sequence[int],
    ) -> list[Evaluation]:
        """Evaluates once per mode (True: greedy actions) that the algorithm supports.

        Returns an empty list in processes other than 0.
        """
        job, engine = self._job, self._engine
        modes = [mode for mode in modes if can_evaluate(job.algorithm, mode)]
        if not episodes or not modes:
            return []
        state = engine.algorithm_state(state)
        keys = evaluation_keys(job.seed, job.agents, iteration, job.algorithm)
        if distributed.count() > 1:
            state = distributed.gather(state)
            if state is None:
                return []
        elif job.agents is None:
            # On one device: with a replicated state, every device would play the same episodes.
            state = jax.device_put(state, engine.devices[0])
        return [
            evaluate(job.algorithm, state, keys, episodes, mode, job.seed, job.agents, failed)
            for mode in modes
        ]

    def close(self) -> None:
        """Waits until the best checkpoint is written."""
        self._checkpoints.close()
