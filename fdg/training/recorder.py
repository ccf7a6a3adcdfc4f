"""Records metrics: to the run directory, the progress line, experiment trackers and callbacks."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envs import host
from fdg.arguments import quoted
from fdg.errors import FdgError, FdgWarning, RunError, raised
from fdg.processes import distributed
from fdg.running.metrics import PendingMetrics
from fdg.training.curves import RETURN, shown_metric
from fdg.training.finite import Finite, failed_agents, is_vital
from fdg.training.job import Job
from fdg.training.loggers import Logger
from fdg.training.progress import Progress, stream_line
from fdg.training.run_directory import RunDirectory
from fdg.training.samples import sample_lines
from fdg.training.statistics import format_numbers

_PART = 10  # the check happens after 1 / _PART of the run
_MIN_RETURNS = 3  # mean returns of iterations that the check needs
_FIRST = 10  # iterations in which a good initial policy should change little
_LARGE_KL = 1.0  # nats of `approx_kl`; a clipped update has about 0.01
_NO_LOSS = 3  # iterations
_COLLAPSED = 0.05  # fraction of the initial entropy
_EXPLORE = "more exploration (--entropy-coefficient, --epsilon-end)"
_ADVICE = f"try another --algo or --preset, more --num-envs, or {_EXPLORE}"


class ConstantReturns:
    """Detects that all episodes of the first tenth of a run have the same return.

    An example is a car that never reaches the top of its hill. The return stays at its worst value, gradients
    are noise, and longer training with the same settings will not help. A resumed run does not repeat the
    hint; `after` are the iterations before the check, by default a tenth of the run.
    """

    def __init__(
        self, num_iterations: int, start: int = 0, advice: str | None = None, after: int | None = None
    ):
        self._after = math.ceil(num_iterations / _PART) if after is None else after
        self._done = start >= self._after
        self._advice = advice or _ADVICE
        self._count, self._values = 0, set[float]()

    def look(self, iteration: int, env_steps: int, returns: Iterable[float]) -> str | None:
        """The hint as a line to print, once; else None.

        `returns` are the mean episode returns of the iterations since the last call; NaN if no episode ended.
        """
        known = [] if self._done else [value for value in returns if math.isfinite(value)]
        self._count, self._values = self._count + len(known), self._values.union(known)
        self._done = self._done or len(self._values) > 1
        if self._done or iteration < self._after or self._count < _MIN_RETURNS:
            return None
        self._done = True
        return (
            f"hint: after {env_steps:,} steps every episode has returned {format_numbers(*self._values)[0]},"
            f" so there is nothing to learn from yet: {self._advice}"
        )


class NoLoss:
    """Detects batches without any learning: losses of exactly 0 from the start, and no returns.

    A resumed run, which starts after iteration 0, is not checked.
    """

    def __init__(self, start: int = 0):
        self._left = 0 if start else _NO_LOSS  # iterations

    def look(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The warning, once, from the metrics of each iteration since the last call."""
        for row in rows if self._left else ():
            losses = [value for name, value in row.items() if is_vital(name) and np.ndim(value) == 0]
            if any(losses) or math.isfinite(row.get(RETURN, math.nan)):  # NaN counts as a loss
                self._left = 0
                return None
            self._left -= 1 if losses else 0
            if not self._left:
                return (
                    f"every loss of the first {_NO_LOSS} iterations is exactly 0, so nothing in the batches"
                    " counts and nothing is learned: look for answers without tokens, pairs of two equal"
                    " answers, rewards that are all None, and masks that leave nothing"
                )
        return None


