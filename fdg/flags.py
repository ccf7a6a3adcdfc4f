"""Flags of the commands: from a command line to a checked `Job`.

Most flags are not written here: each hyperparameter of the chosen algorithm, and each field of the chosen
policy, is one. So a command line is read twice, the first time for the names alone.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax

from fdg import run_directory
from fdg.errors import FdgError, unknown_name

_NOT_FLAGS = ("env", "network")  # fields of an algorithm that a command line cannot write down
_DEFAULT_TOTAL_STEPS = 500_000


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and how: a command line, checked as far as that needs no device.

    Attributes:
      algorithm: built from presets and flags.
      policy: likewise.
      devices: how many; None for all there are.
      seed: of all random numbers.
      num_seeds: None for one agent without a seed axis.
      num_iterations: of the whole run.
      steps_per_iteration: environment steps of one agent in one iteration.
      eval_episodes: 0 for no evaluation.
      checkpoint_every: iterations; None for about twenty checkpoints.
      out: the run directory; None for one named after the job.
      resumes: whether `out` holds an earlier run to go on with.
      config: the flags that make this job again, for `config.json`.
    """

    algorithm: Any
    policy: Any
    devices: int | None
    seed: int
    num_seeds: int | None
    num_iterations: int
    steps_per_iteration: int
    eval_episodes: int
    checkpoint_every: int | None
    out: Path | None
    resumes: bool
    config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Flag:
    name: str  # as in Python: `num_envs`, which is given as --num-envs or --num_envs
    kind: Any  # annotation of its value
    default: Any
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


_NAMES = (
    _Flag("algo", str, "ppo", "an algorithm, or path.to.module:Class for one of your own"),
    _Flag("env", str, "CartPole-v1", "an environment"),
    _Flag("policy", str, "gpu_only", "a distribution policy: which devices each fragment runs on"),
)
_STALENESS = _Flag("staleness", int, 0, "iterations by which the actors' parameters lag; 0: synchronous")
_RUN = (
    _Flag(
        "devices", int | None, None, "how many to use (None: all); on a CPU, so many host devices are made"
    ),
    _Flag("seed", int, 0, "of all random numbers"),
    _Flag("num_seeds", int | None, None, "agents in one program, of seeds SEED, SEED+1, ... (None: one)"),
    _Flag("eval_episodes", int, 128, "episodes of the evaluation after training; 0: none"),
    _Flag(
        "checkpoint_every",
        int | None,
        None,
        "iterations from checkpoint to checkpoint, at least (None: a twentieth of all)",
    ),
    _Flag("out", str | None, None, "the run directory (None: runs/ENV-ALGO-SEED-TIME)"),
)
_TOTAL_STEPS = _Flag("total_steps", int, _DEFAULT_TOTAL_STEPS, "environment steps of each agent")
# Those that change how a run is carried out, not what it computes: a resumed run may change them.
_FREE_ON_RESUME = {"policy", "devices", "eval_episodes", "checkpoint_every", "out", "resume"}


