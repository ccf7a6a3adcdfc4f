"""The schema of a job: every setting of a run with its default, help and rules.

These dataclasses define the flags of `fdg.train` and their help, the settings of `fdg.fit`, the values in
`config.json` and their checks, and the settings that a resumed run may change (`free=True`).
`fdg.settings.fields.setting` explains the keywords of a setting.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fdg.errors import FdgError
from fdg.kinds import from_json, to_json
from fdg.settings.fields import setting

MOST_DEVICES = 65_536
MOST_AGENTS = 1_000_000
MOST_EPISODES = 100_000  # episodes of an evaluation, which plays all of them in parallel
AUTO = ("auto", "auto:measure")  # values of --policy that choose a policy
AUTO_LAG = "auto"  # the value of --lag that chooses a lag
_NUM_SEEDS = 2**32  # seeds are below this number
_NESTED = ("hyperparameters", "policy_fields")  # entries of `config.json` that are dictionaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The algorithm, environment, policy and preset by name, and the age of actors' parameters."""

    algo: str = setting("ppo", "an algorithm, or path.to.module:Class for one of your own")
    env: str | None = setting(
        "CartPole-v1",
        "an environment, with parameters as in CartPole-v1?gravity=9.0; path.to.module:factory for your own;"
        " if not given, one that suits the algorithm",
        flag=str,
    )
    policy: str = setting(
        "auto",
        "a distribution policy: which devices each fragment runs on; auto: the one"
        " predicted to be fastest; auto:measure: times the three predicted to be fastest, and takes the best",
        free=True,
    )
    preset: str | None = setting(
        None,
        "tuned hyperparameters to start from: name of an environment or of a family of them; none: no"
        " preset, so the algorithm's defaults (None: the preset for the environment)",
        kept=False,
        flag=str,  # "none" is a name here, not None
    )
    show_preset: bool = setting(
        False, "print the preset's settings and where they come from, then exit", kept=False
    )
    staleness: int = setting(
        0,
        "iterations by which the actors' parameters lag behind the learner's; 0: synchronous",
        least=0,
        most=1_000,
    )
    lag: int | Literal["auto"] = setting(
        0,
        "staleness counted in micro-batches, so that it can be less than an iteration; auto: the smallest lag"
        " whose predicted speed is within 5% of the fastest (config.json records it)",
        least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Length, devices, evaluation and logging of a run."""

    total_steps: int | None = setting(
        500_000,
        "environment steps of each agent; of language models, responses or demonstrations",
        flag=int,
        free=True,
    )
    devices: int | None = setting(
        None,
        "number of devices, over all processes together; on a CPU, this many host devices are made (None: all"
        " devices; in one process on a CPU: the number predicted to be fastest, at most its cores)",
        least=1,
        most=MOST_DEVICES,
        free=True,
    )
    devices_chosen: int | None = setting(
        None,
        "number of devices that the run chose when it started",
        least=1,
        most=MOST_DEVICES,
        free=True,
        flag=False,
    )
    env_workers: int | None = setting(
        None,
        "processes that step a ray:... or gymnasium:... environment (None: as many as the cores allow)",
        least=1,
        free=True,
    )
    seed: int = setting(
        0,
        "seed of all random numbers",
        least=0,
        most=_NUM_SEEDS - 1,
        several="--num-seeds {n} trains {n} agents in one program, of seeds SEED, SEED+1, ...",
    )
    num_seeds: int | None = setting(
        None,
        "train this many independent agents in one program, with seeds SEED, SEED+1, ... (None: one)",
        least=1,
        most=MOST_AGENTS,
    )
    sweep: str | None = setting(
        None,
        "grid of float hyperparameters, all combinations in one program, --num-seeds agents for each:"
        " learning_rate=1e-4,3e-4,1e-3 entropy_coefficient=0,0.01; a range is log:1e-4..1e-2x8 (8 values)"
        " or lin:0.9..0.99x4 (4 values) (None: no sweep)",
        words=True,
    )
    self_play: str | None = setting(
        None,
        "train against older versions of itself, in a game of two players: any of size=VERSIONS"
        " every=ITERATIONS latest=PROBABILITY; see algos.SelfPlay (None: against the environment's opponent)",
        words=True,
    )
    exploit_every: int | None = setting(
        None,
        "population-based training: agents start with the values of --sweep; every this many iterations the"
        " worst copy weights and hyperparameters of the best, and perturb the hyperparameters (None: off)",
        least=1,
        most=2**31,
    )
    optuna: int | None = setting(
        None,
        "hyperparameter search with Optuna: number of trials; each is a separate run, compiled by itself"
        " (None: no search)",
        least=1,
        free=True,
    )
    search: str | None = setting(
        None,
        "search space of --optuna. Choices: num_steps=64,128; choices of tuples: hidden=64,64/128,128;"
        " a range: learning_rate=log:1e-4..1e-2 (None: nothing is searched)",
        words=True,
    )
    halving: bool = setting(
        True, "end trials of a search that are behind the others (successive halving)", free=True
    )
    eval_episodes: int | None = setting(
        None,
        "episodes of the evaluation after training; 0: no evaluation (None: 128; for a data file, each"
        " held-out row once)",
        least=0,
        most=MOST_EPISODES,
        free=True,
    )
    checkpoint_every: int | None = setting(
        None,
        "write a checkpoint every this many iterations, or slightly more (None: 20 checkpoints in a run,"
        " fewer if writing them would take over 1% of the time)",
        least=1,
        free=True,
    )
    on_nan: Literal["stop", "warn"] = setting(
        "stop",
        "what to do if a loss is NaN or infinite: end the run, or print a warning and continue",
        free=True,
    )
    eval_every: int | None = setting(
        None,
        "evaluate every this many iterations, with greedy and with sampled actions; also keep the checkpoint"
        " with the best greedy return (None: never)",
        least=1,
        free=True,
    )
    stop_at: float | None = setting(
        None,
        "end the run once an evaluation of --eval-every has at least this greedy return (None: never)",
        free=True,
    )
    stop_after: float | None = setting(
        None,
        "end the run after this many seconds of training, compilation not counted (None: never)",
        least=0,
        free=True,
    )
    tensorboard: bool = setting(
        False, "also write TensorBoard's event files, into the run directory", free=True
    )
    wandb: str | None = setting(
        None, "also log to this project of Weights & Biases (None: do not)", free=True
    )
    mlflow: str | None = setting(None, "also log to this experiment of MLflow (None: do not)", free=True)
    profile: bool = setting(
        False,
        "after training, profile an iteration by fragment, and write a profiler trace (in the run directory)",
        kept=False,
        free=True,
    )
    timeline: bool = setting(
        False,
        "after training, draw a timeline of what each device group ran in six iterations (in the run"
        " directory)",
        kept=False,
        free=True,
    )
    out: Path | None = setting(
        None, "the run directory (None: runs/ENV-ALGO-SEED-TIME)", flag=str | None, kept=False, free=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Settings of this machine, which `config.json` does not store."""

    trust: bool = setting(
        False,
        "allow a resumed run's config.json to import modules that the command line does not name: this runs"
        " their code",
        kept=False,
    )
    program_cache: str | None = setting(
        None,
        "directory of the cache of compiled programs; off: no cache (None: JAX_COMPILATION_CACHE_DIR, or fdg/"
        " in the user's cache directory)",
        kept=False,
    )
    xla_options: str | None = setting(
        None,
        "XLA compiler options: NAME=VALUE,NAME=VALUE, or 'preset' for those in fdg/running/xla_options.py"
        " (None: none)",
        kept=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """The settings of one process of a run with several processes."""

    coordinator_address: str | None = setting(
        None, "HOST:PORT at which process 0 can be reached (None: one process)", kept=False
    )
    num_processes: int | None = setting(None, "how many processes there are (None: one)", kept=False)
    process_id: int | None = setting(None, "index of this process, from 0 (None: 0)", kept=False)
    distributed: bool = setting(
        False, "detect these three settings from the cluster (SLURM, MPI, Kubernetes, TPU pod)", kept=False
    )


# The groups of settings by their titles in `--help`.
GROUPS: Mapping[str, type] = {
    "what to train, and where": Names,
    "the run": Settings,
    "this machine": Machine,
    "several processes": Processes,
}


@functools.cache
def kept_settings(*groups: type) -> Mapping[str, tuple[dataclasses.Field, Any]]:
    """The field and annotation of each setting of these groups that `config.json` stores, by name."""
    settings = {}
    for group in groups:
        annotations = typing.get_type_hints(group)
        fields = (field for field in dataclasses.fields(group) if field.metadata.get("kept", True))
        settings.update({field.name: (field, annotations[field.name]) for field in fields})
    return settings


def check_range(name: str, value: Any) -> None:
    """Refuses a number outside of a setting's range; accepts None and text."""
    field, _ = kept_settings(Names, Settings)[name]
    least, most = field.metadata.get("least"), field.metadata.get("most")
    if value is None or least is None or isinstance(value, str):
        return
    if value < least:
        raise FdgError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    if most is not None and value > most:
        raise FdgError(f"--{name.replace('_', '-')} {value}: it must be at most {most}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuses invalid settings of a run, which are given by name."""
    seed, agents = settings.get("seed", 0), settings.get("num_seeds") or 1
    if seed + min(agents, MOST_AGENTS) > _NUM_SEEDS:  # JAX would silently reduce a seed modulo 2**32
        most = _NUM_SEEDS - min(agents, MOST_AGENTS)
        raise FdgError(f"--seed {seed}: seeds are below {_NUM_SEEDS}: give at most {most}")
    for name in kept_settings(Names, Settings):
        check_range(name, settings.get(name))
    if settings.get("stop_at") is not None and settings.get("eval_every") is None:
        raise FdgError(
            f"--stop-at {settings['stop_at']:g} needs evaluations during training: give --eval-every N, too"
        )


def check_divides(devices: int | None, processes: int) -> None:
    """Refuses a number of devices that is not divisible by the number of processes."""
    if devices is not None and devices % processes:
        raise FdgError(
            f"--devices {devices} is not divisible by the number of processes, {processes}:"
            f" use --devices {nearest_multiples(devices, processes)}"
        )


def nearest_multiples(number: int, factor: int) -> str:
    """The nearest positive multiples of `factor` below and above a number, for a message: "4 or 8"."""
    below, above = number // factor * factor, -(-number // factor) * factor
    return f"{below} or {above}" if below else str(above)


def check_config(file: Path, content: Any) -> dict[str, Any]:
    """Checks the types of a configuration's values, so that later code can rely on them; returns it."""
    required_names = {"algo", "policy", "policy_fields", "hyperparameters"}
    if not isinstance(content, dict) or not content.keys() >= required_names:
        config = file.with_name("config.json")
        has_config = config != file and config.is_file()
        fix = config if has_config else "the config.json of a run directory"
        raise FdgError(f"{file} is not the configuration of a run: give {fix}")
    for name in ("policy_fields", "hyperparameters", "preset", "follows", "versions", "resumes"):
        expected, type_name = (list, "a list") if name == "resumes" else (dict, "a JSON object")
        if name in content and not isinstance(content[name], expected):
            raise FdgError(
                f"{file} has {name} = {content[name]!r:.60}, which is not {type_name}: restore the file that"
                " fdg wrote"
            )
    read_value(file, "id", content.get("id"), str | None)
    read_settings(file, content)
    read_value(file, "total_steps", content["hyperparameters"].get("total_steps"), int | float | None)
    return content


def read_settings(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the settings at the top level of a configuration to Python values."""
    values = {}
    for name, (field, annotation) in kept_settings(Names, Settings).items():
        if name in config:
            value, least, most = config[name], field.metadata.get("least", 0), field.metadata.get("most")
            may_be_none = value is None and annotation is not int
            if most is not None and not may_be_none and not (type(value) is int and least <= value <= most):
                raise _value_error(file, name, value, f"a whole number from {least} to {most}")
            values[name] = read_value(file, name, value, annotation)
    return values


def read_value(file: Path | None, name: str, value: Any, kind: Any) -> Any:
    """Converts a JSON value to a Python value of the annotation `kind`."""
    try:
        return from_json(kind, value)
    except ValueError as error:
        raise _value_error(file, name, value, str(error)) from None


def _value_error(file: Path | None, name: str, value: Any, expected: str) -> FdgError:
    return FdgError(f"{file} has {name} = {value!r:.60}, which is not {expected}")


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a configuration in one dictionary, including hyperparameters and policy fields."""
    nested = {name: value for part in _NESTED for name, value in config.get(part, {}).items()}
    return {**{name: value for name, value in config.items() if name not in _NESTED}, **nested}


def changes(old_config: Mapping[str, Any], new_config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The settings of `new_config` whose values differ from `old_config`: `{name: [before, now]}`."""
    old, new = (
        {name: to_json(value) for name, value in flatten_config(config).items()}
        for config in (old_config, new_config)
    )
    return {name: [old.get(name), value] for name, value in new.items() if value != old.get(name)}


def contradiction(
    old_config: Mapping[str, Any], new_config: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """The first changed setting that a resumed run must keep, as (name, before, now); None if there is none.

    A resumed run computes the same numbers as an uninterrupted one, under any policy.
    """
    free = {name for name, (field, _) in kept_settings(Names, Settings).items() if field.metadata.get("free")}
    free |= {"rebuilds", *old_config.get("policy_fields", ()), *new_config.get("policy_fields", ())}
    differences = changes(old_config, new_config).items()
    return next(((name, *values) for name, values in differences if name not in free), None)
