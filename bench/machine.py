"""Where and with what something was measured."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def described() -> dict[str, Any]:
    """Date, processor, cores, versions, and the commit of the checkout."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "commit": _commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    """The commit, `-dirty` if files differ but for those under docs/, which figures are written to."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _git(*words: str) -> str:
    git = ["git", "-C", str(_ROOT), *words]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
