"""Files and folders that shadow modules, and `fdg.envs`, `fdg.algos`, `fdg.policies` as aliases."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
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
    except OSError:  # a folder that is gone, or cannot be read
        pass
    return None


def shadowing_file(error: BaseException) -> str | None:
    """A message if a file of the current folder, such as `jax.py`, shadows a module and so causes the error.

    Args:
      error: an uncaught exception, such as a failed import or a missing attribute.
    """
    if not isinstance(error, Exception):
        return None
    try:
        here = Path.cwd()
        files = [*_loaded(), *_running(error.__traceback__)]
        for file in files:
            name = file.parent.name if file.name == "__init__.py" else file.stem
            folder = file.parents[1] if file.name == "__init__.py" else file.parent
            if folder != here or name in (*NAMES, "fdg") or not name.isidentifier():
                continue
            if name in sys.stdlib_module_names:
                what = "Python's own module"
            elif PathFinder.find_spec(name, [path for path in sys.path if Path(path).resolve() != here]):
                what = "the installed package"
            else:
                continue
            said = " ".join(str(error).split())
            return (
                f"{file} hides {what} '{name}' ({type(error).__name__}: {said:.80}): rename it, or start"
                f" Python in another folder"
            )
    except (OSError, ValueError, ImportError):  # a folder that is gone, a module with a broken `__spec__`
        pass
    return None


def _loaded() -> list[Path]:
    modules = [module for name, module in [*sys.modules.items()] if "." not in name]
    files = [getattr(module, "__file__", None) for module in modules]
    return [Path(os.path.abspath(file)) for file in files if isinstance(file, str)]


def _running(trace: TracebackType | None) -> list[Path]:
    """Files of a traceback, among them modules that failed to import."""
    found = []
    while trace is not None:
        found.append(Path(os.path.abspath(trace.tb_frame.f_code.co_filename)))
        trace = trace.tb_next
    return found


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
        module.__spec__ = self._specs.pop(module.__spec__.name)  # importing put the alias's there


def install_aliases() -> None:
    """Makes the aliases importable."""
    sys.meta_path.insert(0, _Alias())
