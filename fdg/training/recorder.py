"""Passes metrics to the run directory, the progress line, experiment trackers and callbacks."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from envs import host
from fdg.arguments import quoted
from fdg.errors import FdgError, FdgWarning, RunError, raised
from fdg.processes import distributed
from fdg.running.metrics import PendingMetrics
from fdg.training.curves import RETURN, metric_to_plot
from fdg.training.finite import FiniteCheck, failed_agents
from fdg.training.job import Job
from fdg.training.loggers import Logger
from fdg.training.progress import Progress, stream_line
from fdg.training.run_directory import RunDirectory
from fdg.training.samples import sample_lines
from fdg.training.statistics import format_numbers, is_vital

_RUN_PARTS = 10  # `ConstantReturns` checks after 1 / _RUN_PARTS of the run
_MIN_RETURNS = 3  # minimum number of mean returns for this check
_NUM_FIRST = 10  # first iterations, in which a good initial policy should change little
_MAX_KL = 1.0  # limit of `approx_kl` in nats; a clipped update has about 0.01
_LOSS_CHECKS = 3  # number of iterations with zero losses before the warning
_MIN_ENTROPY_FRACTION = 0.05  # fraction of the initial entropy
_EXPLORATION_FIX = "more exploration (--entropy-coefficient, --epsilon-end)"
_ADVICE = f"try another --algo or --preset, more --num-envs, or {_EXPLORATION_FIX}"


class ConstantReturns:
    """Detects that all episodes of the first tenth of a run have the same return.

    For example, a car never reaches the top of its hill: its return stays at the worst value, gradients are
    noise, and longer training with the same settings will not help. A resumed run does not repeat the hint.
    `after` is the number of iterations before the check, by default a tenth of the run.
    """

    def __init__(
        self, num_iterations: int, start: int = 0, advice: str | None = None, after: int | None = None
    ):
        self._check_iteration = math.ceil(num_iterations / _RUN_PARTS) if after is None else after
        self._is_done = start >= self._check_iteration
        self._advice = advice or _ADVICE
        self._count, self._values = 0, set[float]()

    def check(self, iteration: int, env_steps: int, returns: Iterable[float]) -> str | None:
        """The hint as a line to print, at most once; else None.

        `returns` are the mean episode returns of the iterations since the last call; NaN if no episode ended.
        """
        finite = [] if self._is_done else [value for value in returns if math.isfinite(value)]
        self._count, self._values = self._count + len(finite), self._values.union(finite)
        self._is_done = self._is_done or len(self._values) > 1
        if self._is_done or iteration < self._check_iteration or self._count < _MIN_RETURNS:
            return None
        self._is_done = True
        return (
            f"hint: after {env_steps:,} steps every episode has returned {format_numbers(*self._values)[0]},"
            f" so there is nothing to learn from yet: {self._advice}"
        )


class NoLoss:
    """Detects batches that teach nothing: losses are exactly 0 from the start, and there are no returns.

    A resumed run, which starts after iteration 0, is not checked.
    """

    def __init__(self, start: int = 0):
        self._remaining = 0 if start else _LOSS_CHECKS  # remaining iterations to check

    def check(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The warning, at most once, from the metrics of each iteration since the last call."""
        for row in rows if self._remaining else ():
            losses = [value for name, value in row.items() if is_vital(name) and np.ndim(value) == 0]
            if any(losses) or math.isfinite(row.get(RETURN, math.nan)):  # NaN counts as a loss
                self._remaining = 0
                return None
            self._remaining -= 1 if losses else 0
            if not self._remaining:
                return (
                    f"every loss of the first {_LOSS_CHECKS} iterations is exactly 0, so nothing in the"
                    " batches counts and nothing is learned: look for answers without tokens, pairs of equal"
                    " answers, rewards that are all None, and masks that leave nothing"
                )
        return None


