"""Reads and writes measured figures in `docs/performance.json`, by section and name, with their machines."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import ROOT

RESULTS = ROOT / "docs" / "performance.json"


def keep(section: str, name: str, figures: dict[str, Any], path: Path = RESULTS) -> None:
    """Writes figures under a section and a name into `path`, with facts of this machine."""
    results = read(path)
    results.setdefault(section, {})[name] = {**figures, "machine": machine_facts()}
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def read(path: Path = RESULTS) -> dict[str, Any]:
    """The content of a JSON file; empty if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def returns_text(figures: Mapping[str, Any]) -> str:
    """The returns at the end of training as text: ours, and the peer's."""
    sides = (figures["ours"]["returned"], figures["theirs"]["returned"])
    return " / ".join("-" if value is None else f"{value:.4g}" for value in sides)


def machine_facts() -> dict[str, Any]:
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
    """The commit, with `-dirty` if files outside docs/ differ; figures are written to docs/."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
