"""Old names of renamed modules, which work, with a deprecation warning, until the next release."""

import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(old: str, new: str, names: Mapping[str, str] | str | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a renamed module: forwards to the new one, with a deprecation warning.

    A module from which some names moved uses it too: `__getattr__ = moved("algos.old", "algos.new", names)`.
    Then `names`, old -> new, are the only names that it forwards.
    """
    if isinstance(names, str):
        pairs = (word.rpartition("=")[::2] for word in names.split())
        names = {old_name or there.rpartition(":")[2]: there for old_name, there in pairs}

    def get_attribute(name: str) -> Any:
        new_name = name if names is None else names.get(name, "_")
        value = None if new_name.startswith("_") else getattr(importlib.import_module(new), new_name, None)
        if value is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        deprecated = old if names is None else f"{old}.{name}"
        warnings.warn(
            f"{deprecated} is deprecated: write from {new} import {new_name}", DeprecationWarning, 2
        )
        return value

    return get_attribute


def keep_names(modules: Mapping[str, str]) -> None:
    """Makes `import old` and `from old import name` work for each renamed module, old -> new."""
    for old, new in modules.items():
        module = types.ModuleType(old, f"Deprecated name of `{new}`, which works until the next release.")
        module.__spec__ = importlib.machinery.ModuleSpec(old, None)
        vars(module)["__getattr__"] = moved(old, new)
        sys.modules[old] = module
