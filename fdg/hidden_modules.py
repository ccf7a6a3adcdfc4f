"""Explains, in one line, errors that arise because a user's file, such as `random.py`, hides a module.

`fdg` imports this first, so it imports only modules that such a file cannot hide.
"""

import os
import sys
from importlib.machinery import PathFinder

_FDG_PACKAGES = ("fdg", "algos", "envs", "policies")


def shadowing_file(error: BaseException) -> str | None:
    """A message if a file in the current or the script's folder hides a module and so causes the error."""
    if not isinstance(error, Exception):
        return None
    try:
        folders = {os.path.realpath(path) for path in ("", *sys.path[:1])}
        other_paths = [path for path in sys.path if os.path.realpath(path) not in folders]
        for file in [*_module_files(), *_traceback_files(error)]:
            folder, name = os.path.split(file)
            if name == "__init__.py":
                folder, name = os.path.split(folder)
            name = name.removesuffix(".py")
            if os.path.realpath(folder) not in folders or name in _FDG_PACKAGES or not name.isidentifier():
                continue
            if name in sys.stdlib_module_names:
                owner = "Python's own module"
            elif PathFinder.find_spec(name, other_paths):
                owner = "the installed package"
            else:
                continue
            text = " ".join(str(error).split())
            return (
                f"{file} hides {owner} '{name}' ({type(error).__name__}: {text:.80}): rename it, or start"
                f" Python in another folder"
            )
    except (OSError, ValueError, ImportError):  # a missing folder, a module with a broken `__spec__`
        pass
    return None


def _module_files() -> list[str]:
    modules = [module for name, module in [*sys.modules.items()] if "." not in name and name != "__main__"]
    files = [getattr(module, "__file__", None) for module in modules]
    return [os.path.abspath(file) for file in files if isinstance(file, str)]


def _traceback_files(error: BaseException) -> list[str]:
    """The files of the traceback, which include modules that failed to import."""
    files, trace = [], error.__traceback__
    while trace is not None:
        files.append(os.path.abspath(trace.tb_frame.f_code.co_filename))
        trace = trace.tb_next
    return files


def _excepthook(kind, error, trace):
    """Prints one line for an uncaught error in a library if a hidden module causes it."""
    line = shadowing_file(error) if isinstance(error, ImportError | AttributeError) else None
    last_folder = os.path.dirname((_traceback_files(error) or [""])[-1])
    if line is None or last_folder == os.path.realpath(sys.path[0]):  # an error of the user's own code
        _previous_hook(kind, error, trace)
    else:
        sys.stderr.write(f"error: {line}\n")


_previous_hook, sys.excepthook = sys.excepthook, _excepthook
