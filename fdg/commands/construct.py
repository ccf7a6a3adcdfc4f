"""Building what a command line names: the algorithm's class, and values of algorithms and policies."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from fdg.commands.flags import dataclass_fields
from fdg.errors import FdgError, unknown_name


def algorithm_class(name: str) -> type:
    """The class that `--algo` names: one of `algos`, or `module:Class` of a user's own.

    Raises:
      FdgError: there is none, or it has no `init` and `iterate`.
    """
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


def check_kind(cls: type, name: str, env: Any) -> None:
    """Refuses a task in text for an algorithm that acts in environments.

    Raises:
      FdgError: names the algorithms that take one.
    """
    import algos
    from envs.text import TextTask

    if isinstance(env, TextTask) and hasattr(cls, "action_spaces"):
        able = ", ".join(algos.names("text"))
        raise FdgError(
            f"--algo {name} acts in environments, and {env.name} is a task in text: use --algo {able}"
        )


def with_staleness(
    policy_class: type, name: str, values: Mapping[str, Any], run: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The policy's fields, with the staleness that was asked for.

    Raises:
      FdgError: the policy has none; names those that do.
    """
    import policies

    staleness = run["staleness"]
    if any(field.name == "staleness" for field in dataclass_fields(policy_class)):
        return {**values, "staleness": staleness}
    if staleness:
        able = [
            other
            for other in policies.names()
            if any(field.name == "staleness" for field in dataclass_fields(policies.get(other)))
        ]
        fix = f"use --policy {' or '.join(able)}" if able else "leave it out"
        raise FdgError(
            f"--staleness {staleness}: under {name}, actors always have the newest parameters: {fix}"
        )
    return values


def construct(cls: type, name: str, values: Mapping[str, Any]) -> Any:
    """An algorithm or a policy from its fields.

    Raises:
      FdgError: a field without a default is missing, or a value does not fit.
    """
    missing = [
        field.name
        for field in dataclass_fields(cls)
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
