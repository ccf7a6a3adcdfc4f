"""The packages beside this one, `algos`, `envs`, `policies`: whether somebody else's folder hides them."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

NAMES = ("algos", "envs", "policies")


def hidden() -> str | None:
    """Says which folder hides which of our packages, and what to do; None if none does.

    Python takes the first of a name that lies on `sys.path`, and the current folder comes first.
    """
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
