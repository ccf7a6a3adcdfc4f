"""Errors for unknown names of fdg's packages, and for calls of a module instead of its class."""

import difflib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fdg.errors import FdgError, NoAttributeError


def no_attribute(package: str, name: str, known: Iterable[str], hint: str | None = None) -> AttributeError:
    """The error for an unknown name of a package; an `FdgError` if there is a suggestion.

    `hint` is the suggestion; None suggests the nearest known name.

    >>> no_attribute("algos", "Ppo", ["PPO", "DQN"])
    NoAttributeError('algos has no Ppo: it is algos.PPO')
    """
    unknown = AttributeError(f"module '{package}' has no attribute '{name}'")
    if name.startswith("__"):  # `inspect` and pytest look these up thousands of times
        return unknown
    names = {candidate.lower(): candidate for candidate in known}
    similar = [
        names[candidate] for candidate in difflib.get_close_matches(name.lower(), names, 1, cutoff=0.7)
    ]
    if not (hint or similar):
        return unknown
    return NoAttributeError(f"{package} has no {name}: {hint or f'it is {package}.{similar[0]}'}")


def submodule(package: str, name: str) -> types.ModuleType | None:
    """Imports a module of a package; None if it does not exist."""
    if (
        name.startswith("_")
        or not name.isidentifier()
        or importlib.util.find_spec(f"{package}.{name}") is None
    ):
        return None
    return importlib.import_module(f"{package}.{name}")


def submodules(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose modules are imported on first use."""

    def get_attribute(name: str) -> Any:
        module = submodule(package, name)
        if module is None:
            raise no_attribute(package, name, ())
        return module

    return get_attribute


class _UncallableModule(types.ModuleType):
    """A module that raises an error with the right call when it is called."""

    instead = ""  # the call to write, such as `algos.PPO(...)`

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise FdgError(f"{self.__name__} is a module: write {self.instead}")


def explain_calls(package: str, classes: Mapping[str, str]) -> None:
    """Makes a call of a module raise an `FdgError` with the class to call; `classes`: module -> class."""
    for name, cls in classes.items():
        module: Any = sys.modules.get(f"{package}.{name}")
        if module is not None and type(module) is types.ModuleType:
            module.__class__ = _UncallableModule
            vars(module)["instead"] = f"{package}.{cls}(...)"
