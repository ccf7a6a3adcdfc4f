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
    Then only `names` are forwarded: a mapping from an old name to "name" or "module:name", or a text of words
    "name", "module:name" or "old=name".
    """
    if isinstance(names, str):
        pairs = (word.rpartition("=")[::2] for word in names.split())
        names = {old_name or target.rpartition(":")[2]: target for old_name, target in pairs}

    def get_attribute(name: str) -> Any:
        target = name if names is None else names.get(name, "_")  # "_" for a name that did not move
        other_module, _, new_name = target.rpartition(":")
        module = other_module or new
        value = None if new_name.startswith("_") else getattr(importlib.import_module(module), new_name, None)
        if value is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        deprecated = old if names is None else f"{old}.{name}"
        warnings.warn(
            f"{deprecated} is deprecated: write from {module} import {new_name}", DeprecationWarning, 2
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
