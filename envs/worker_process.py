"""The process of a worker of `from_gymnasium`: `python worker_process.py FD` runs `gymnasium_worker.main`.

The modules that a worker needs import each other relatively, and nothing else of this package. Here they are
imported under another package's name, because importing `envs` would import JAX.
"""

import importlib
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    package = types.ModuleType("fdg_worker")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules[package.__name__] = package
    importlib.import_module("fdg_worker.gymnasium_worker").main()
