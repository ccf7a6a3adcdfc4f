"""Recognises users' environments written for other packages' interfaces, and names their adapters.

Classes are recognised by name, so nothing is imported.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fdg.arguments import check_call

# Base classes of environments, by package.
_BASES = {
    "gymnasium": ("Env",),
    "gym": ("Env",),
    "gymnax": ("Environment",),
    "brax": ("Env",),
    "mujoco_playground": ("MjxEnv",),
    "jumanji": ("Environment",),
    "jaxmarl": ("MultiAgentEnv",),
    "craftax": ("EnvironmentNoAutoReset", "EnvironmentAutoReset"),
    "pettingzoo": ("AECEnv", "ParallelEnv"),
    "dm_env": ("Environment",),
    "envpool": (),
}
_DISPLAY_NAMES = {
    "gymnasium": "Gymnasium", "gym": "OpenAI Gym", "mujoco_playground": "MuJoCo Playground",
    "jumanji": "Jumanji", "jaxmarl": "JaxMARL", "craftax": "Craftax", "pettingzoo": "PettingZoo",
    "envpool": "EnvPool",
}  # fmt: skip
# Modules whose `wrap(env, **parameters)` makes a `SingleEnvironment`.
_ADAPTERS = {
    "gymnax": "envs.from_gymnax",
    "brax": "envs.from_brax",
    "mujoco_playground": "envs.from_brax",  # it has brax's interface
    "jumanji": "envs.from_jumanji",
}
_FIXES = {
    "gym": "derive it from gymnasium.Env",
    "jaxmarl": "write a class of one instance with num_agents, as envs.SingleEnvironment has it",
    "craftax": "write envs.make('Craftax-Symbolic-v1'), or derive your own from gymnax's Environment",
    "pettingzoo": "write a gymnasium.Env of one agent, or envs.SingleEnvironment with num_agents",
    "dm_env": "wrap it as a gymnasium.Env (shimmy.DmControlCompatibilityV0)",
    "envpool": "write envs.make('envpool:NAME')",
}

# Arguments of `from_gymnasium.make` besides the environment's parameters.
_GYMNASIUM_ARGUMENTS = ("workers", "timeout", "restarts", "max_episode_steps")

_converted: dict[Any, Any] = {}  # (factory, parameters) -> result; equal arguments must give equal values


def package_of(env: Any) -> str | None:
    """The package whose interface a class or value implements; None for `envs` and others."""
    kinds = inspect.getmro(env if isinstance(env, type) else type(env))
    return next((p for p in map(_package, kinds) if p in _BASES), None)


def is_gymnasium(env: Any) -> bool:
    """True for a class or instance of Gymnasium's environments."""
    return package_of(env) == "gymnasium"


def to_single(env: Any, **parameters: Any) -> Any:
    """Converts an environment of another package's interface to a `SingleEnvironment`; others are
    unchanged."""
    if isinstance(env, type) or rejection(env) or package_of(env) not in _ADAPTERS:
        return env
    return importlib.import_module(_ADAPTERS[package_of(env) or ""]).wrap(env, **parameters)


def make_by(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """The result of a user's factory, converted by `to_single`.

    Parameters that the class does not accept are passed to its interface, such as gymnax's
    `max_steps_in_episode`.
    """
    accepted = _parameters(factory, parameters)
    is_adapted = isinstance(factory, type) and package_of(factory) in _ADAPTERS
    interface_parameters = {
        name: value
        for name, value in parameters.items()
        if name not in accepted and (is_adapted or name in _GYMNASIUM_ARGUMENTS)
    }
    arguments = {name: value for name, value in parameters.items() if name not in interface_parameters}
    if inspect.isfunction(factory) or inspect.isfunction(getattr(factory, "__init__", None)):
        check_call(factory, (), arguments, "parameter")
    env = factory(**arguments)
    if interface_parameters and not is_adapted and not is_gymnasium(env):
        env = factory(**parameters)  # raises for unknown parameters
    converted = to_single(env, **interface_parameters)
    return (
        env
        if converted is env
        else _converted.setdefault((factory, tuple(sorted(parameters.items()))), converted)
    )


def _parameters(factory: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a C function without signature
        return parameters


def path(factory: Any) -> str:
    """`module:NAME` of a class or a function."""
    return f"{factory.__module__}:{factory.__qualname__}"


def rejection(env: Any) -> str | None:
    """Why `to_single` does not accept a value, and the fix; None if it accepts the value."""
    package = package_of(env)
    if package is None:
        is_proxy = hasattr(env, "default_params") or hasattr(env, "unwrapped")
        return "is a wrapper of another package: give the environment within it" if is_proxy else None
    kind = env if isinstance(env, type) else type(env)
    bases = [(_package(base), base.__name__) for base in kind.__mro__]
    label = f"is an environment of {_DISPLAY_NAMES.get(package, package)}"
    if package == "gymnasium":
        return f"{label}: {_gymnasium_fix(env)}"
    if package in _FIXES:
        return f"{label}: {_FIXES[package]}"
    if (package, "Wrapper") in bases or not any((package, base) in bases for base in _BASES[package]):
        return f"is a wrapper of {_DISPLAY_NAMES.get(package, package)}: give the environment within it"
    return f"is a class: write envs.vectorize({kind.__name__}())" if isinstance(env, type) else None


def _gymnasium_fix(env: Any) -> str:
    inner = env if isinstance(env, type) else getattr(env, "unwrapped", env)
    kind = inner if isinstance(inner, type) else type(inner)
    spec = getattr(inner, "spec", None)
    if spec is not None and _package(kind) == "gymnasium":
        return f"write envs.make('gymnasium:{spec.id}')"
    if kind.__module__ == "__main__":
        move = f"move {kind.__name__} to a file, such as {kind.__name__.lower()}.py"
        return f"{move}, and write envs.make('{kind.__name__.lower()}:{kind.__name__}')"
    return f"write envs.make('{path(kind)}'), whose workers import it"


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
