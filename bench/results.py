"""Figures that are kept in the repository, with the machine: `docs/performance.json`, by section and name."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from bench.harness import ROOT

RESULTS = ROOT / "docs" / "performance.json"


def keep(section: str, name: str, figures: dict[str, Any], path: Path = RESULTS) -> None:
    """Enters figures in place of earlier ones of that name, with the machine that they are of."""
    results = read(path)
    results.setdefault(section, {})[name] = {**figures, "machine": described()}
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def read(path: Path = RESULTS) -> dict[str, Any]:
    """All that is kept; empty if nothing is."""
    return json.loads(path.read_text()) if path.exists() else {}


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
    git = ["git", "-C", str(ROOT), *words]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
