"""A job: what to train and how, as a value that is checked as far as that needs no device."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and how: a command line, checked as far as that needs no device.

    Attributes:
      algorithm: built from presets and flags.
      policy: likewise.
      devices: how many; None for all there are, on a CPU as many as are predicted to be fastest.
      cores: how many host devices there are to choose from; None for no choice.
      chosen: what an earlier sitting of the run chose, which this one keeps to.
      seed: of all random numbers.
      agents: how many in the program, of a sweep all; None for one without an axis of agents.
      num_iterations: of the whole run.
      steps_per_iteration: environment steps of one agent in one iteration.
      eval_episodes: see `evaluation.episodes_of`; 0 for no evaluation.
      checkpoint_every: iterations; None for about twenty checkpoints, fewer where they would cost too much.
      out: the run directory; None for one named after the job.
      resumes: whether `out` holds an earlier run to go on with.
      start_from: a run whose weights a new one begins with; None for fresh ones.
      trust: whether that run may name what only the caller may (`fdg.training.said`).
      eval_every: iterations from one evaluation during training to the next; None for none.
      stop_at: evaluation return at which training ends early; None for no such.
      loggers: where metrics go beside the run directory: `tensorboard`, `wandb` or `mlflow`, and of the last
        two the project or experiment.
      profiles: whether an iteration is profiled after training.
      draws_timeline: whether it is recorded after training which program ran when.
      explains: whether the candidates of a policy that chooses itself are shown; else why it chose.
      on_nan: "stop" or "warn", where a loss is infinite or not a number.
      config: the flags that make this job again, for `config.json`.
      record: what else `config.json` keeps: where values came from, and how the run was started.
    """

    algorithm: Any
    policy: Any
    devices: int | None
    seed: int
    agents: int | None
    num_iterations: int
    steps_per_iteration: int
    eval_episodes: int | None
    checkpoint_every: int | None
    out: Path | None
    resumes: bool
    profiles: bool
    config: Mapping[str, Any]
    cores: int | None = None
    chosen: int | None = None
    draws_timeline: bool = False
    on_nan: str = "stop"
    start_from: Path | None = None
    trust: bool = False
    eval_every: int | None = None
    stop_at: float | None = None
    loggers: tuple[tuple[str, str | None], ...] = ()
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    explains: bool = True

    @property
    def rounded(self) -> str | None:
        """What of the steps that were asked for makes no whole iteration, as a line; None where all do."""
        asked = {**self.config, **self.config["hyperparameters"]}.get("total_steps")
        done = self.num_iterations * self.steps_per_iteration
        if not isinstance(asked, int) or asked <= done:
            return None
        return (
            f"{asked:,} steps are {self.num_iterations:,} iterations of {self.steps_per_iteration:,}, and"
            f" {asked - done:,} more, which are left out: {done:,} will be done"
        )

    @property
    def beyond(self) -> list[str]:
        """Periods that are longer than the run, as a line each."""
        total = self.num_iterations
        periods = {
            "--eval-every": (self.eval_every, "nothing is evaluated"),
            "--checkpoint-every": (self.checkpoint_every, "no checkpoint is written"),
            "--exploit-every": (self.config.get("exploit_every"), "no agent takes over from another"),
        }
        return [
            f"{option} {period} counts iterations, and the run has {total:,}: {what} before its end"
            for option, (period, what) in periods.items()
            if period is not None and period > total
        ]


MOST_DEVICES = 65_536
MOST_AGENTS = 1_000_000
MOST_EPISODES = 100_000  # of an evaluation: they are played side by side


def check_run(run: Mapping[str, Any]) -> None:
    """Refuses numbers of a run that cannot be.

    Args:
      run: `seed`, `eval_episodes`, `staleness`, `num_seeds`, `checkpoint_every`, `eval_every`.

    Raises:
      FdgError: one of them is out of range.
    """
    at_least(0, seed=run["seed"], eval_episodes=run["eval_episodes"], staleness=run["staleness"])
    at_least(1, num_seeds=run["num_seeds"], checkpoint_every=run["checkpoint_every"])
    at_least(1, eval_every=run.get("eval_every"))
    if run.get("stop_at") is not None and run.get("eval_every") is None:
        raise FdgError(
            f"--stop-at {run['stop_at']:g}: evaluations during training are compared with it:"
            f" give --eval-every N, too"
        )
    if (run["num_seeds"] or 1) > MOST_AGENTS:
        raise FdgError(f"--num-seeds {run['num_seeds']}: it must be at most {MOST_AGENTS}")
    if (run["eval_episodes"] or 0) > MOST_EPISODES:
        raise FdgError(f"--eval-episodes {run['eval_episodes']}: it must be at most {MOST_EPISODES}")
    if run["seed"] + (run["num_seeds"] or 1) > 2**32:  # JAX would take it modulo 2**32, unasked
        raise FdgError(f"--seed {run['seed']}: seeds are below {2**32}")


def lengths(algorithm: Any, name: str, total_steps: int | None, runs: bool = True) -> tuple[int, int]:
    """Number of iterations, at least one where nothing `runs`, and environment steps in each.

    Raises:
      FdgError: less than one iteration, or the algorithm does not say how far one gets.
    """
    steps = getattr(algorithm, "steps_per_iteration", None)
    if steps is None:
        raise FdgError(
            f"{name} does not say how far an iteration gets: give it a property steps_per_iteration"
        )
    if total_steps is None:  # a hyperparameter
        total_steps = algorithm.total_steps
    if total_steps < steps and runs:
        raise FdgError(
            f"--total-steps {total_steps} is less than one iteration of {steps} environment steps:"
            f" give at least {steps}"
        )
    return max(1, total_steps // steps), steps


def check_divides(devices: int | None, processes: int) -> None:
    """Refuses a number of devices that is not the same in every process.

    Raises:
      FdgError: with the nearest that are.
    """
    if devices is not None and devices % processes:
        below, above = devices // processes * processes, -(-devices // processes) * processes
        nearest = f"{below} or {above}" if below else above
        raise FdgError(
            f"--devices {devices} does not divide by the {processes} processes: use --devices {nearest}"
        )


def at_least(least: int, **values: int | None) -> None:
    """Refuses flags below a value; None is not given.

    Raises:
      FdgError: names the flag.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise FdgError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
