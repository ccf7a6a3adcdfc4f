"""Describes an algorithm and a policy as `config.json` stores them, and rebuilds both from that."""

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
from fdg.errors import FdgError, listed, one_line, own_code, place_of
from fdg.kinds import annotations_of, dataclass_fields, is_writable, to_json
from fdg.training.name_resolver import CALLER, NameResolver
from fdg.training.settings import AUTO_LAG, read_value
from fdg.training.sweep import said_of, with_recorded_sweep

_DELAYS = ("staleness", "lag")  # of the actors' parameters
_KEPT_APART = ("env", *_DELAYS)


def describe(algorithm: Any, policy: Any) -> dict[str, Any]:
    """The names and fields of an algorithm and a policy, as on the command line.

    A file cannot store a network object, or an environment without a name. Then it stores `"rebuilds":
    false`, and `fdg.load` needs the algorithm from its caller.
    """
    if around := said_of(algorithm):
        return {**describe(algorithm.algorithm, policy), **around}
    env = getattr(algorithm, "env", None)
    found = {
        "algo": _name_of(type(algorithm), {name: algos.get(name) for name in algos.names()}),
        "env": None if env is None else _env_name(env),
        **describe_policy(policy),
        "hyperparameters": _fields(algorithm),
    }
    try:
        again, same_policy = rebuild(found, CALLER)
        if not (_equal(again, algorithm) and _equal(same_policy, policy)):
            found["rebuilds"] = False
    except Exception:  # a user's class may raise anything
        found["rebuilds"] = False
    return found


def describe_policy(policy: Any) -> dict[str, Any]:
    """The name and fields of a policy."""
    return {
        "policy": _name_of(type(policy), {name: policies.get(name) for name in policies.names()}),
        "policy_fields": _fields(policy),
        **{delay: getattr(policy, delay, 0) for delay in _DELAYS},
    }


def rebuild(config: Mapping[str, Any], resolver: NameResolver, where: str = "this run") -> tuple[Any, Any]:
    """Rebuilds the algorithm and the policy of a configuration."""
    if config.get("rebuilds") is False:
        raise FdgError(
            f"{where} was trained from Python with an algorithm that config.json cannot describe"
            f" ({config.get('algo')}{_undescribed_part(config, resolver)}): give it, with algorithm=..."
        )
    with _fitting(where):
        cls = resolver.algorithm_class(config["algo"])
        values = read_fields(resolver.file, "hyperparameters", config, cls, config["algo"])
        resolver.check_fields(cls, values)
        if config.get("env") is not None:
            name, parameters = resolver.environment(config["env"])
            values["env"] = envs.make(name, **parameters)
        algorithm = build_algorithm({**config, "hyperparameters": values}, resolver)
    return algorithm, rebuild_policy(config, resolver, where)


def _undescribed_part(config: Mapping[str, Any], resolver: NameResolver) -> str:
    """The part of the algorithm that its configuration does not describe, for an error message."""
    try:
        name, parameters = resolver.environment(config.get("env") or "")
        envs.make(name, **parameters)
    except FdgError:
        named = f"{config['env']!r:.60}, which no name here makes" if config.get("env") else "of no name"
        return f" in an environment of its own, {named}"
    return ", say with a network, or in a wrapper of its environment, that is your own"


def rebuild_policy(config: Mapping[str, Any], resolver: NameResolver, where: str = "this run") -> Any:
    """Only the policy, for runs whose algorithm cannot be rebuilt; arguments and errors as for `rebuild`."""
    with _fitting(where):
        cls = resolver.policy_class(config["policy"])
        fields = read_fields(resolver.file, "policy_fields", config, cls, config["policy"])
        return build_policy({**config, "policy_fields": fields}, resolver)


def read_fields(
    file: Path | None, part: str, config: Mapping[str, Any], cls: Any, owner: str
) -> dict[str, Any]:
    """`policy_fields` or `hyperparameters` of a configuration, as Python values."""
    kinds = annotations_of(cls)
    fields = {field.name: field for field in dataclass_fields(cls) if field.init and field.name != "env"}
    found = {}
    for name, value in config.get(part, {}).items():
        if name not in fields:
            raise FdgError(f"{file} has {name!r:.60} in {part}, which {owner} lacks")
        kind = fields[name].metadata.get("flag", kinds[name])
        if is_writable(kind) and not (value is None and fields[name].default is None):
            found[name] = read_value(file, name, value, kind)
        else:
            found[name] = _with_tuples(value)
    return found


