"""Importing a package without the libraries that it draws with, which take longer than all the rest of it."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_DRAWING = ("matplotlib", "seaborn")


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Modules imported here get stand-ins for matplotlib and seaborn, which import those at first use.

    gymnax's and JaxMARL's environments import both at their top, and only their methods that draw use them;
    with pandas and SciPy behind them they take two seconds. What is imported already stays as it is.
    """
    finder = _Finder([name for name in _DRAWING if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn):
                del sys.modules[name]


class _StandIn(types.ModuleType):
    """A module of any name below its own, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or sys.modules.get(self.__name__) is self:  # others are being imported
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}' yet")
        return getattr(importlib.import_module(self.__name__), name)


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for some packages, and for every module in them."""

    def __init__(self, packages: Sequence[str]):
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the import system asks."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """An empty one."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""