def parse(argv: Sequence[str], program: str, description: str) -> Job:
    """Reads and checks a command line.

    Args:
      argv: the words after the program's name.
      program: its name, for `--help`.
      description: what it does, for `--help`.

    Raises:
      FdgError: with the one line to show.
      SystemExit: after `--help`.
    """
    words = _normalise(argv)
    first = _Parser(add_help=False, allow_abbrev=False)
    for flag in (*_NAMES, *_RUN):
        _add(first, flag)
    _add_resume(first)
    early = vars(first.parse_known_args(words)[0])
    out, stored = _earlier_run(early)
    known = {**stored, **early}
    devices = known.get("devices")
    if devices is not None:
        _at_least(1, devices=devices)
        make_host_devices(devices)  # before the imports below, which may start JAX's backends

    import envs
    import policies

    algo, env_name, policy_name = (known.get(flag.name) or flag.default for flag in _NAMES)
    algorithm_class, policy_class = _algorithm_class(algo), policies.get(policy_name)
    fields = _fields(algorithm_class)
    has_env = any(field.name == "env" for field in _dataclass_fields(algorithm_class))
    if "env" in early and not has_env:
        raise FdgError(f"--env {env_name}: {algo} has its own environment (no field 'env')")
    env = envs.make(env_name) if has_env else None
    preset = algorithm_class.preset(env_name) if has_env and hasattr(algorithm_class, "preset") else {}

    run_flags = _RUN if any(flag.name == "total_steps" for flag in fields) else (_TOTAL_STEPS, *_RUN)
    policy_flags = [flag for flag in _fields(policy_class) if flag.name != "staleness"]
    own = {flag.name for flag in (*_NAMES, _STALENESS, *run_flags, *policy_flags)} | {"resume"}
    hyperparameter_flags = [
        dataclasses.replace(flag, default=preset.get(flag.name, flag.default))
        for flag in fields
        if flag.name not in own
    ]
    groups = {
        "what to train, and where": [*_NAMES, _STALENESS, *policy_flags],
        "the run": run_flags,
        f"hyperparameters of {algo}" + (f" for {env_name}" if has_env else ""): hyperparameter_flags,
    }
    parser = _Parser(prog=program, description=description, usage="%(prog)s [flags]", allow_abbrev=False)
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
        if title == "the run":
            _add_resume(group)
    given = parser.parse_strictly(words)
    if stored:
        _check_agrees(given, stored, _FREE_ON_RESUME | {flag.name for flag in policy_flags})

    kept = stored.get("hyperparameters", {})
    hyperparameters = {
        **preset,
        **{
            flag.name: _from_json(flag, kept[flag.name]) for flag in hyperparameter_flags if flag.name in kept
        },
        **{flag.name: given[flag.name] for flag in hyperparameter_flags if flag.name in given},
        **({"env": env} if has_env else {}),
    }
    algorithm = _construct(algorithm_class, algo, hyperparameters)
    # The fields of another policy than this one mean nothing to it.
    earlier_fields = stored.get("policy_fields", {}) if stored.get("policy") == policy_name else {}
    policy_fields = {
        flag.name: given.get(flag.name, earlier_fields.get(flag.name, flag.default)) for flag in policy_flags
    }
    staleness = given.get("staleness", stored.get("staleness", 0))
    policy = _construct(
        policy_class, policy_name, _with_staleness(policy_class, policy_name, policy_fields, staleness)
    )

    run = {flag.name: given.get(flag.name, stored.get(flag.name, flag.default)) for flag in run_flags}
    run.pop("out")
    _at_least(0, seed=run["seed"], eval_episodes=run["eval_episodes"])
    _at_least(1, num_seeds=run["num_seeds"], checkpoint_every=run["checkpoint_every"])
    if run["seed"] + (run["num_seeds"] or 1) > 2**32:  # JAX would take it modulo 2**32, unasked
        raise FdgError(f"--seed {run['seed']}: seeds are below {2**32}")
    num_iterations, steps_per_iteration = _lengths(algorithm, algo, run.get("total_steps"))
    return Job(
        algorithm=algorithm,
        policy=policy,
        devices=run["devices"],
        seed=run["seed"],
        num_seeds=run["num_seeds"],
        num_iterations=num_iterations,
        steps_per_iteration=steps_per_iteration,
        eval_episodes=run["eval_episodes"],
        checkpoint_every=run["checkpoint_every"],
        out=out,
        resumes=bool(stored),
        config={
            "algo": algo,
            "env": env_name if has_env else None,
            "policy": policy_name,
            "policy_fields": policy_fields,
            "staleness": staleness,
            **run,
            "hyperparameters": {
                flag.name: _to_json(getattr(algorithm, flag.name)) for flag in hyperparameter_flags
            },
        },
    )


def make_host_devices(count: int) -> None:
    """Has JAX's CPU backend make that many devices; without effect once it has started."""
    with contextlib.suppress(RuntimeError):  # a test, or a notebook: those that exist will have to do
        jax.config.update("jax_num_cpu_devices", count)


