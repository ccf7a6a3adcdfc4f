"""Adapts users' environments that are written for other packages' interfaces, or says what to write instead.

Classes are recognised by the names of their base classes and packages, so no package is imported.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fdg.arguments import check_call
from fdg.errors import FdgError

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
_DISPLAY_NAMES = {  # package -> its name in messages, if it differs
    "gymnasium": "Gymnasium", "gym": "OpenAI Gym", "mujoco_playground": "MuJoCo Playground",
    "jumanji": "Jumanji", "jaxmarl": "JaxMARL", "craftax": "Craftax", "pettingzoo": "PettingZoo",
    "envpool": "EnvPool",
}  # fmt: skip
# Modules whose `adapt(env, **parameters)` makes a `SingleEnvironment`.
_ADAPTERS = {
    "gymnax": "envs.from_gymnax",
    "brax": "envs.from_brax",
    "mujoco_playground": "envs.from_brax",  # it has brax's interface
    "jumanji": "envs.from_jumanji",
}
_FIXES = {  # package without an adapter -> what to do, the end of an error message
    "gym": "derive it from gymnasium.Env",
    "jaxmarl": "write a class with the methods of envs.SingleEnvironment, and an attribute num_agents",
    "craftax": "write envs.make('Craftax-Symbolic-v1'), or derive your own from gymnax's Environment",
    "pettingzoo": "write a gymnasium.Env of one agent, or envs.SingleEnvironment with num_agents",
    "dm_env": "wrap it as a gymnasium.Env (shimmy.DmControlCompatibilityV0)",
    "envpool": "write envs.make('envpool:NAME')",
}

# Arguments of `envs.from_gymnasium.make` that are not passed to the environment's factory.
_GYMNASIUM_ARGUMENTS = ("workers", "timeout", "restarts", "max_episode_steps")

# Adapted environments, by factory and parameters: equal arguments give the same object.
_adapted: dict[Any, Any] = {}


def package_of(env: Any) -> str | None:
    """The package whose interface a class or value implements; None for ours."""
    kinds = inspect.getmro(env if isinstance(env, type) else type(env))
    return next((package for package in map(_top_package, kinds) if package in _BASES), None)


def is_of_gymnasium(env: Any) -> bool:
    """True for a class or instance of Gymnasium's environments."""
    return package_of(env) == "gymnasium"


def as_single_environment(env: Any, **parameters: Any) -> Any:
    """Converts an environment that has an adapter to a `SingleEnvironment`; returns others unchanged."""
    if isinstance(env, type) or reason_not_adapted(env) or package_of(env) not in _ADAPTERS:
        return env
    return importlib.import_module(_ADAPTERS[package_of(env) or ""]).adapt(env, **parameters)


def make_and_adapt(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Calls a user's factory, and adapts the result by `as_single_environment`.

    Parameters that the factory does not take go to the adapter, such as gymnax's `max_steps_in_episode`. A
    Gymnasium environment is returned unchanged: the caller then gives factory and parameters to
    `from_gymnasium.make`, whose worker processes call the factory again.
    """
    try:
        accepted: Mapping[str, Any] = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a C function without signature
        accepted = parameters
    may_be_adapted = package_of(factory) in _ADAPTERS or (
        inspect.isfunction(factory) and not any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    )
    of_workers = {name for name in _GYMNASIUM_ARGUMENTS if name not in accepted}
    adapter_parameters = {
        name: value
        for name, value in parameters.items()
        if name in of_workers or (may_be_adapted and name not in accepted)
    }
    arguments = {name: value for name, value in parameters.items() if name not in adapter_parameters}

    def call(arguments: Mapping[str, Any]) -> Any:
        if inspect.isfunction(factory) or inspect.isfunction(getattr(factory, "__init__", None)):
            try:
                check_call(factory, (), arguments, "parameter")
            except FdgError:  # a parameter is missing, perhaps because its name has a typing error
                own = {name: value for name, value in parameters.items() if name not in of_workers}
                check_call(factory, (), own, "parameter")
                raise
        return factory(**arguments)

    env = call(arguments)
    is_for_workers = is_of_gymnasium(env) and adapter_parameters.keys() <= of_workers
    if adapter_parameters and not is_for_workers and package_of(env) not in _ADAPTERS:
        if is_of_gymnasium(env):
            env.close()
        env = call(parameters)  # raises the error for the unknown parameters
    adapted = as_single_environment(env, **adapter_parameters)
    if adapted is env:
        return env
    # The text tells 1, 1.0 and True apart.
    key = factory, tuple(sorted((name, repr(value), value) for name, value in parameters.items()))
    return _adapted.setdefault(key, adapted)


def import_name(factory: Any, found_at: str) -> str:
    """`module:NAME` of a class or function; `found_at` if it has no such name, as a partial or a lambda."""
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is factory else found_at


def reason_not_adapted(env: Any) -> str | None:
    """Why `as_single_environment` cannot adapt a value, and the fix, as the end of an error message.

    None if it can adapt the value, or the value has no other package's interface.
    """
    package = package_of(env)
    if package is None:
        name = next((name for name in ("default_params", "unwrapped") if hasattr(env, name)), None)
        kind = env if isinstance(env, type) else type(env)
        if name is None or "envs" in map(_top_package, kind.__mro__):
            return None
        return (
            f"has {name}, as wrappers of other packages do: give the environment within it, or, if it is no"
            f" wrapper, call {name} something else"
        )
    kind = env if isinstance(env, type) else type(env)
    bases = [(_top_package(base), base.__name__) for base in kind.__mro__]
    subject = f"is an environment of {_DISPLAY_NAMES.get(package, package)}"
    if package == "gymnasium":
        return f"{subject}: {_gymnasium_fix(env)}"
    if package in _FIXES:
        return f"{subject}: {_FIXES[package]}"
    if (package, "Wrapper") in bases or not any((package, base) in bases for base in _BASES[package]):
        return f"is a wrapper of {_DISPLAY_NAMES.get(package, package)}'s: give the environment within it"
    return f"is a class: write envs.vectorize({kind.__name__}())" if isinstance(env, type) else None


def _gymnasium_fix(env: Any) -> str:
    """What to write in place of a class or instance of Gymnasium's environments."""
    innermost = env if isinstance(env, type) else getattr(env, "unwrapped", env)
    kind = innermost if isinstance(innermost, type) else type(innermost)
    spec = getattr(innermost, "spec", None)
    if spec is not None and _top_package(kind) == "gymnasium":
        return f"write envs.make('gymnasium:{spec.id}')"
    if kind.__module__ == "__main__":
        advice = f"put {kind.__name__} into its own file, such as {kind.__name__.lower()}.py"
        return f"{advice}, and write envs.make('{kind.__name__.lower()}:{kind.__name__}')"
    name = f"{kind.__module__}:{kind.__qualname__}"
    return f"write envs.make('{name}'); worker processes import the class by this name"


def _top_package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
