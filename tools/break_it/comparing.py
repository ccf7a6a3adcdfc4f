"""Two run directories: how far the last checkpoint, the metrics and the tables of samples are apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np

TIMES = ("wall_s", "steps_per_s", "tokens_per_s")


def compare(run: Path, whole: Path) -> tuple[float, str]:
    """The largest difference of two runs, and where it is.

    Returns:
      0 if all bits are equal; of floats the difference relative to the largest of their array, or to 1;
      infinity if anything else differs.
    """
    mine, theirs = _values(run), _values(whole)
    unlike = [name for name in mine.keys() ^ theirs.keys() if not name.startswith("samples")]
    if unlike:
        return np.inf, f"only one of both has {sorted(unlike)[:3]}"
    worst = 0.0, ""
    for name in mine.keys() & theirs.keys():
        have, want = mine[name], theirs[name]
        if have.dtype != want.dtype or have.shape != want.shape:
            return np.inf, f"{name} is {have.dtype}{list(have.shape)}, and was {want.dtype}{list(want.shape)}"
        if have.tobytes() != want.tobytes():
            worst = max(
                worst, (_apart(have, want), f"{name} differs in {np.sum(have != want)} of {want.size}")
            )
    return worst


def wrong(run: Path, whole: Path, tolerance: float) -> str | None:
    """What differs by more than the tolerance; None if nothing does."""
    difference, where = compare(run, whole)
    return f"{where} by {difference:.2g}" if difference > tolerance else None


def _values(run: Path) -> dict[str, np.ndarray]:
    from fdg.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    values: dict[str, Any] = dict(checkpoints.arrays(latest))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in row.keys() - set(TIMES):
            values[f"iteration {row['iteration']}, {name}"] = np.asarray(row[name], float)
    for path in (run / "samples").glob("*.jsonl"):
        values[f"samples {path.name}"] = np.frombuffer(path.read_bytes(), np.uint8)
    return values


def _apart(have: np.ndarray, want: np.ndarray) -> float:
    if not np.issubdtype(want.dtype, np.floating) or (np.isnan(have) != np.isnan(want)).any():
        return np.inf
    scale = max(1.0, float(np.nanmax(np.abs(want), initial=0.0)))
    return float(np.nanmax(np.abs(have - want), initial=0.0)) / scale
