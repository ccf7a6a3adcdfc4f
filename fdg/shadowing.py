"""Finds folders that shadow `algos`, `envs` or `policies`, or are shadowed by them; makes aliases of these.

The aliases are `fdg.algos`, `fdg.envs` and `fdg.policies`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ALIASED_PACKAGES = ("algos", "envs", "policies")


def shadowed_package() -> str | None:
    """A message if a folder earlier on `sys.path` shadows a package of fdg (`algos`, `envs`, `policies`)."""
    root = Path(__file__).resolve().parent.parent
    for name in ALIASED_PACKAGES:
        loaded = getattr(sys.modules.get(name), "__file__", None)
        spec = None if loaded else PathFinder.find_spec(name, sys.path)
        origin = loaded or getattr(spec, "origin", None)
        if origin is not None and Path(origin).resolve().parent != root / name:
            folder = Path(origin)
            folder = folder.parent if folder.name == "__init__.py" else folder
            return (
                f"{folder} hides fdg's own package '{name}', which is in {root}: rename it, or start"
                f" Python in another folder"
            )
    return None


def unimportable_folder() -> str | None:
    """A message if fdg's package shadows a folder of the user, such as `envs/`, that has no `__init__.py`."""
    root = Path(__file__).resolve().parent.parent
    try:
        for folder in {Path(path or ".").resolve() for path in ("", *sys.path[:1])} - {root}:
            for name in ALIASED_PACKAGES:
                user_folder = folder / name
                if not (user_folder / "__init__.py").exists() and any(user_folder.glob("*.py")):
                    return (
                        f"{user_folder} has no __init__.py, so 'import {name}' imports fdg's package:"
                        f" rename the folder"
                    )
    except OSError:  # a missing or unreadable folder
        pass
    return None


class _AliasImporter(MetaPathFinder, Loader):
    """Imports `fdg.envs.probe` as the module `envs.probe`."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}  # specs of the original modules, by alias

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, original = fullname.partition(".")
        if package != "fdg" or original.partition(".")[0] not in ALIASED_PACKAGES:
            return None
        if line := shadowed_package():
            raise ImportError(line)
        spec = importlib.util.find_spec(original)
        return None if spec is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.removeprefix("fdg."))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # The import system has set the alias's spec; restore the original one.
        module.__spec__ = self._specs.pop(module.__spec__.name)


def install_aliases() -> None:
    """Makes the aliases importable."""
    sys.meta_path.insert(0, _AliasImporter())
