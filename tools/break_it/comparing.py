"""Compares two run directories: their last checkpoints, metrics and tables of samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np

# Metrics that are not compared.
TIMES = ("wall_s", "steps_per_s", "tokens_per_s")
_POOL_NUMBER = "/inner/pool"  # of environments on the host; drawn at random in each process


def compare(run: Path, undisturbed: Path) -> tuple[float, str]:
    """The largest difference between two runs, and where it is.

    Returns:
      0 if all bits are equal; infinity if anything but floats differs; else the largest difference of floats,
      relative to the largest value of their array, or to 1 if that is larger.
    """
    values, expected_values = _read_values(run), _read_values(undisturbed)
    only_in_one = [name for name in values.keys() ^ expected_values.keys() if not name.startswith("samples")]
    if only_in_one:
        return np.inf, f"only one of the two runs has {sorted(only_in_one)[:3]}"
    largest = 0.0, ""
    for name in values.keys() & expected_values.keys():
        x, y = values[name], expected_values[name]
        if x.dtype != y.dtype or x.shape != y.shape:
            return np.inf, f"{name} is {x.dtype}{list(x.shape)}, and was {y.dtype}{list(y.shape)}"
        if x.tobytes() != y.tobytes():
            largest = max(largest, (_difference(x, y), f"{name} differs in {np.sum(x != y)} of {y.size}"))
    return largest


def describe_difference(run: Path, undisturbed: Path, tolerance: float) -> str | None:
    """The largest difference between two runs as text; None if it is within the tolerance."""
    difference, where = compare(run, undisturbed)
    return f"{where} by {difference:.2g}" if difference > tolerance else None


def rows_differ(run: Path, undisturbed: Path, iterations: int) -> str | None:
    """The first of these iterations whose metrics differ between two runs, as text; None if all are equal."""
    for row, expected in zip(_read_rows(run)[:iterations], _read_rows(undisturbed), strict=False):
        if str(row) != str(expected):  # as text, NaN equals NaN
            return f"iteration {expected['iteration']} differs: {row}, and was {expected}"
    return None


def _read_values(run: Path) -> dict[str, np.ndarray]:
    from fdg.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    arrays = checkpoints.arrays(latest).items()
    values: dict[str, Any] = {name: x for name, x in arrays if not name.endswith(_POOL_NUMBER)}
    for row in _read_rows(run):
        for name, x in row.items():
            values[f"iteration {row['iteration']}, {name}"] = np.asarray(x, float)
    for path in (run / "samples").glob("*.jsonl"):
        values[f"samples {path.name}"] = np.frombuffer(path.read_bytes(), np.uint8)
    return values


def _read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics, without times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in row.items() if name not in TIMES} for row in rows]


def _difference(x: np.ndarray, y: np.ndarray) -> float:
    if not np.issubdtype(y.dtype, np.floating) or (np.isnan(x) != np.isnan(y)).any():
        return np.inf
    scale = max(1.0, float(np.nanmax(np.abs(y), initial=0.0)))
    return float(np.nanmax(np.abs(x - y), initial=0.0)) / scale
