"""Imports packages without their plotting libraries, which take longer to import than the packages."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_PLOTTING_PACKAGES = ("matplotlib", "seaborn")


@contextlib.contextmanager
def without_plotting(*also: str) -> Iterator[None]:
    """A context where imports get lazy stand-ins for matplotlib and seaborn.

    gymnax's environments import both at the top, which takes two seconds with pandas and SciPy, and use them
    only to draw. Modules that are imported already stay as they are. If a library is not installed, its first
    use raises ModuleNotFoundError, and not its import. `also` names further packages.
    """
    packages = (*_PLOTTING_PACKAGES, *also)
    finder = _Finder([name for name in packages if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.forget(*packages)


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for some packages, and for all their modules."""

    def __init__(self, packages: list[str]):
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by the import system."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Makes an empty module."""
        return _StandIn(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Executes nothing."""

    def forget(self, *packages: str) -> None:
        """Restores normal imports of these packages."""
        self._packages = [name for name in self._packages if name not in packages]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn) and name.partition(".")[0] in packages:
                del sys.modules[name]


class _StandIn(types.ModuleType):
    """Stands for a module, and imports it on first access to an attribute, also inside `without_plotting`."""

    def __init__(self, name: str, finder: _Finder):
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name.startswith("__"):
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        if sys.modules.get(module) is self:
            if _is_module(f"{module}.{name}"):  # `from module import name` then imports the submodule
                raise AttributeError(f"module '{module}.{name}' is not imported yet")
            self._finder.forget(module.partition(".")[0])
        return getattr(importlib.import_module(module), name)


def _is_module(name: str) -> bool:
    """True if the module exists, or may exist because its package is not installed. Imports nothing."""
    path: Any = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return i == 0
        path = spec.submodule_search_locations or []
    return True
