"""Packages that one file of tests needs, and every worker would wait for: each collects all of the tests."""

import importlib
from typing import Any

from envs.quiet import quietly


class Later:
    """A module that is imported, quietly, as soon as something of it is asked for."""

    def __init__(self, name: str) -> None:
        """`name`: as one would import it."""
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks each object that it collects for these
            raise AttributeError(name)
        with quietly():
            module = importlib.import_module(self._name)
        return getattr(module, name)
