"""Renamed modules: their old names work, with a deprecation warning, until the next release."""

import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(old: str, new: str, names: Mapping[str, str] | str | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a renamed module: forwards to the new one, with a deprecation warning.

    A module that only lost some names takes it too: `__getattr__ = moved("algos.old", "algos.new")`. `names`
    are the only names that it forwards, old -> new, or old -> "module:new" of another one; as a text, words
    "new", "module:new" or "old=new".
    """
    if isinstance(names, str):
        pairs = (word.rpartition("=")[::2] for word in names.split())
        names = {old_name or there.rpartition(":")[2]: there for old_name, there in pairs}

    def attribute(name: str) -> Any:
        other, _, there = (name if names is None else names.get(name, "_")).rpartition(":")
        module = other or new
        value = None if there.startswith("_") else getattr(importlib.import_module(module), there, None)
        if value is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        what = old if names is None else f"{old}.{name}"
        warnings.warn(f"{what} is deprecated: write from {module} import {there}", DeprecationWarning, 2)
        return value

    return attribute


def keep_names(modules: Mapping[str, str]) -> None:
    """Lets `import old` and `from old import name` work for each renamed module, old -> new."""
    for old, new in modules.items():
        module = types.ModuleType(old, f"Deprecated name of `{new}`, which works until the next release.")
        module.__spec__ = importlib.machinery.ModuleSpec(old, None)
        vars(module)["__getattr__"] = moved(old, new)
        sys.modules[old] = module