def _normalise(argv: Sequence[str]) -> list[str]:
    """`--num_envs` as `--num-envs`, and `--x -1e-3` as `--x=-1e-3` (argparse knows -1 and -0.1 only)."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value)
        elif words and re.fullmatch(r"--[a-z-]+", words[-1]) and re.fullmatch(r"-[\d.]\S*", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _earlier_run(early: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """The run directory that was asked for, and its configuration if it is to be resumed (else empty)."""
    out = Path(early["out"]) if early.get("out") else None
    if "out" in early and not early["out"]:
        raise FdgError("--out: give a directory")
    if "resume" not in early:
        return out, {}
    resume = Path(early["resume"]) if early["resume"] else out
    if resume is None:
        raise FdgError("--resume: say which run: --resume runs/NAME")
    if out is not None and out.absolute() != resume.absolute():
        raise FdgError(f"--resume {resume} and --out {out} are two directories: leave out --out")
    config = run_directory.read_config(resume)
    if not {"algo", "policy_fields", "hyperparameters"} <= config.keys():
        raise FdgError(f"--resume: {resume / 'config.json'} is no configuration of a run")
    return resume, config


def _check_agrees(given: Mapping[str, Any], stored: Mapping[str, Any], free: Collection[str]) -> None:
    """A resumed run computes what it would have computed: only what is `free` may change."""
    for name, value in given.items():
        if name in free:
            continue
        before = {**stored, **stored["hyperparameters"]}.get(name)
        if _to_json(value) != before:
            option = "--" + name.replace("_", "-")
            raise FdgError(
                f"--resume: {option} {_shown(value)} contradicts the run's {_shown(before)}:"
                f" leave it out, or start a new run"
            )


def _algorithm_class(name: str) -> type:
    import algos

    if ":" not in name:
        return algos.get(name)
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        missing = getattr(error, "name", None)
        if isinstance(error, ModuleNotFoundError) and missing and not module_name.startswith(missing):
            raise  # it is the user's module that lacks something
        is_path = module_name.endswith(".py") or "/" in module_name
        suggestion = module_name.removesuffix(".py").strip("./").replace("/", ".")
        fix = f"write {suggestion}:{class_name}" if is_path else "run from the folder that holds it"
        raise FdgError(f"--algo {name}: there is no module '{module_name}': {fix}") from None
    found = getattr(module, class_name, None)
    classes = [key for key, value in vars(module).items() if _is_algorithm(value)]
    if found is None and classes:
        raise unknown_name(f"algorithm in {module_name}", class_name, classes)
    if found is None or not _is_algorithm(found):
        raise FdgError(
            f"--algo {name}: an algorithm is a class with init(key) and iterate(state), and there is none"
        )
    return found


def _is_algorithm(value: Any) -> bool:
    return isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("init", "iterate")
    )


def _dataclass_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass; none of another class, which then has no flags of its own."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def _fields(cls: type) -> list[_Flag]:
    """Flags for the fields of a dataclass whose values can be written on a command line."""
    hints = typing.get_type_hints(cls)
    flags = []
    for field in _dataclass_fields(cls):
        if not field.init or field.name in _NOT_FLAGS or not _is_writable(hints[field.name]):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        flags.append(_Flag(field.name, hints[field.name], default, field.metadata.get("help", "")))
    return flags


def _with_staleness(policy_class: type, name: str, values: dict[str, Any], staleness: int) -> dict[str, Any]:
    import policies

    _at_least(0, staleness=staleness)
    if any(field.name == "staleness" for field in _dataclass_fields(policy_class)):
        return {**values, "staleness": staleness}
    if staleness:
        able = [
            other
            for other in policies.names()
            if any(field.name == "staleness" for field in _dataclass_fields(policies.get(other)))
        ]
        fix = f"use --policy {' or '.join(able)}" if able else "leave it out"
        raise FdgError(
            f"--staleness {staleness}: under {name}, actors always have the newest parameters: {fix}"
        )
    return values


def _construct(cls: type, name: str, values: Mapping[str, Any]) -> Any:
    missing = [
        field.name
        for field in _dataclass_fields(cls)
        if field.init
        and values.get(field.name, field.default) is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise FdgError(f"{name} needs --{missing[0].replace('_', '-')}: it has no default")
    spaces = getattr(cls, "action_spaces", None)
    env = values.get("env")
    if spaces and env is not None and not isinstance(env.action_space, tuple(spaces)):
        kinds = " or ".join(space.__name__ for space in spaces)
        raise FdgError(
            f"{name} acts in {kinds} action spaces, and that of {env.name} is {env.action_space}:"
            f" choose another --env or --algo"
        )
    try:
        return cls(**values)
    except ValueError as error:  # FdgError is one; a user's own class may raise the plain kind
        raise FdgError(str(error)) from error


def _lengths(algorithm: Any, name: str, total_steps: int | None) -> tuple[int, int]:
    """Number of iterations, and environment steps in each."""
    steps = getattr(algorithm, "steps_per_iteration", None)
    if steps is None:
        raise FdgError(
            f"{name} does not say how far an iteration gets: give it a property steps_per_iteration"
        )
    if total_steps is None:  # a hyperparameter
        total_steps = algorithm.total_steps
    if total_steps < steps:
        raise FdgError(
            f"--total-steps {total_steps} is less than one iteration of {steps} environment steps:"
            f" give at least {steps}"
        )
    return total_steps // steps, steps


def _at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise FdgError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")


# --- values ---


def _is_writable(kind: Any) -> bool:
    try:
        _reader(kind)
    except TypeError:
        return False
    return True


def _reader(kind: Any) -> Callable[[str], Any]:
    """A function from a word to a value of the annotation `kind`; its ValueError says what was expected.

    >>> _reader(int)("5e5"), _reader(float | None)("none"), _reader(tuple[int, ...])("64,64")
    (500000, None, (64, 64))
    """
    if kind is type(None):
        return _read_none
    if kind in _READERS:
        return _READERS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        choices = {str(choice): choice for choice in arguments}
        return lambda word: _read_choice(word, choices)
    if origin in (typing.Union, types.UnionType):
        # None first: "none" is also a string.
        readers = [_reader(one) for one in sorted(arguments, key=lambda one: one is not type(None))]
        return lambda word: _read_first(word, readers)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        one = _reader(arguments[0])
        return lambda word: tuple(one(part) for part in word.split(",") if part)
    raise TypeError(f"no flag can have a value of type {kind}")


def _read_int(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError("an integer")
    return int(number)


def _read_float(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError("a number")
    return number


def _read_bool(word: str) -> bool:
    if word.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError("true or false")
    return word.lower() in ("true", "yes", "1")


def _read_none(word: str) -> None:
    if word.lower() != "none":
        raise ValueError("none")


def _read_choice(word: str, choices: Mapping[str, Any]) -> Any:
    if word not in choices:
        nearest = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
        hint = f" (did you mean '{nearest[0]}'?)" if nearest else ""
        raise ValueError(f"one of {', '.join(choices)}{hint}")
    return choices[word]


def _read_first(word: str, readers: Sequence[Callable[[str], Any]]) -> Any:
    expected = []
    for read in readers:
        try:
            return read(word)
        except ValueError as error:
            expected.append(str(error))
    raise ValueError(" or ".join(reversed(expected)))


_READERS: dict[Any, Callable[[str], Any]] = {int: _read_int, float: _read_float, bool: _read_bool, str: str}


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple or any(
        typing.get_origin(one) is tuple for one in typing.get_args(kind)
    )


def _to_json(value: Any) -> Any:
    """A value as `config.json` has it; numbers that JSON lacks (infinity) become words."""
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(flag: _Flag, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return _reader(flag.kind)(value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- argparse, with errors of one line ---


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any):
        formatter = lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110)  # noqa: E731
        super().__init__(argument_default=argparse.SUPPRESS, formatter_class=formatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise FdgError(message.removeprefix("argument "))

    def parse_strictly(self, words: Sequence[str]) -> dict[str, Any]:
        """What was given, by name; refuses what is no flag."""
        known, rest = self.parse_known_args(words)
        unknown = [word for word in rest if word.startswith("-")]
        if unknown:
            name = unknown[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            raise _unknown_flag(name, options)
        if rest:
            raise FdgError(f"'{rest[0]}' belongs to no flag: see --help")
        return vars(known)


def _unknown_flag(name: str, options: Iterable[str]) -> FdgError:
    nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'? (" if nearest else "("
    return FdgError(f"unknown flag '{name}': {hint}--help lists them all)")


def _add(parser: Any, flag: _Flag) -> None:
    """Adds a flag. What is not given stays out of the result: it may come from a preset or an earlier run."""
    read = _reader(flag.kind)

    def checked(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{word}' is not {error}") from None

    if flag.default is None and "None: " in flag.help:  # the help says what happens then
        text = flag.help.replace("None: ", "default: ")
    else:
        shown = "required" if flag.default is dataclasses.MISSING else f"default: {_shown(flag.default)}"
        text = f"{flag.help} ({shown})".strip()
    text = text.replace("%", "%%")
    if flag.kind is bool:
        # A bare flag is true; --no-flag, or a word, says otherwise.
        parser.add_argument(
            flag.option, dest=flag.name, nargs="?", const=True, type=checked, metavar="BOOL", help=text
        )
        parser.add_argument(
            "--no-" + flag.option[2:],
            dest=flag.name,
            action="store_const",
            const=False,
            help=argparse.SUPPRESS,
        )
    elif _is_tuple(flag.kind):
        parser.add_argument(
            flag.option, dest=flag.name, nargs="+", action=_Tuple, type=checked, metavar="N", help=text
        )
    else:
        parser.add_argument(flag.option, dest=flag.name, type=checked, metavar=_metavar(flag.kind), help=text)


def _add_resume(parser: Any) -> None:
    text = "go on with the run in DIR (or in --out), exactly where it was; needs no other flag"
    parser.add_argument("--resume", nargs="?", const="", metavar="DIR", help=text)


class _Tuple(argparse.Action):
    """`--hidden 64 64`, `--hidden 64,64` and `--hidden none`."""

    def __call__(self, parser, namespace, values, option_string=None):
        parts = [part for part in values if part is not None]
        setattr(namespace, self.dest, sum(parts, ()) if parts else None)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return next(
        (name for plain, name in ((bool, "BOOL"), (int, "INT"), (float, "FLOAT")) if _mentions(kind, plain)),
        "NAME",
    )


def _mentions(kind: Any, plain: type) -> bool:
    return kind is plain or plain in typing.get_args(kind)
