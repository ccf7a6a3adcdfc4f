"""Folders that shadow our packages, and `fdg.envs`, `fdg.algos`, `fdg.policies` as aliases."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = ("algos", "envs", "policies")


def shadowed_package() -> str | None:
    """A message if a folder earlier on `sys.path` shadows a package of fdg (`algos`, `envs`, `policies`)."""
    root = Path(__file__).resolve().parent.parent
    for name in NAMES:
        loaded = getattr(sys.modules.get(name), "__file__", None)
        spec = None if loaded else PathFinder.find_spec(name, sys.path)
        origin = loaded or getattr(spec, "origin", None)
        if origin is not None and Path(origin).resolve().parent != root / name:
            theirs = Path(origin)
            theirs = theirs.parent if theirs.name == "__init__.py" else theirs
            return (
                f"{theirs} hides fdg's own package '{name}', which is in {root}: rename it, or start"
                f" Python in another folder"
            )
    return None


def unimportable_folder() -> str | None:
    """A message if fdg's package shadows a folder of the user, such as `envs/`, that has no `__init__.py`."""
    root = Path(__file__).resolve().parent.parent
    try:
        for folder in {Path(path or ".").resolve() for path in ("", *sys.path[:1])} - {root}:
            for name in NAMES:
                mine = folder / name
                if not (mine / "__init__.py").exists() and any(mine.glob("*.py")):
                    return (
                        f"{mine} has no __init__.py, so 'import {name}' finds fdg's own package in its place:"
                        f" rename that folder"
                    )
    except OSError:  # a missing or unreadable folder
        pass
    return None


class _Alias(MetaPathFinder, Loader):
    """Imports `fdg.envs.probe` as the module `envs.probe`."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}  # of the modules' own names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, own = fullname.partition(".")
        if package != "fdg" or own.partition(".")[0] not in NAMES:
            return None
        if line := shadowed_package():
            raise ImportError(line)
        found = importlib.util.find_spec(own)
        return None if found is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.removeprefix("fdg."))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # the import system has replaced it by the alias's
        module.__spec__ = self._specs.pop(module.__spec__.name)


def install_aliases() -> None:
    """Makes the aliases importable."""
    sys.meta_path.insert(0, _Alias())