def build_algorithm(config: Mapping[str, Any], resolver: NameResolver) -> Any:
    """The algorithm of a configuration whose hyperparameters, with `env`, are Python values."""
    name, values = config["algo"], resolver.kept(config["hyperparameters"])
    env: Any = values.get("env")
    cls = resolver.algorithm_class(name)
    spaces = getattr(cls, "action_spaces", None)
    if is_text(env) and spaces is not None:
        able = ", ".join(algos.names("text"))
        raise FdgError(
            f"--algo {name} acts in environments, and {env.name} is a task in text: use --algo {able}"
        )
    if spaces and env is not None and not isinstance(env.action_space, tuple(spaces)):
        kinds = " or ".join(space.__name__ for space in spaces)
        raise FdgError(
            f"{name} acts in {kinds} action spaces, and that of {env.name} is {env.action_space}:"
            f" use --algo {listed(algos.able_in(env))}, or another --env"
        )
    algorithm = _construct(cls, name, values)
    if config.get("self_play") is not None:
        algorithm = algos.SelfPlay.from_text(algorithm, str(config["self_play"]))
    return with_recorded_sweep(algorithm, config)


def build_policy(config: Mapping[str, Any], resolver: NameResolver) -> Any:
    """The policy of a configuration whose `policy_fields` are Python values."""
    name, values = config["policy"], dict(config["policy_fields"])
    cls = resolver.policy_class(name)
    for delay in _DELAYS:
        asked = config.get(delay, 0)
        if _has(cls, delay):
            values[delay] = 0 if asked == AUTO_LAG else asked
        elif asked:
            able = [other for other in policies.names() if _has(policies.get(other), delay)]
            fix = f"use --policy {' or '.join(able)}" if able else "leave it out"
            raise FdgError(
                f"--{delay} {asked}: under {name}, actors always have the newest parameters: {fix}"
            )
    if name == "auto:measure":
        values["measure"] = True
    return _construct(cls, name, values)


def _has(policy_class: Any, name: str) -> bool:
    return any(field.name == name for field in dataclass_fields(policy_class))


def _construct(cls: type, name: str, values: Mapping[str, Any]) -> Any:
    """An algorithm or a policy from its fields."""
    missing = [
        field.name
        for field in dataclass_fields(cls)
        if field.init
        and values.get(field.name, field.default) is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise FdgError(f"{name} needs --{missing[0].replace('_', '-')}: it has no default")
    known = {field.name for field in dataclass_fields(cls) if field.init}
    if odd := [one for one in values if one not in known]:
        fix = "put @dataclasses.dataclass(frozen=True) above the class, and give it a field"
        if dataclasses.is_dataclass(cls):
            fix = "give the class a field"
        raise FdgError(f"{name}{place_of(cls)} has no field {odd[0]}: {fix} {odd[0]}")
    plain = "" if dataclasses.is_dataclass(cls) else " of no arguments, for it is no dataclass,"
    with own_code(f"{name}(...){plain}", cls):
        try:
            return cls(**values)
        except ValueError as error:  # FdgError is one; a user's own class may raise the plain kind
            raise FdgError(str(error)) from error


@contextlib.contextmanager
def _fitting(where: str) -> Iterator[None]:
    """Turns errors about unsuitable values into one-line errors."""
    try:
        yield
    except FdgError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FdgError(f"{where}: its config.json does not fit ({one_line(error)})") from error


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; classes without `__eq__` are compared by their attributes."""
    if one == other:
        return True
    plain = not dataclasses.is_dataclass(one) and hasattr(one, "__dict__")
    return plain and type(one) is type(other) and vars(one) == vars(other)


def _name_of(cls: type, known: Mapping[str, type]) -> str:
    return next((name for name, one in known.items() if one is cls), f"{cls.__module__}:{cls.__qualname__}")


def _env_name(env: Any) -> str | None:
    """The name by which `envs.make` makes this environment, with its overrides if it keeps them."""
    if (spelled := envs.spelled(env)) is not None:
        return spelled
    env, around = unwrapped(env)
    if around and (spelled := _env_name(env)) is not None:
        return f"{spelled}{'&' if '?' in spelled else '?'}{_options(around)}"
    name = getattr(env, "name", None)
    overrides = dict(getattr(getattr(env, "single", env), "overrides", ()))
    overrides |= dict(getattr(getattr(env, "source", None), "options", ()))
    text = _options(overrides)
    return None if name is None else f"{name}?{text}" if text else str(name)


def _options(parameters: Mapping[str, Any]) -> str:
    return "&".join(f"{key}={value!r}" for key, value in parameters.items())


def _fields(value: Any) -> dict[str, Any]:
    """The fields that a file can store."""
    fields = {f.name: getattr(value, f.name) for f in dataclass_fields(type(value)) if f.init}
    return {
        name: to_json(item) for name, item in fields.items() if name not in _KEPT_APART and _is_plain(item)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
