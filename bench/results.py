"""Figures that are kept in the repository: `docs/performance.json`, by section and name."""

import json
from pathlib import Path
from typing import Any

from bench import machine

RESULTS = Path(__file__).parents[1] / "docs" / "performance.json"


def keep(section: str, name: str, figures: dict[str, Any], path: Path = RESULTS) -> None:
    """Enters figures in place of earlier ones of that name, with the machine that they are of."""
    results = read(path)
    results.setdefault(section, {})[name] = {**figures, "machine": machine.described()}
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def read(path: Path = RESULTS) -> dict[str, Any]:
    """All that is kept; empty if nothing is."""
    return json.loads(path.read_text()) if path.exists() else {}
