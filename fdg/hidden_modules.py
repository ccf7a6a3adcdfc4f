"""Explains in one line errors caused by a user's file that hides a module, such as `random.py`.

`fdg` imports this before all else, so it imports nothing that such a file could hide.
"""

import os
import sys
from importlib.machinery import PathFinder

_OURS = ("fdg", "algos", "envs", "policies")


def shadowing_file(error: BaseException) -> str | None:
    """A message if a file of the current or the script's folder hides a module and so causes the error."""
    if not isinstance(error, Exception):
        return None
    try:
        folders = {os.path.realpath(path) for path in ("", *sys.path[:1])}
        others = [path for path in sys.path if os.path.realpath(path) not in folders]
        for file in [*_loaded(), *_running(error)]:
            folder, name = os.path.split(file)
            if name == "__init__.py":
                folder, name = os.path.split(folder)
            name = name.removesuffix(".py")
            if os.path.realpath(folder) not in folders or name in _OURS or not name.isidentifier():
                continue
            if name in sys.stdlib_module_names:
                what = "Python's own module"
            elif PathFinder.find_spec(name, others):
                what = "the installed package"
            else:
                continue
            said = " ".join(str(error).split())
            return (
                f"{file} hides {what} '{name}' ({type(error).__name__}: {said:.80}): rename it, or start"
                f" Python in another folder"
            )
    except (OSError, ValueError, ImportError):  # a missing folder, a module with a broken `__spec__`
        pass
    return None


def _loaded() -> list[str]:
    modules = [module for name, module in [*sys.modules.items()] if "." not in name and name != "__main__"]
    files = [getattr(module, "__file__", None) for module in modules]
    return [os.path.abspath(file) for file in files if isinstance(file, str)]


def _running(error: BaseException) -> list[str]:
    """Files of the traceback, among them modules that failed to import."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(os.path.abspath(trace.tb_frame.f_code.co_filename))
        trace = trace.tb_next
    return found


def _explain(kind, error, trace):
    """Prints one line for an uncaught error in a library that a hidden module causes."""
    line = shadowing_file(error) if isinstance(error, ImportError | AttributeError) else None
    last = os.path.dirname((_running(error) or [""])[-1])
    if line is None or last == os.path.realpath(sys.path[0]):  # an error of the user's own code
        _before(kind, error, trace)
    else:
        sys.stderr.write(f"error: {line}\n")


_before, sys.excepthook = sys.excepthook, _explain