class LargeUpdates:
    """Detects updates that are too large, in the first iterations.

    One update with an unsuitable step size or batch size can ruin a good checkpoint. Then `approx_kl` is far
    larger than in a clipped update, or the entropy collapses without a gain in return.
    """

    def __init__(self, learning_rate: Any = None):
        self._rate_text = "" if learning_rate is None else f" than {float(learning_rate):g}"
        self._is_done = False
        self._first_row: Mapping[str, Any] = {}

    def check(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The hint as a line to print, at most once; `rows` are the metrics since the last call."""
        for row in rows:
            if self._is_done or row["iteration"] > _NUM_FIRST:
                return None
            self._first_row = self._first_row or row
            problem = self._find_problem(row)
            if problem is not None:
                self._is_done = True
                return (
                    f"hint: in iteration {row['iteration']} {problem}: updates are too large: give a"
                    f" smaller --learning-rate{self._rate_text}, more responses or steps per update, or"
                    " another --preset"
                )
        return None

    def _find_problem(self, row: Mapping[str, Any]) -> str | None:
        kl, entropies = row.get("approx_kl", 0.0), [x.get("entropy", 0.0) for x in (self._first_row, row)]
        if kl > _MAX_KL:
            return f"approx_kl is {kl:.3g}, so the policy is far from the one that sampled"
        has_gained = row.get("episode_return", 0.0) > self._first_row.get("episode_return", 0.0)
        if 0 <= entropies[1] < _MIN_ENTROPY_FRACTION * entropies[0] and not has_gained:
            return (
                f"the entropy has fallen from {entropies[0]:.3g} to {entropies[1]:.3g} and nothing was gained"
            )
        return None


def _no_action_warning(rows: Sequence[Mapping[str, Any]], algorithm: Any) -> str | None:
    """A warning if an observation allows no action (metric `no_action_step` of `algos.rollout`), or None."""
    for row in rows:
        if math.isfinite(step := row.get("no_action_step", math.nan)):
            env = getattr(getattr(algorithm, "env", None), "name", "?")
            return (
                f"environment '{env}' allows no action in an observation of iteration {row['iteration']},"
                f" after step {step:.0f} of the rollout; such a mask is ignored: let it allow an action, or"
                " end the episode there"
            )
    return None


class LostEpisodes:
    """Counts the episodes lost to failed environment workers, over all sessions of a run.

    Only host environments with `restarts` lose episodes: an episode in a failed worker counts as truncated.
    """

    def __init__(self, env: Any, last_row: Mapping[str, Any] | None = None):
        # From the last row that an earlier session wrote to `metrics.jsonl`.
        self._earlier = int((last_row or {}).get("lost_episodes") or 0)
        self._is_counting = isinstance(env, host.HostEnvironment) and env.restarts > 0
        self._start = host.losses()
        self._failures = self._episodes = 0

    def row(self) -> dict[str, int]:
        """Counts, and returns the entry for a row of metrics. A collective: all processes call it."""
        if not self._is_counting:
            return {}
        losses = host.losses()
        local_counts = losses.failures - self._start.failures, losses.episodes - self._start.episodes
        self._failures, self._episodes = np.sum(distributed.exchange(local_counts), axis=0).tolist()
        return self.summary()

    def summary(self) -> dict[str, int]:
        """The entry for `summary.json`, with the count at the last `row`."""
        return {"lost_episodes": self._earlier + self._episodes} if self._is_counting else {}

    def line(self) -> str:
        """The message at the end of this session, by the counts at the last `row`; "" if none was lost."""
        if not self._failures:
            return ""
        episodes = f"{self._episodes:,} running episode{'s' if self._episodes != 1 else ''}"
        failures = f"{self._failures:,} failure{'s' if self._failures != 1 else ''}"
        return f"lost {episodes} to {failures} of the environment's workers: they count as truncated"


@dataclasses.dataclass(frozen=True)
class Report:
    """The argument of callbacks: the iterations that were recorded since the previous call.

    Attributes:
      iteration: the last of these iterations.
      num_iterations: iterations of the whole run.
      env_steps: environment steps so far; with several seeds or settings, of each.
      wall_s: seconds of training so far.
      rows: the rows added to `metrics.jsonl`, one per iteration.
      evaluation: the evaluation after the last iteration, such as
        `{"eval_return": 498.2, "eval_return_sampled": 431.0, ...}`; empty if there was none.
    """

    iteration: int
    num_iterations: int
    env_steps: int
    wall_s: float
    rows: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any]


Callback = Callable[[Report], Any]  # a true result ends the run


@dataclasses.dataclass
class Recorder:
    """Records the metrics of each call of `engine.start` after the next call, so that devices never wait."""

    job: Job
    engine: fdg.Engine
    finite: FiniteCheck
    run: RunDirectory
    progress: Progress
    loggers: Sequence[Logger]
    callbacks: Sequence[Callback]
    iteration: int  # completed iterations at the last recorded call
    last_row: Mapping[str, Any] | None  # the last row of `metrics.jsonl`
    samples: Sequence[Mapping[str, Any]]  # the rows of the latest sample table
    stopped: str | None = None  # why the run has to end early (a callback, `stop_after`), or None

    def __post_init__(self) -> None:
        algorithm = self.job.algorithm
        self.wall_s: float = self.last_row["wall_s"] if self.last_row else 0.0  # until the last recorded call
        self.iteration_s = 0.0  # seconds per iteration in the last recorded call
        self.lost_episodes = LostEpisodes(getattr(algorithm, "env", None), self.last_row)
        self._busy_s = self.engine.busy_seconds(waits=False)
        # `eta` of each row: the maximum age in iterations of a trained token; absent if the maximum is 0.
        stream, delayed = getattr(algorithm, "stream_settings", None), self.engine.plan.delayed
        staleness = 0 if delayed is None else delayed.staleness
        self._eta = {}
        if stream is not None and (stream.ahead or staleness):
            self._eta["eta"] = stream.oldest() + staleness
        self._constant_returns = ConstantReturns(
            self.job.num_iterations,
            self.iteration,
            getattr(algorithm, "advice_without_rewards", None),
            getattr(algorithm, "iterations_without_rewards", None),
        )
        self._large_updates = LargeUpdates(self.job.described["hyperparameters"].get("learning_rate"))
        self._has_warned = False
        self._no_loss = NoLoss(self.iteration)
        self._last_flush = time.perf_counter()
        self._ended_at: float | None = None  # when the pending call was first seen to have ended
        self._pending: tuple[PendingMetrics, dict[str, Any]] | None = None

    @property
    def failed(self) -> list[int]:
        """Indices of the agents whose losses are not finite in the last recorded row."""
        return failed_agents(self.last_row, self.job.config, self.job.agents)

    def add(self, metrics: PendingMetrics) -> None:
        """Records the metrics of the previous call, and keeps `metrics` for the next `add` or `flush`."""
        self.flush()
        self._pending = metrics, {}

    def note_time_if_ended(self) -> None:
        """Notes the time if the last call has ended; called before each `engine.start`, which may block."""
        if self._pending is not None and self._ended_at is None and self._pending[0].is_ready():
            self._ended_at = time.perf_counter()

    def annotate(self, evaluation: Mapping[str, Any]) -> None:
        """Adds an evaluation to the row of the last iteration."""
        if self._pending is not None:
            self._pending[1].update(evaluation)

    def flush(self) -> None:
        """Waits for the metrics of the last call and records them."""
        if self._pending is None:
            return
        (pending, evaluation), self._pending = self._pending, None
        metrics = distributed.fetch(pending.result())
        lost_entry = self.lost_episodes.row()
        if metrics is None:
            return
        # kind V: bfloat16 and other dtypes that NumPy does not treat as numbers
        metrics = {name: x.astype(np.float32) if x.dtype.kind == "V" else x for name, x in metrics.items()}
        now, self._ended_at = self._ended_at or time.perf_counter(), None
        seconds, self._last_flush = now - self._last_flush, now
        rows = self._make_rows(metrics, pending.iterations, seconds, lost_entry)
        rows[-1].update(evaluation)
        start = self.iteration
        self.iteration += pending.iterations
        self.wall_s += seconds
        self.iteration_s = seconds / pending.iterations
        self.run.append_metrics(rows)
        self.last_row = rows[-1]
        self.finite.check(start, metrics)
        self._show(rows, seconds, is_first=start == 0)
        self._warn(rows, np.ravel(metrics.get("episode_return", ())).tolist())
        self._notify(rows, evaluation)
        if self.job.stop_after is not None and self.wall_s >= self.job.stop_after:
            self.stopped = self.stopped or f"it has trained for {self.wall_s:.0f} s (--stop-after)"

    def _make_rows(
        self, metrics: Mapping[str, Any], iterations: int, seconds: float, lost_entry: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The rows of the last call, which took `seconds`; metrics are `[iterations, ...]`."""
        per_agent = getattr(self.job.algorithm, "recorded_per_agent", ())
        rows: list[dict[str, Any]] = [
            {
                "iteration": (iteration := self.iteration + i + 1),
                "env_steps": iteration * self.job.steps_per_iteration,
                "wall_s": round(self.wall_s + seconds * (i + 1) / iterations, 4),
                **_metrics_row({name: values[i] for name, values in metrics.items()}, per_agent),
                **lost_entry,
                **self._eta,
            }
            for i in range(iterations)
        ]
        if "tokens" in metrics and seconds > 0:  # of all agents
            for row, tokens in zip(rows, metrics["tokens"], strict=True):
                row["tokens_per_s"] = round(float(np.sum(tokens)) / (seconds / iterations), 1)
        return rows

    def _show(self, rows: Sequence[Mapping[str, Any]], seconds: float, is_first: bool) -> None:
        """Displays progress, with the mean return of the rows of the last call."""
        returns = [x for row in rows if math.isfinite(x := row.get("episode_return", math.nan))]
        stream = stream_line(rows, self._busy_fractions(seconds))
        self.progress.update(self.iteration, float(np.mean(returns)) if returns else None, stream)
        if is_first and (metric := metric_to_plot(rows)) != RETURN:
            note = f"learning_curve.png shows '{metric}'" if metric else "curves are empty"
            self.progress.say(f"the algorithm's metrics have no '{RETURN}': {note}")

    def _warn(self, rows: Sequence[Mapping[str, Any]], returns: list[float]) -> None:
        """Gives hints and warnings about the rows of the last call, whose episodes had these returns."""
        hint = self._constant_returns.check(self.iteration, rows[-1]["env_steps"], returns)
        texts: list[str] = []
        for line in filter(None, (hint, self._large_updates.check(rows))):
            if samples := sample_lines(self.samples):  # the sampled texts show the cause
                texts.append("\n".join([line.removeprefix("hint: "), *samples]))
            else:
                self.progress.say(line)
        if not self._has_warned and (warning := _no_action_warning(rows, self.job.algorithm)):
            self._has_warned = True
            texts.append(warning)
        if warning := self._no_loss.check(rows):
            texts.append(warning)
        for text in texts:
            warnings.warn(text, FdgWarning, stacklevel=3)

    def _busy_fractions(self, seconds: float) -> dict[str, float]:
        """The fraction of the last `seconds` in which each group was busy."""
        earlier, self._busy_s = self._busy_s, self.engine.busy_seconds(waits=False)
        busy_seconds = {group: now - earlier.get(group, 0.0) for group, now in self._busy_s.items()}
        return {group: min(max(busy / max(seconds, 1e-9), 0.0), 1.0) for group, busy in busy_seconds.items()}

    def _notify(self, rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> None:
        """Passes rows to the experiment trackers and the callbacks."""
        steps, total = rows[-1]["env_steps"], self.job.num_iterations
        for logger in self.loggers:
            logger.log(steps, _mean_rows(rows))
        report = Report(self.iteration, total, steps, self.wall_s, rows, evaluation)
        for callback in self.callbacks:
            try:
                if callback(report):
                    self.stopped = "a callback ended it"
            except FdgError:
                raise
            except Exception as error:  # user code
                raise RunError(
                    f"callback {quoted(callback)} raised {raised(error)} at iteration {self.iteration}:"
                    " fix it, and continue from the last checkpoint with resume=True"
                ) from error


_NON_METRICS = (  # columns of metrics.jsonl that are not metrics of the algorithm
    *("iteration", "env_steps", "wall_s", "eval_return", "eval_return_sampled"),
    *("eval_returns", "eval_returns_sampled", "eval_episodes"),
)


def check_metrics(metrics: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `FdgError` if a metric has the name of another column, is a random key, or is complex."""
    for name, metric in metrics.items():
        if name in _NON_METRICS:
            raise FdgError(
                f"metric '{name}': metrics.jsonl has its own column of this name: rename the metric"
            )
        if name.endswith("_per_seed"):
            raise FdgError(
                f"metric '{name}': names that end in _per_seed are lists by agent in metrics.jsonl: rename it"
            )
        if not any(jnp.issubdtype(metric.dtype, kind) for kind in (jnp.integer, jnp.floating, jnp.bool_)):
            raise FdgError(
                f"metric '{name}' is {metric.dtype}: metrics.jsonl holds real numbers only: leave it out"
            )


def _metrics_row(metrics: Mapping[str, np.ndarray], per_agent: Sequence[str]) -> dict[str, Any]:
    """A row from the metrics of one iteration (scalars or `[agents]`): means over agents, some per agent."""
    row: dict[str, Any] = {name: _finite_mean(values) for name, values in metrics.items()}
    for name in ("episode_return", *per_agent):
        if np.ndim(metrics.get(name, 0.0)):
            row[f"{name}_per_seed"] = metrics[name]
    for name, values in metrics.items():  # shows which agents have failed
        if np.ndim(values) and is_vital(name) and 0 < np.isfinite(values).sum() < values.size:
            row[f"{name}_per_seed"] = values
    return row


def _finite_mean(values: np.ndarray) -> Any:
    """A scalar unchanged; for values `[agents]` the mean of the finite values, NaN if there are none."""
    if np.ndim(values) == 0:
        return values
    if not np.issubdtype(values.dtype, np.floating):
        return values.mean()
    finite = values[np.isfinite(values)]
    return finite.mean(dtype=values.dtype) if finite.size else math.nan


def _mean_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each metric over the rows in which it is finite."""
    means = {}
    for name, last in rows[-1].items():
        if name == "env_steps" or np.ndim(last):  # values by agent
            continue
        values = [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]
        if values:
            means[name] = values[-1] if name in ("iteration", "wall_s") else math.fsum(values) / len(values)
    return means
