"""Mistakes with the names that our packages have: an unknown one, and a module in the place of its class."""

import difflib
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from fdg.errors import FdgError, NoAttributeError


def no_attribute(package: str, name: str, known: Iterable[str], meant: str | None = None) -> AttributeError:
    """Error for an unknown name of a package; an `FdgError` too where it can say what to write.

    Args:
      package: its name.
      name: the unknown one.
      known: the package's public names.
      meant: what to say in place of the nearest of these.

    >>> no_attribute("algos", "Ppo", ["PPO", "DQN"])
    NoAttributeError('algos has no Ppo: it is algos.PPO')
    """
    names = {one.lower(): one for one in known}
    close = [names[one] for one in difflib.get_close_matches(name.lower(), names, 1, cutoff=0.7)]
    if name.startswith("__") or not (meant or close):
        return AttributeError(f"module '{package}' has no attribute '{name}'")
    return NoAttributeError(f"{package} has no {name}: {meant or f'it is {package}.{close[0]}'}")


class _Module(types.ModuleType):
    """A module that says what to call in its place."""

    instead = ""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise FdgError(f"{self.__name__} is a module: write {self.instead}")


def explain_calls(package: str, classes: Mapping[str, type]) -> None:
    """Makes a call of a module that is named as its class an `FdgError` that says what to write.

    Args:
      package: the package's name.
      classes: those of its modules that have one, by the module's name.
    """
    for name, cls in classes.items():
        module: Any = sys.modules.get(f"{package}.{name}")
        if module is not None and type(module) is types.ModuleType:
            module.__class__ = _Module
            vars(module)["instead"] = f"{package}.{cls.__name__}(...)"
