"""Importing a package without the libraries that it draws with, which take longer than all the rest of it."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_DRAWING = ("matplotlib", "seaborn")


@contextlib.contextmanager
def undrawn(*also: str) -> Iterator[None]:
    """Modules imported here get stand-ins for matplotlib and seaborn, which import those at first use.

    gymnax's environments import both at their top, and use them in methods that draw; with pandas and SciPy
    behind them they take two seconds. What is imported already stays as it is. Where one is not installed,
    the first use raises ModuleNotFoundError, and not the import. `also` are further packages to treat so.
    """
    packages = (*_DRAWING, *also)
    finder = _Finder([name for name in packages if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.forget(*packages)


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for some packages, and for every module in them."""

    def __init__(self, packages: list[str]):
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the import system asks."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """An empty one."""
        return _StandIn(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""

    def forget(self, *packages: str) -> None:
        """Has these packages imported as ever from here on."""
        self._packages = [name for name in self._packages if name not in packages]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn) and name.partition(".")[0] in packages:
                del sys.modules[name]


class _StandIn(types.ModuleType):
    """A module that is imported when something in it is asked for, be it that others are being imported."""

    def __init__(self, name: str, finder: _Finder):
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        if name.startswith("__"):
            raise AttributeError(f"module '{own}' has no attribute '{name}'")
        if sys.modules.get(own) is self:
            if _is_module(f"{own}.{name}"):  # which the import system then asks the finder for
                raise AttributeError(f"module '{own}.{name}' is not imported yet")
            self._finder.forget(own.partition(".")[0])
        return getattr(importlib.import_module(own), name)


def _is_module(name: str) -> bool:
    """Whether there is a module of this name, or may be: its package is not installed; imports none."""
    path: Any = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return i == 0
        path = spec.submodule_search_locations or []
    return True
