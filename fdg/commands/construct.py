"""Building what a command line names: values of algorithms and policies."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fdg.commands.flags import dataclass_fields
from fdg.errors import FdgError, listed


def check_kind(cls: type, name: str, env: Any) -> None:
    """Refuses a task in text for an algorithm that acts in environments.

    Raises:
      FdgError: names the algorithms that take one.
    """
    import algos
    from envs.text import is_text

    if is_text(env) and hasattr(cls, "action_spaces"):
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
    from algos.agent import able_in

    spaces = getattr(cls, "action_spaces", None)
    env = values.get("env")
    if spaces and env is not None and not isinstance(env.action_space, tuple(spaces)):
        kinds = " or ".join(space.__name__ for space in spaces)
        able = able_in(env)
        raise FdgError(
            f"{name} acts in {kinds} action spaces, and that of {env.name} is {env.action_space}:"
            f" use --algo {listed(able)}, or another --env"
        )
    try:
        return cls(**values)
    except ValueError as error:  # FdgError is one; a user's own class may raise the plain kind
        raise FdgError(str(error)) from error
