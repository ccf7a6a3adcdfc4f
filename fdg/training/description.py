"""Describes an algorithm and a policy by entries of `config.json`, and rebuilds both from these entries."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import algos
import envs
import policies
from envs.text import is_text
from envs.wrappers import unwrapped
from fdg.errors import FdgError, listed, one_line, place_of, user_errors
from fdg.kinds import annotations_of, as_python, dataclass_fields, fits_one_word, is_plain, to_json
from fdg.training.name_resolver import PERMIT_ALL, NameResolver
from fdg.training.settings import AUTO_LAG, read_value
from fdg.training.sweep import restore_sweep, wrapper_entries

_DELAYS = ("staleness", "lag")  # policy fields that `config.json` has at its top level
_SEPARATE_FIELDS = ("env", *_DELAYS)  # fields that are not in "hyperparameters" or "policy_fields"


def describe(algorithm: Any, policy: Any) -> dict[str, Any]:
    """The entries of `config.json` for an algorithm and a policy: their names and fields.

    They include `"rebuilds": false` if they do not determine the algorithm, for example because it has a
    network object or an environment without a name; then the caller of `fdg.load` must give the algorithm.
    """
    if wrapper := wrapper_entries(algorithm):
        return {**describe(algorithm.algorithm, policy), **wrapper}
    env = getattr(algorithm, "env", None)
    config = {
        "algo": _registered_name(type(algorithm), algos),
        "env": None if env is None else _env_name(env),
        **describe_policy(policy),
        "hyperparameters": _plain_fields(algorithm),
    }
    try:
        is_same = _is_equal(rebuild_algorithm(config, PERMIT_ALL), algorithm)
        if not (is_same and _is_equal(rebuild_policy(config, PERMIT_ALL), policy)):
            config["rebuilds"] = False
    except Exception:  # a user's class may raise anything
        config["rebuilds"] = False
    return config


def describe_policy(policy: Any) -> dict[str, Any]:
    """The entries of `config.json` for a policy: its name and fields."""
    return {
        "policy": _registered_name(type(policy), policies),
        "policy_fields": _plain_fields(policy),
        **{delay: as_python(getattr(policy, delay, 0)) for delay in _DELAYS},
    }


def rebuild_algorithm(config: Mapping[str, Any], resolver: NameResolver, label: str = "this run") -> Any:
    """Rebuilds the algorithm of a configuration; errors call its run `label`."""
    if config.get("rebuilds") is False:
        raise FdgError(
            f"{label} was trained from Python with an algorithm that config.json cannot describe"
            f" ({config.get('algo')}{_undescribed_part(config, resolver)}): give it as algorithm=..."
        )
    with _explain_unfit(label):
        cls = resolver.algorithm_class(config["algo"])
        values = read_fields(resolver.file, "hyperparameters", config, cls, config["algo"])
        resolver.check_fields(cls, values)
        if config.get("env") is not None:
            name, parameters = resolver.environment(config["env"])
            values["env"] = envs.make(name, **parameters)
        return build_algorithm({**config, "hyperparameters": values}, resolver)


def _undescribed_part(config: Mapping[str, Any], resolver: NameResolver) -> str:
    """The part of the algorithm that its configuration does not describe, for an error message."""
    try:
        name, parameters = resolver.environment(config.get("env") or "")
        envs.make(name, **parameters)
    except FdgError:
        name_text = (
            f"{config['env']!r:.60}, which envs.make does not know" if config.get("env") else "without a name"
        )
        return f" in an environment of its own, {name_text}"
    return ", perhaps with your own network or environment wrapper"


def rebuild_policy(config: Mapping[str, Any], resolver: NameResolver, label: str = "this run") -> Any:
    """Rebuilds the policy of a configuration; errors call its run `label`."""
    with _explain_unfit(label):
        cls = resolver.policy_class(config["policy"])
        fields = read_fields(resolver.file, "policy_fields", config, cls, config["policy"])
        return build_policy({**config, "policy_fields": fields}, resolver)


def read_fields(
    file: Path | None, part: str, config: Mapping[str, Any], cls: Any, owner: str
) -> dict[str, Any]:
    """Converts `policy_fields` or `hyperparameters` (`part`) of a configuration to Python values."""
    annotations = annotations_of(cls)
    fields = {field.name: field for field in dataclass_fields(cls) if field.init and field.name != "env"}
    values = {}
    for name, value in config.get(part, {}).items():
        if name not in fields:
            raise FdgError(f"{file} has {name!r:.60} in {part}, which {owner} lacks")
        annotation = fields[name].metadata.get("flag", annotations[name])
        is_default = value is None and fields[name].default is None
        is_word = fits_one_word(annotation) and not is_default
        values[name] = read_value(file, name, value, annotation) if is_word else _with_tuples(value)
    return values


def build_algorithm(config: Mapping[str, Any], resolver: NameResolver) -> Any:
    """Builds the algorithm of a configuration whose hyperparameters, including `env`, are Python values."""
    name, values = config["algo"], resolver.with_dataset_of_run_directory(config["hyperparameters"])
    env: Any = values.get("env")
    cls = resolver.algorithm_class(name)
    spaces = getattr(cls, "action_spaces", None)
    if is_text(env) and spaces is not None:
        suitable = ", ".join(algos.names("text"))
        raise FdgError(
            f"--algo {name} acts in environments, and {env.name} is a text task: use --algo {suitable}"
        )
    if spaces and env is not None and not isinstance(env.action_space, tuple(spaces)):
        spaces_text = " or ".join(space.__name__ for space in spaces)
        raise FdgError(
            f"{name} acts in {spaces_text} action spaces, and that of {env.name} is {env.action_space}:"
            f" use --algo {listed(algos.able_in(env))}, or another --env"
        )
    algorithm = _construct(cls, name, values)
    if config.get("self_play") is not None:
        algorithm = algos.SelfPlay.from_text(algorithm, str(config["self_play"]))
    return restore_sweep(algorithm, config)


def build_policy(config: Mapping[str, Any], resolver: NameResolver) -> Any:
    """Builds the policy of a configuration whose `policy_fields` are Python values."""
    name, values = config["policy"], dict(config["policy_fields"])
    cls = resolver.policy_class(name)
    for delay in _DELAYS:
        value = config.get(delay, 0)
        if _has_field(cls, delay):
            values[delay] = 0 if value == AUTO_LAG else value
        elif value:
            names = [other for other in policies.names() if _has_field(policies.get(other), delay)]
            fix = f"use --policy {' or '.join(names)}" if names else "leave it out"
            raise FdgError(
                f"--{delay} {value}: under {name}, actors always have the newest parameters: {fix}"
            )
    if name == "auto:measure":
        values["measure"] = True
    return _construct(cls, name, values)


def _has_field(policy_class: Any, name: str) -> bool:
    return any(field.name == name for field in dataclass_fields(policy_class))


def _construct(cls: type, name: str, values: Mapping[str, Any]) -> Any:
    """Constructs an algorithm or a policy from its fields."""
    fields = {field.name: field for field in dataclass_fields(cls) if field.init}
    for field in fields.values():
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise FdgError(f"{name} needs --{field.name.replace('_', '-')}: it has no default")
    fix, note = "give the class a field", ""
    if not dataclasses.is_dataclass(cls):
        fix = "put @dataclasses.dataclass(frozen=True) above the class, and give it a field"
        note = " without arguments, since it is not a dataclass,"
    if unknown := next((field for field in values if field not in fields), None):
        raise FdgError(f"{name}{place_of(cls)} has no field {unknown}: {fix} {unknown}")
    with user_errors(f"{name}(...){note}", cls):
        try:
            return cls(**values)
        except ValueError as error:  # an FdgError, or a plain ValueError of a user's class
            raise FdgError(str(error)) from error


@contextlib.contextmanager
def _explain_unfit(label: str) -> Iterator[None]:
    """Turns errors about unsuitable values in a configuration into one-line errors."""
    try:
        yield
    except FdgError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FdgError(f"{label}: its config.json does not fit ({one_line(error)})") from error


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal; classes without `__eq__` are compared by their attributes."""
    if a == b:
        return True
    is_plain = not dataclasses.is_dataclass(a) and hasattr(a, "__dict__")
    return is_plain and type(a) is type(b) and vars(a) == vars(b)


