"""Import packages that few tests need on first use: every pytest worker collects all test files."""

import importlib
from typing import Any

from envs.quiet import quietly


class LazyModule:
    """A module that is imported, quietly, on the first attribute access."""

    def __init__(self, name: str) -> None:
        """`name`: dotted, as in an import statement."""
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest reads these attributes of each collected object
            raise AttributeError(name)
        with quietly():
            module = importlib.import_module(self._name)
        return getattr(module, name)
