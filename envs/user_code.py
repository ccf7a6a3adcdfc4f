"""Imports `module:name` for users: environments and other values."""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from envs import foreign, from_gymnasium
from envs.checking import check_spec
from envs.environment import Vectorized, vectorize
from envs.host import HostEnvironment
from envs.text.game import is_text, missing_members
from envs.text.task import TextTask
from fdg.arguments import check_options
from fdg.errors import FdgError, module_of_file, raised, unknown_name

ENTRY_POINTS = "fdg.environments"  # the group where installed packages register environments


def module_of(name: str, known: Iterable[str]) -> str | None:
    """The module of `module:name`; None if there is no colon, or known names have this prefix.

    >>> module_of("mine.deep:maze", ["brax:ant"]), module_of("brax:antt", ["brax:ant"]), module_of("Maze", [])
    ('mine.deep', None, None)
    """
    module, colon, _ = name.partition(":")
    prefixes = {known_name.partition(":")[0] for known_name in known if ":" in known_name}
    return module if colon and module not in prefixes else None


def import_attribute(what: str, name: str, is_candidate: Callable[[Any], bool] = callable) -> Any:
    """Imports the module of `module:name` and returns the attribute; `name` may have dots.

    Call it only if the user gave the name or trusts the file that did: see `fdg.training.name_resolver`.
    Messages begin with `what` ("environment", "--network"). If the module lacks the attribute, the error
    lists those of its attributes that are candidates.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise FdgError(f"{what} '{name}': no name follows the colon: write {module_name}:NAME")
    try:
        value = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        is_absent = missing is not None and (module_name + ".").startswith(f"{missing}.")
        if not is_absent and "" not in module_name.split("."):  # importlib refuses names such as .a
            raise FdgError(f"{what} '{name}': importing {module_name} fails: {raised(error)}") from error
        suggested_module = module_of_file(
            module_name if "/" not in module_name else f"{module_name.removesuffix('.py')}.py"
        )
        fix = (
            f"write {suggested_module}:{attribute}"
            if suggested_module
            else "run from the folder that holds it, or put that folder in PYTHONPATH"
        )
        raise FdgError(f"{what} '{name}': there is no module '{module_name}': {fix}") from None
    for part in attribute.split("."):
        if not hasattr(value, part) and module_name == "__main__":
            raise FdgError(
                f"{what} '{name}' is from a script or notebook that is not this program: move it into a"
                " module that both import, or, in Python, define it here and pass the object (fdg.load(...,"
                " algorithm=...))"
            )
        if not hasattr(value, part):
            public_attributes = {
                key: item for key, item in getattr(value, "__dict__", {}).items() if not key.startswith("_")
            }
            candidates = [key for key, item in public_attributes.items() if is_candidate(item)] or [
                k for k in public_attributes if callable(public_attributes[k])
            ]
            raise unknown_name(f"{what} in {module_name}", attribute, candidates) from None
        value = getattr(value, part)
    return value


def make(name: str, overrides: Mapping[str, Any]) -> Any:
    """Makes the environment or text task of `module:name`.

    The name stands for a function or class, which is called with `overrides`, or for an environment.

    Raises:
      FdgError: `import_attribute` raises; or the factory fails, or its result is not an environment.
    """
    return build(name, import_attribute("environment", name), overrides)


def build(name: str, factory: Any, overrides: Mapping[str, Any], found_at: str | None = None) -> Any:
    """Calls a factory or takes an instance; vectorizes a `SingleEnvironment`; wraps a `TextProblem`.

    `found_at` is the `module:name` of the factory, unless `name` is.
    """
    arguments = ", ".join(f"{parameter}={value!r}" for parameter, value in overrides.items())
    if isinstance(factory, type) and foreign.is_of_gymnasium(factory):
        return from_gymnasium.make(foreign.import_name(factory, found_at or name), **overrides)
    is_value = not isinstance(factory, type) and (
        _is_text(factory) or (hasattr(factory, "reset") and hasattr(factory, "step"))
    )
    if not is_value and not callable(factory):
        raise FdgError(
            f"environment '{name}' is of type {type(factory).__name__}: name a class, a function or an"
            " environment"
        )
    if is_value and overrides:
        raise FdgError(
            f"environment '{name}' is an instance, which takes no {arguments}: name its class or factory"
        )
    try:
        check_options(f"environment '{name}'", factory, overrides)
        env = factory if is_value else foreign.make_and_adapt(factory, overrides)
    except FdgError:
        raise
    except Exception as error:  # the user's code may raise anything
        problem = f"does not take {arguments}" if overrides else "cannot be made"
        raise FdgError(f"environment '{name}' {problem}: {raised(error)}") from error
    if foreign.is_of_gymnasium(env) and not is_value:
        env.close()
        return from_gymnasium.make(foreign.import_name(factory, found_at or name), **overrides)
    if env is None:
        raise FdgError(
            f"environment '{name}': {name.rpartition(':')[2]} returned None: return the environment"
        )
    if description := missing_members(env):
        raise FdgError(f"environment '{name}': {type(env).__name__} is {description}")
    if _is_text(env):
        return env if is_text(env) else TextTask(env)
    if not isinstance(env, Vectorized | HostEnvironment) and _takes_one_key(env):
        env = vectorize(env)
    check_spec(env)
    return env


@functools.cache
def entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """The environments that installed packages register, by name; imports none of them."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def make_of_package(name: str, overrides: Mapping[str, Any]) -> Any:
    """Makes the environment that an installed package registers."""
    point = entry_points()[name]
    try:
        factory = point.load()
    except Exception as error:
        package = point.dist.name if point.dist is not None else point.value
        raise FdgError(
            f"environment '{name}': {package} registers it as {point.value}, which cannot be imported:"
            f" {raised(error)}"
        ) from error
    return build(name, factory, overrides, point.value)


def _is_text(value: Any) -> bool:
    """Whether a value (not a class) is a text task, a text game or a `TextProblem`."""
    is_problem = callable(getattr(value, "draw", None)) and callable(getattr(value, "prompt", None))
    return not isinstance(value, type) and (is_text(value) or is_problem)


def _takes_one_key(env: Any) -> bool:
    """Whether an environment is not vectorized: the argument of its `reset` is not named `keys`."""
    try:
        return next(iter(inspect.signature(env.reset).parameters), None) != "keys"
    except (AttributeError, TypeError, ValueError):
        return False
