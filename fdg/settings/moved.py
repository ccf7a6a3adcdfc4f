"""Renamed modules: `__getattr__ = moved("algos.old", "algos.new")`."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a renamed module: forwards to the new one, with a deprecation warning."""

    def attribute(name: str) -> Any:
        value = None if name.startswith("_") else getattr(importlib.import_module(new), name, None)
        if value is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old} is deprecated: write from {new} import {name}", DeprecationWarning, 2)
        return value

    return attribute