def _registered_name(cls: type, registry: Any) -> str:
    """The name of a class in `algos` or `policies`; `module:Class` for a user's class."""
    names = (name for name in registry.names() if registry.get(name) is cls)
    return next(names, f"{cls.__module__}:{cls.__qualname__}")


def _env_name(env: Any) -> str | None:
    """The `NAME?PARAMETER=VALUE` from which `envs.make` makes this environment; None if there is none."""
    if (full_name := envs.name_with_parameters(env)) is not None:
        return full_name
    env, wrappers = unwrapped(env)
    if wrappers and (full_name := _env_name(env)) is not None:
        return f"{full_name}{'&' if '?' in full_name else '?'}{_query_text(wrappers)}"
    name = getattr(env, "name", None)
    overrides = dict(getattr(getattr(env, "single", env), "overrides", ()))
    overrides |= dict(getattr(getattr(env, "source", None), "options", ()))
    query = _query_text(overrides)
    return None if name is None else f"{name}?{query}" if query else str(name)


def _query_text(parameters: Mapping[str, Any]) -> str:
    return "&".join(f"{key}={value!r}" for key, value in parameters.items())


def _plain_fields(value: Any) -> dict[str, Any]:
    """The fields that a file can store, as JSON values, without `_SEPARATE_FIELDS`."""
    fields = {f.name: as_python(getattr(value, f.name)) for f in dataclass_fields(type(value)) if f.init}
    return {name: to_json(x) for name, x in fields.items() if name not in _SEPARATE_FIELDS and is_plain(x)}


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
