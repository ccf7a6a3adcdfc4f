"""`fdg.envs`, `fdg.algos` and `fdg.policies`: our top-level packages by a second name, the same modules."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fdg.neighbours import NAMES, hidden


class _Alias(MetaPathFinder, Loader):
    """Finds `fdg.envs.probe` as the module `envs.probe`, imported at its first use."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}  # of the modules' own names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, own = fullname.partition(".")
        if package != "fdg" or own.partition(".")[0] not in NAMES:
            return None
        if line := hidden():
            raise ImportError(line)
        found = importlib.util.find_spec(own)
        return None if found is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.removeprefix("fdg."))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)  # importing put the alias's there


def install() -> None:
    """Makes the second names importable."""
    sys.meta_path.insert(0, _Alias())
