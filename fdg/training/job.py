"""`Job`: what to train and how. It is checked without devices; `open_run` makes its run directory."""

import dataclasses
import datetime
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from envs.wrappers import unwrapped
from fdg import ctrl_c
from fdg.arguments import quoted
from fdg.errors import FdgError, place_of, user_errors
from fdg.kinds import dataclass_fields, shown, to_json
from fdg.processes import distributed
from fdg.training.checkpoint import Checkpoints
from fdg.training.description import describe_policy
from fdg.training.evaluation import can_evaluate
from fdg.training.loggers import TRACKERS, import_tracker
from fdg.training.run_directory import NullRunDirectory, RunDirectory, make_new_run_folder, read_config
from fdg.training.settings import Settings, changes, check_settings, flatten_config, kept_settings
from fdg.training.summary import git_commit, versions
from fdg.training.sweep import Sweep, agent_count, unwrap_sweep

_SESSION_ENTRIES = ("command", "versions", "git_commit")  # what `config.json` records at each resume


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Settings):
    """What to train and how: the settings of a run, its algorithm and its policy."""

    algorithm: Any  # the algorithm, built from presets and flags
    policy: Any  # the distribution policy
    # entries of `config.json` of algorithm and policy: `algo`, `env`, `policy`, `hyperparameters`, ...
    described: Mapping[str, Any]
    num_iterations: int  # iterations of the whole run
    steps_per_iteration: int  # steps of one agent per iteration
    total_steps: int | None = None  # None if it is a hyperparameter of the algorithm
    resumes: bool = False  # whether to resume the run in `out`
    max_host_devices: int | None = None  # fdg may choose up to this many; None: the number is fixed
    explains: bool = True  # whether to print the candidates of `auto`; False: only the reason
    # further entries of `config.json`: the sources of values, and the command that started the run
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(
        cls,
        algorithm: Any,
        policy: Any,
        described: Mapping[str, Any],
        settings: Mapping[str, Any],
        runs: bool = True,
        **fields: Any,
    ) -> "Job":
        """Makes a job and checks it; `settings` has the fields of `Settings`, and `fields` all other fields.

        With `runs=False` the job is only planned, and its experiment trackers need not be installed.
        """
        check_settings({**settings, **described})
        steps = run_length(algorithm, described["algo"], settings.get("total_steps"), runs)
        job = cls(algorithm=algorithm, policy=policy, described=described, **settings, **fields, **steps)
        for kind in job.loggers if runs else ():
            import_tracker(kind)
        return job

    def changed(
        self,
        algorithm: Any = None,
        policy: Any = None,
        described: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> "Job":
        """The job with another algorithm or policy, and with its description; None keeps the present one.

        `described` has further entries of the description, and `fields` further fields to replace.
        """
        description = dict(self.described)
        if policy is not None and policy is not self.policy:
            fields["policy"] = policy
            description |= describe_policy(policy)
        description |= described or {}
        if algorithm is not None and algorithm is not self.algorithm:
            fields["algorithm"] = algorithm
            names = description["hyperparameters"]
            description["hyperparameters"] = {name: to_json(getattr(algorithm, name)) for name in names}
        return dataclasses.replace(self, described=description, **fields)

    @property
    def agents(self) -> int | None:
        """The number of agents (in a sweep, seeds times points); None if states have no axis of agents."""
        return agent_count(self.algorithm, self.num_seeds)

    @property
    def title(self) -> str:
        """The title of the run's plots: algorithm, environment, policy and seeds."""
        subject = " on ".join(
            filter(None, (self.described["algo"].rpartition(":")[2], self.described["env"]))
        )
        seeds = f"seed {self.seed}"
        if isinstance(self.algorithm, Sweep):
            names = ", ".join(name for name, _ in self.algorithm.grid)
            seeds = f"sweep of {names}, {self.agents} agents"
        elif self.agents is not None and self.agents > 1:
            seeds = f"seeds {self.seed} to {self.seed + self.agents - 1}"
        return f"{subject}\n{self.policy}, {seeds}"

    @property
    def config(self) -> dict[str, Any]:
        """The settings that reproduce this job, for `config.json`."""
        values = {name: to_json(getattr(self, name)) for name in kept_settings(Settings)}
        for name in ("total_steps", "devices_chosen"):
            if values[name] is None:
                del values[name]
        return {**self.described, **values}

    @property
    def loggers(self) -> dict[str, Any]:
        """The experiment trackers that also receive the metrics: name -> project or experiment."""
        values = {name: getattr(self, name) for name in TRACKERS}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @property
    def rounding_message(self) -> str | None:
        """A message if `total_steps` is not a multiple of an iteration and is rounded down; else None."""
        requested = flatten_config(self.config).get("total_steps")
        completed = self.num_iterations * self.steps_per_iteration
        if not isinstance(requested, int) or requested <= completed:
            return None
        return (
            f"{requested:,} steps are {self.num_iterations:,} iterations of {self.steps_per_iteration:,}, and"
            f" {requested - completed:,} more, which are left out: {completed:,} will be done"
        )

    @property
    def unused_setting_messages(self) -> list[str]:
        """Messages about periods longer than the run, and about settings without effect."""
        total, messages = self.num_iterations, list[str]()
        if not self.halving and self.optuna is None:
            messages = ["--halving false has no effect without --optuna TRIALS: give both, or leave it out"]
        for option, period, effect in (
            ("--eval-every", self.eval_every, "nothing is evaluated"),
            ("--checkpoint-every", self.checkpoint_every, "no checkpoint is written"),
            ("--exploit-every", self.exploit_every, "no agent takes over from another"),
        ):
            if period is not None and period > total:
                messages.append(
                    f"{option} {period} counts iterations, and the run has {total:,}: {effect} before its end"
                )
        if self.eval_every is not None and not can_evaluate(self.algorithm):
            messages.append("--eval-every has no effect: the algorithm has no evaluate, nor actor and env")
        swept = [name for name, _ in self.algorithm.grid] if isinstance(self.algorithm, Sweep) else []
        algorithm = getattr(self.algorithm, "algorithm", self.algorithm)
        return messages + ineffective_field_messages(algorithm, swept)


def open_run(job: Job) -> tuple[RunDirectory, Checkpoints]:
    """Creates or reopens the run directory of a job and its checkpoints.

    In processes other than 0, the directory writes nothing.
    """
    if not distributed.is_first():
        run: RunDirectory = NullRunDirectory(job.out or Path())
        return run, Checkpoints(run.checkpoints)
    session = {**job.record, "versions": versions(), "git_commit": git_commit()}
    env, _ = unwrapped(getattr(unwrap_sweep(job.algorithm), "env", None))
    tokenizer = getattr(env, "tokenizer", None)
    digest = getattr(tokenizer, "digest", None)
    digest = digest if isinstance(digest, str) else None  # a user's tokenizer may use the name otherwise
    path = job.out or make_new_run_folder(job.described["env"], job.described["algo"], job.seed)
    if not job.resumes:
        identity = {"id": secrets.token_hex(8), **({"tokenizer_digest": digest} if digest else {})}
        run = RunDirectory.create(path, {**identity, **job.config, **session})
    else:
        run = RunDirectory.reopen(path)
    with run.closed_on_error():
        checkpoints = Checkpoints(run.checkpoints)
        if job.resumes:
            if (completed := checkpoints.completed()) > job.num_iterations:
                raise FdgError(
                    f"{path} has already run {completed:,} iterations, but --total-steps asks for"
                    f" {job.num_iterations:,}: give a larger --total-steps"
                )
            stored = read_config(path)
            if stored.get("tokenizer_digest") not in (None, digest):
                raise FdgError(
                    f"{getattr(tokenizer, 'path', 'the task')}: its tokenizer has changed since the run in"
                    f" {path} began: bring back its files, or start a new run"
                )
            recorded = {name: session[name] for name in _SESSION_ENTRIES if name in session}
            now = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
            entry = {"at": now, "changes": changes(stored, job.config), **recorded}
            run.write_config({**stored, **job.config, "resumes": [*stored.get("resumes", ()), entry]})
    ctrl_c.set_resume_hint(f"go on with --resume {path}")
    return run, checkpoints


def ineffective_field_messages(algorithm: Any, swept: Collection[str] = ()) -> list[str]:
    """Messages about given or swept fields that have no effect, since another field is off (`only_with`).

    >>> import algos, envs
    >>> ineffective_field_messages(algos.PPO(envs.make("CartPole-v1"), rnd_features=8))
    ['--rnd-features 8 has no effect, for rnd is False: set rnd too, or leave this out']
    """
    fields = {field.name: field for field in dataclass_fields(algorithm)}

    def disabling_field(name: str) -> str | None:
        """The field that switches this one off, or None."""
        switch, _, value = fields[name].metadata.get("only_with", "").partition("=")
        if switch not in fields:
            return None
        current = getattr(algorithm, switch)
        is_off = current in (None, False, 0, "none") or (value and current != value)
        return switch if is_off else disabling_field(switch)

    def flag(name: str, default: Any) -> str:
        """The flag with a field's value; "" if the value is the default."""
        if name in swept:
            return f"--sweep {name}=..."
        value = getattr(algorithm, name)
        return f"--{name.replace('_', '-')} {shown(value)}" if value != default else ""

    return [
        f"{given} has no effect, for {switch} is {getattr(algorithm, switch)!r}: set {switch} too, or leave"
        " this out"
        for name, field in fields.items()
        if (switch := disabling_field(name)) and (given := flag(name, field.default))
    ]


def steps_unit(algorithm: Any) -> str:
    """The unit of an algorithm's steps: its attribute `steps_are`, by default environment steps."""
    return getattr(algorithm, "steps_are", "environment steps")


def run_length(algorithm: Any, name: str, total_steps: int | None, runs: bool = True) -> dict[str, Any]:
    """Checks an algorithm's steps and files; returns the job's `num_iterations` and `steps_per_iteration`.

    With `runs=False` the job is only planned: it may be shorter than an iteration; files are not checked.
    """
    with user_errors(f"{name}: steps_per_iteration", type(algorithm)):
        steps = getattr(algorithm, "steps_per_iteration", None)
    if steps is None:
        raise FdgError(
            f"{name} has no attribute steps_per_iteration: give it a property or a field of this name,"
            " with the environment steps of one iteration"
        )
    if isinstance(steps, bool) or not hasattr(steps, "__index__") or steps < 1:
        raise FdgError(
            f"{name}: steps_per_iteration is {quoted(steps)}{place_of(type(algorithm))}: it is an integer of"
            " at least 1, as a property or a field"
        )
    if total_steps is None:  # it is a hyperparameter
        with user_errors(f"{name}: total_steps", type(algorithm)):
            total_steps = algorithm.total_steps
    if total_steps < steps and runs:
        raise FdgError(
            f"--total-steps {total_steps} is less than one iteration of {steps} {steps_unit(algorithm)}:"
            f" give at least {steps}"
        )
    if runs and callable(getattr(algorithm, "check_files", None)):
        algorithm.check_files()
    return {"num_iterations": max(1, total_steps // steps), "steps_per_iteration": steps}