class LargeUpdates:
    """Detects updates that are too large, in the first iterations.

    One update with an unsuitable step size or batch size can ruin a good checkpoint. Then `approx_kl` is far
    above that of a clipped update, or the entropy collapses without a gain in return.
    """

    def __init__(self, learning_rate: Any = None):
        self._rate = "" if learning_rate is None else f" than {learning_rate:g}"
        self._done = False
        self._first: Mapping[str, Any] = {}

    def look(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The hint as a line to print, once, from the metrics of each iteration since the last call."""
        for row in rows:
            if self._done or row["iteration"] > _FIRST:
                return None
            self._first = self._first or row
            what = self._what(row)
            if what is not None:
                self._done = True
                return (
                    f"hint: in iteration {row['iteration']} {what}: updates are too large: give a smaller"
                    f" --learning-rate{self._rate}, more responses or steps to an update, or another --preset"
                )
        return None

    def _what(self, row: Mapping[str, Any]) -> str | None:
        kl, entropies = row.get("approx_kl", 0.0), [one.get("entropy", 0.0) for one in (self._first, row)]
        if kl > _LARGE_KL:
            return f"approx_kl is {kl:.3g}, so the policy is far from the one that sampled"
        gained = row.get("episode_return", 0.0) > self._first.get("episode_return", 0.0)
        if 0 <= entropies[1] < _COLLAPSED * entropies[0] and not gained:
            return (
                f"the entropy has fallen from {entropies[0]:.3g} to {entropies[1]:.3g} and nothing was gained"
            )
        return None


def _without_actions(rows: Sequence[Mapping[str, Any]], env: str) -> str | None:
    """The warning about an observation that allows no action (`no_action_step` of `algos.rollout`)."""
    for row in rows:
        if math.isfinite(step := row.get("no_action_step", math.nan)):
            return (
                f"environment '{env}' allows no action in an observation of iteration {row['iteration']},"
                f" after step {step:.0f} of the rollout; such a mask is ignored: let it allow an action, or"
                " end the episode there"
            )
    return None


class LostEpisodes:
    """Counts the episodes lost to failed environment workers, over all sessions of a run.

    Only host environments with `restarts` lose episodes: one that ran in a failed worker counts as truncated.
    """

    def __init__(self, env: Any, last: Mapping[str, Any] | None = None):
        # From the last row that an earlier session wrote to `metrics.jsonl`.
        self._before = int((last or {}).get("lost_episodes") or 0)
        self._can = isinstance(env, host.HostEnvironment) and env.restarts > 0
        self._start = host.losses()
        self._failures = self._episodes = 0

    def row(self) -> dict[str, int]:
        """The entry for a row of metrics. A collective: all processes call it."""
        if not self._can:
            return {}
        now = host.losses()
        mine = [now.failures - self._start.failures, now.episodes - self._start.episodes]
        self._failures, self._episodes = (
            sum(column) for column in zip(*distributed.exchange(mine), strict=True)
        )
        return {"lost_episodes": self._before + self._episodes}

    def summary(self) -> dict[str, int]:
        """The entry for `summary.json`, as of the last `row`."""
        return {"lost_episodes": self._before + self._episodes} if self._can else {}

    def line(self) -> str:
        """The message at the end of this session, as of the last `row`; "" if no episode was lost."""
        if not self._failures:
            return ""
        counts = f"{self._episodes:,} running episode{'s' if self._episodes != 1 else ''}"
        causes = f"{self._failures:,} failure{'s' if self._failures != 1 else ''}"
        return f"lost {counts} to {causes} of the environment's workers: they count as truncated"


@dataclasses.dataclass(frozen=True)
class Report:
    """The argument of callbacks: the iterations recorded since the previous call.

    Attributes:
      iteration: the last of these iterations.
      num_iterations: iterations of the whole run.
      env_steps: steps of one agent so far.
      wall_s: seconds of training so far.
      rows: the rows added to `metrics.jsonl`, one for each iteration.
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
    run: RunDirectory
    progress: Progress
    iteration: int  # of the last recorded call
    wall_s: float  # seconds of training up to the last recorded call
    loggers: Sequence[Logger]
    callbacks: Sequence[Callback]
    finite: Finite
    lost: LostEpisodes
    samples: Callable[[], Sequence[Mapping[str, Any]]]  # the latest sampled texts
    busy: Callable[[], Mapping[str, float]]  # seconds in which each group has run programs
    last_row: Mapping[str, Any] | None
    eta: int | None  # the most updates by which a token may be older than the parameters; None: no stream
    wants_to_stop: bool = False  # whether a callback asked to end the run

    def __post_init__(self) -> None:
        algorithm = self.job.algorithm
        self._busy_s = dict(self.busy())
        self._constant_returns = ConstantReturns(
            self.job.num_iterations,
            self.iteration,
            getattr(algorithm, "advice_without_rewards", None),
            getattr(algorithm, "iterations_without_rewards", None),
        )
        self._large_updates = LargeUpdates(self.job.described["hyperparameters"].get("learning_rate"))
        self._has_warned = False
        self._no_loss = NoLoss(self.iteration)
        self._clock = time.perf_counter()
        self._latest: tuple[PendingMetrics, dict[str, Any]] | None = None

    @property
    def failed(self) -> list[int]:
        """Positions of the agents whose losses are not finite in the last recorded row."""
        return failed_agents(self.last_row, self.job.config, self.job.agents)

    def add(self, metrics: PendingMetrics) -> None:
        """Records the metrics of the previous call, and keeps those of this one."""
        self.flush()
        self._latest = metrics, {}

    def annotate(self, evaluation: Mapping[str, Any]) -> None:
        """Adds an evaluation to the last iteration."""
        if self._latest is not None:
            self._latest[1].update(evaluation)

    def flush(self) -> None:
        """Waits for the metrics of the last call and records them."""
        if self._latest is None:
            return
        (pending, evaluation), self._latest = self._latest, None
        metrics = distributed.fetch(pending.result())
        lost = self.lost.row()
        if metrics is None:
            return
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        iterations, per_agent = pending.iterations, getattr(self.job.algorithm, "recorded_per_agent", ())
        eta = {} if self.eta is None else {"eta": self.eta}
        rows: list[dict[str, Any]] = []
        for i in range(iterations):
            iteration = self.iteration + i + 1
            rows.append(
                {
                    "iteration": iteration,
                    "env_steps": iteration * self.job.steps_per_iteration,
                    "wall_s": round(self.wall_s + seconds * (i + 1) / iterations, 4),
                    **_row({name: values[i] for name, values in metrics.items()}, per_agent),
                    **lost,
                    **eta,
                    **_rate(metrics, i, seconds / iterations),
                }
            )
        rows[-1].update(evaluation)
        before = self.iteration
        self.iteration += iterations
        self.wall_s += seconds
        self.run.append_metrics(rows)
        self.last_row = rows[-1]
        self.finite.look(before, metrics)
        returns = [
            row["episode_return"] for row in rows if math.isfinite(row.get("episode_return", math.nan))
        ]
        stream = stream_line(rows, self._shares(seconds))
        self.progress.update(self.iteration, float(np.mean(returns)) if returns else None, stream)
        if before == 0 and (shown_instead := shown_metric(rows)) != RETURN:
            shows = f"learning_curve.png shows '{shown_instead}'" if shown_instead else "curves are empty"
            self.progress.say(f"the algorithm's metrics have no '{RETURN}': {shows}")
        everyone = np.ravel(metrics.get("episode_return", ()))
        unchanged = self._constant_returns.look(self.iteration, rows[-1]["env_steps"], everyone.tolist())
        for line in filter(None, (unchanged, self._large_updates.look(rows))):
            if shown := sample_lines(self.samples()):  # the sampled texts show the cause
                warnings.warn("\n".join([line.removeprefix("hint: "), *shown]), FdgWarning, stacklevel=2)
            else:
                self.progress.say(line)
        env = getattr(getattr(self.job.algorithm, "env", None), "name", "?")
        if not self._has_warned and (said := _without_actions(rows, env)):
            self._has_warned = True
            warnings.warn(said, FdgWarning, stacklevel=2)
        if said := self._no_loss.look(rows):
            warnings.warn(said, FdgWarning, stacklevel=2)
        self._tell(rows, evaluation)

    def _shares(self, seconds: float) -> dict[str, float]:
        """The share of the last `seconds` in which each group was busy."""
        before, self._busy_s = self._busy_s, dict(self.busy())
        gone = {group: now - before.get(group, 0.0) for group, now in self._busy_s.items()}
        return {group: min(max(busy / max(seconds, 1e-9), 0.0), 1.0) for group, busy in gone.items()}

    def _tell(self, rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> None:
        if self.loggers:
            merged = _mean_rows(rows)
            numbers = {name: float(value) for name, value in evaluation.items() if np.ndim(value) == 0}
            for logger in self.loggers:
                logger.log(rows[-1]["env_steps"], {**merged, **numbers})
        steps, total = rows[-1]["env_steps"], self.job.num_iterations
        report = Report(self.iteration, total, steps, self.wall_s, rows, evaluation)
        for callback in self.callbacks:
            try:
                self.wants_to_stop |= bool(callback(report))
            except FdgError:
                raise
            except Exception as error:  # user code
                raise RunError(
                    f"callback {quoted(callback)} raised {raised(error)} at iteration {self.iteration}:"
                    " mend it, and continue from the last checkpoint with resume=True"
                ) from error


def _row(metrics: Mapping[str, np.ndarray], per_agent: Sequence[str]) -> dict[str, Any]:
    """The metrics of one iteration (scalars or `[agents]`): means over agents, and some for each agent."""
    row: dict[str, Any] = {name: _mean(values) for name, values in metrics.items()}
    for name in ("episode_return", *per_agent):
        if np.ndim(metrics.get(name, 0.0)):
            row[f"{name}_per_seed"] = metrics[name]
    for name, values in metrics.items():  # shows which agents have failed
        if np.ndim(values) and is_vital(name) and 0 < np.isfinite(values).sum() < values.size:
            row[f"{name}_per_seed"] = values
    return row


def _rate(metrics: Mapping[str, np.ndarray], i: int, seconds: float) -> dict[str, float]:
    """Tokens per second of all agents, if the algorithm has a metric `tokens`."""
    if "tokens" not in metrics or seconds <= 0:
        return {}
    return {"tokens_per_s": round(float(np.sum(metrics["tokens"][i])) / seconds, 1)}


def _mean(values: np.ndarray) -> Any:
    """A scalar unchanged; of several agents the mean of the finite values."""
    if np.ndim(values) == 0:
        return values
    if not np.issubdtype(values.dtype, np.floating):
        return values.mean()
    there = values[np.isfinite(values)]
    return there.mean(dtype=values.dtype) if there.size else math.nan


def _mean_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each metric over the rows in which it is finite."""
    merged = {}
    for name in rows[-1]:
        if name == "env_steps" or name.endswith("_per_seed") or name.startswith("eval_"):
            continue
        values = [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]
        if values:
            merged[name] = values[-1] if name in ("iteration", "wall_s") else math.fsum(values) / len(values)
    return merged
