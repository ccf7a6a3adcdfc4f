"""A job: what to train and how, as a value that is checked as far as that needs no device."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdg.errors import FdgError, own_code, place_of
from fdg.kinds import dataclass_fields, shown, to_json
from fdg.training.settings import Settings, flat, kept_settings
from fdg.training.sweep import agent_count

TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"
Tracker = tuple[str, str | None]  # which, and of wandb and mlflow the project or experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Settings):
    """What to train, and how: settings of a run, with its algorithm and its policy.

    Attributes:
      algorithm: built from presets and flags.
      policy: likewise.
      described: the two as `config.json` names them: `algo`, `env`, `policy`, `policy_fields`, `staleness`,
        `hyperparameters`.
      num_iterations: of the whole run.
      steps_per_iteration: environment steps of one agent in one iteration.
      total_steps: None where they are a hyperparameter.
      resumes: whether `out` holds an earlier run to go on with.
      start_from: a run whose weights a new one begins with; None for fresh ones.
      trust: whether that run may name what only the caller may (`fdg.training.name_resolver`).
      cores: how many host devices there are to choose from; None for no choice.
      explains: whether the candidates of a policy that chooses itself are shown; else why it chose.
      record: what else `config.json` keeps: where values came from, and how the run was started.
    """

    algorithm: Any
    policy: Any
    described: Mapping[str, Any]
    num_iterations: int
    steps_per_iteration: int
    total_steps: int | None = None
    resumes: bool = False
    start_from: Path | None = None
    trust: bool = False
    cores: int | None = None
    explains: bool = True
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def agents(self) -> int | None:
        """How many in the program, of a sweep all; None for one without an axis of agents."""
        return agent_count(self.algorithm, self.num_seeds)

    @property
    def config(self) -> dict[str, Any]:
        """The flags that make this job again, for `config.json`."""
        values = {name: to_json(getattr(self, name)) for name in kept_settings(Settings)}
        unset = {name for name in ("total_steps", "devices_chosen") if values[name] is None}
        run = {name: value for name, value in values.items() if name not in unset}
        return {**self.described, **run, "hyperparameters": self.described["hyperparameters"]}

    @property
    def loggers(self) -> tuple[Tracker, ...]:
        """Where metrics go beside the run directory."""
        wanted = (
            (TENSORBOARD, None, self.tensorboard),
            (WANDB, self.wandb, self.wandb is not None),
            (MLFLOW, self.mlflow, self.mlflow is not None),
        )
        return tuple((kind, target) for kind, target, is_wanted in wanted if is_wanted)

    @property
    def rounded(self) -> str | None:
        """What of the steps that were asked for makes no whole iteration, as a line; None where all do."""
        asked = flat(self.config).get("total_steps")
        done = self.num_iterations * self.steps_per_iteration
        if not isinstance(asked, int) or asked <= done:
            return None
        return (
            f"{asked:,} steps are {self.num_iterations:,} iterations of {self.steps_per_iteration:,}, and"
            f" {asked - done:,} more, which are left out: {done:,} will be done"
        )

    @property
    def beyond(self) -> list[str]:
        """Periods that are longer than the run, and settings without effect, as a line each."""
        total = self.num_iterations
        periods = {
            "--eval-every": (self.eval_every, "nothing is evaluated"),
            "--checkpoint-every": (self.checkpoint_every, "no checkpoint is written"),
            "--exploit-every": (self.exploit_every, "no agent takes over from another"),
        }
        unused = []
        if not self.halving and self.optuna is None:
            unused = ["--halving false has no effect without a search: give --optuna TRIALS, or leave it out"]
        return (
            unused
            + [
                f"{option} {period} counts iterations, and the run has {total:,}: {what} before its end"
                for option, (period, what) in periods.items()
                if period is not None and period > total
            ]
            + without_effect(getattr(self.algorithm, "algorithm", self.algorithm))
        )


def without_effect(algorithm: Any) -> list[str]:
    """Fields that were given and that others switch off, as a line each: see `only_with` of a field.

    >>> import algos, envs
    >>> without_effect(algos.PPO(envs.make("CartPole-v1"), rnd_features=8))
    ['--rnd-features 8 has no effect, for rnd is False: give that too, or leave it out']
    """
    fields = {field.name: field for field in dataclass_fields(algorithm)}

    def off(name: str) -> str | None:
        """The field that switches one off."""
        switch, _, value = fields[name].metadata.get("only_with", "").partition("=")
        if switch not in fields:
            return None
        now = getattr(algorithm, switch)
        return switch if now in (None, False, 0, "none") or (value and now != value) else off(switch)

    return [
        f"--{name.replace('_', '-')} {shown(value)} has no effect, for {switch} is"
        f" {getattr(algorithm, switch)!r}: give that too, or leave it out"
        for name, field in fields.items()
        if (switch := off(name)) and (value := getattr(algorithm, name)) != field.default
    ]


def steps_of(algorithm: Any) -> str:
    """What `steps_per_iteration` of an algorithm, or of its class, counts: environment steps, unless its
    `steps_are` says otherwise.
    """
    return getattr(algorithm, "steps_are", "environment steps")


def lengths(algorithm: Any, name: str, total_steps: int | None, runs: bool = True) -> dict[str, Any]:
    """`num_iterations`, at least one where nothing `runs`, and `steps_per_iteration` of a job.

    Raises:
      FdgError: less than one iteration, the algorithm does not say how far one gets, or files are missing.
    """
    with own_code(f"{name}: steps_per_iteration", type(algorithm)):
        steps = getattr(algorithm, "steps_per_iteration", None)
    if steps is not None and (isinstance(steps, bool) or not hasattr(steps, "__index__") or steps < 1):
        raise FdgError(
            f"{name}: steps_per_iteration is {steps!r:.60}{place_of(type(algorithm))}: it is an integer of at"
            " least 1, as a property or a field"
        )
    if steps is None:
        raise FdgError(
            f"{name} does not say how far an iteration gets: give it a property steps_per_iteration"
        )
    if total_steps is None:  # a hyperparameter
        with own_code(f"{name}: total_steps", type(algorithm)):
            total_steps = algorithm.total_steps
    if total_steps < steps and runs:
        raise FdgError(
            f"--total-steps {total_steps} is less than one iteration of {steps} {steps_of(algorithm)}:"
            f" give at least {steps}"
        )
    if runs and callable(getattr(algorithm, "check_files", None)):
        algorithm.check_files()
    return {"num_iterations": max(1, total_steps // steps), "steps_per_iteration": steps}
