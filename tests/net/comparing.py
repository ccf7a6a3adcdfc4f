"""Differences between two recordings, and which of them are expected."""

import dataclasses
import fnmatch
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.net.recording import NetError, read_about

_WIDTH = 400  # characters shown of a line of text


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference in one array, column, line or job.

    Attributes:
      job: name of the job.
      file: "metrics.jsonl", "checkpoint", "fdg.plan", ...
      array: the metric, the path of the array, or the line number; empty if the file is missing.
      first: the first iteration that differs, if any.
      text: how much, or both lines.
    """

    job: str
    file: str
    array: str
    first: int | None
    text: str

    def __str__(self) -> str:
        """The difference in one line."""
        where = " ".join(word for word in (self.job, self.file, self.array) if word)
        return f"{where}{'' if self.first is None else f' from iteration {self.first}'}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Expected:
    """Intended differences, by shell patterns.

    Attributes:
      reason: one sentence.
      decision: the number of a page in docs/decisions, or a commit.
      job: pattern of jobs.
      file: pattern of their files.
      array: pattern of arrays, metrics or lines.
    """

    reason: str
    decision: str
    job: str = "*"
    file: str = "*"
    array: str = "*"

    def matches(self, found: Difference) -> bool:
        """True if the patterns match this difference."""
        return all(
            fnmatch.fnmatchcase(getattr(found, name), getattr(self, name))
            for name in ("job", "file", "array")
        )


def read_expected(path: Path) -> list[Expected]:
    """The tables `[[expected]]` of a TOML file; an empty list if there is no file.

    Raises:
      NetError: the file cannot be read, or an entry has no job, reason or decision.
    """
    if not path.exists():
        return []
    try:
        entries = tomllib.loads(path.read_text()).get("expected", [])
    except (OSError, ValueError) as error:
        raise NetError(f"{path} is no TOML: {error}") from None
    known, found = {field.name for field in dataclasses.fields(Expected)}, []
    for number, entry in enumerate(entries, 1):
        for name in ("reason", "decision", "job"):
            if not str(entry.get(name, "")).strip():
                raise NetError(
                    f"{path}: entry {number} has no {name}: each says job, reason and decision (or commit)"
                )
        if unknown := sorted(set(entry) - known):
            raise NetError(f"{path}: entry {number} has an unknown '{unknown[0]}': it takes {sorted(known)}")
        found.append(Expected(**entry))
    return found


def compare(a: Path, b: Path, names: Sequence[str] | None = None) -> list[Difference]:
    """All differences of recording `b` from recording `a`.

    Args:
      a: folder of the first recording.
      b: folder of the second recording.
      names: jobs to compare; None: all jobs of either recording.

    Raises:
      NetError: a folder has no recording, or they are from different machines or versions of JAX.
    """
    of_a, of_b = read_about(a), read_about(b)
    for name in ("machine", "jax"):
        if of_a[name] != of_b[name]:
            raise NetError(
                f"{a} and {b} cannot be compared, for XLA's bits differ: {name} {of_a[name]!r} and"
                f" {of_b[name]!r}: record both on one machine"
            )
    if names is None:
        names = sorted({p.stem for folder in (a, b) for p in folder.glob("*.json")} - {"recording"})
    return [found for name in names for found in _compare_job(name, a, b)]


def _compare_job(name: str, a: Path, b: Path) -> Iterator[Difference]:
    exist = [(folder / f"{name}.json").exists() for folder in (a, b)]
    if not all(exist):
        missing = [str(folder) for folder, is_there in zip((a, b), exist, strict=True) if not is_there]
        yield Difference(name, "", "", None, f"not recorded in {' and '.join(missing)}")
        return
    one, other = (json.loads((folder / f"{name}.json").read_text()) for folder in (a, b))
    if one["job"] != other["job"]:
        yield Difference(name, "", "", None, "the recordings are of different arguments: record both again")
        return
    if "error: unknown algorithm" in one["texts"].get("error", ""):
        return  # the algorithm was added later
    for file in sorted({*one["texts"], *other["texts"]}):
        if name.startswith("messages.") and file not in one["texts"]:
            continue  # the test of this message was added later
        yield from _compare_texts(name, file, one["texts"].get(file), other["texts"].get(file))
    for file in sorted({*one["rows"], *other["rows"]}):
        yield from _compare_rows(name, file, one["rows"].get(file), other["rows"].get(file))
    yield from _compare_arrays(name, _arrays(a, name, one), _arrays(b, name, other))


def _compare_texts(job: str, file: str, a: str | None, b: str | None) -> Iterator[Difference]:
    if a is None or b is None:
        yield Difference(job, file, "", None, f"only in the {'second' if a is None else 'first'}")
        return
    lines, others = a.splitlines(), b.splitlines()
    differing = [n for n in range(max(len(lines), len(others))) if lines[n : n + 1] != others[n : n + 1]]
    if differing:
        first = differing[0]
        was, now = _excerpts(*("".join(x[first : first + 1]) or "(no line)" for x in (lines, others)))
        text = f"{len(differing)} lines, the first was {was!r} and is {now!r}"
        yield Difference(job, file, f"line {first + 1}", None, text)


def _excerpts(a: str, b: str) -> tuple[str, str]:
    """Both lines, cut around the first character that differs if they are long."""
    if max(len(a), len(b)) <= _WIDTH:
        return a, b
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, same - _WIDTH // 2)
    parts = [f"{x[begin : begin + _WIDTH]}{'...' * (len(x) > begin + _WIDTH)}" for x in (a, b)]
    return "..." * (begin > 0) + parts[0], "..." * (begin > 0) + parts[1]


def _compare_rows(
    job: str, file: str, a: list[dict[str, Any]] | None, b: list[dict[str, Any]] | None
) -> Iterator[Difference]:
    if a is None or b is None:
        yield Difference(job, file, "", None, f"only in the {'second' if a is None else 'first'}")
        return
    if len(a) != len(b):
        yield Difference(job, file, "", None, f"{len(a)} rows and {len(b)}")
    for column in sorted({name for row in [*a, *b] for name in row}):
        pairs = [
            (row.get("iteration"), row.get(column, "absent"), other.get(column, "absent"))
            for row, other in zip(a, b, strict=False)
        ]
        # Compared as text: NaN equals itself, and 0.0 differs from -0.0.
        differing = [pair for pair in pairs if json.dumps(pair[1]) != json.dumps(pair[2])]
        if differing:
            iteration, was, now = differing[0]
            largest = max((_distance(x, y) for _, x, y in differing), default=0.0)
            text = (
                f"{len(differing)} of {len(pairs)} rows, by at most {largest:.3g}, at first {was} and {now}"
            )
            yield Difference(job, file, column, iteration, text)


def _distance(a: Any, b: Any) -> float:
    """Distance of two JSON values; infinite if one of them is no finite number."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((_distance(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if json.dumps(a) == json.dumps(b):
        return 0.0
    numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in (a, b))
    return abs(a - b) if numbers else math.inf


def _arrays(folder: Path, name: str, found: dict[str, Any]) -> dict[str, tuple[str, np.ndarray]]:
    """(dtype, array) of each array of a job, by path."""
    if not found["dtypes"]:
        return {}
    with np.load(folder / f"{name}.npz") as stored:
        return {path: (dtype, stored[path]) for path, dtype in found["dtypes"].items()}


def _compare_arrays(
    job: str, a: dict[str, tuple[str, np.ndarray]], b: dict[str, tuple[str, np.ndarray]]
) -> Iterator[Difference]:
    for path in sorted({*a, *b}):
        if path not in a or path not in b:
            text = f"only in the {'first' if path in a else 'second'}"
            yield Difference(job, "checkpoint", path, None, text)
            continue
        (dtype, one), (other_dtype, other) = a[path], b[path]
        if (dtype, one.shape) != (other_dtype, other.shape):
            text = f"was {dtype}{list(one.shape)} and is {other_dtype}{list(other.shape)}"
            yield Difference(job, "checkpoint", path, None, text)
            continue
        differing, distance = _differing(dtype, one, other)
        if differing.any():
            text = f"{int(differing.sum())} of {one.size} elements{distance}"
            yield Difference(job, "checkpoint", path, None, text)


def _differing(dtype: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, str]:
    """Mask of elements with different bits (NaN equals NaN), and the largest difference as text."""
    bits = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (a, b)]
    differing = (bits[0] != bits[1]).any(axis=1)
    if np.dtype(dtype).kind not in "fiuV":  # V: bfloat16 and similar types
        return differing, ""
    values, others = (x.view(dtype).reshape(-1).astype(np.float64) for x in (a, b))
    nan, other_nan = np.isnan(values), np.isnan(others)
    differing &= ~(nan & other_nan)
    if (nan != other_nan).any():
        return differing, ", one of them not-a-number in one recording only"
    with np.errstate(invalid="ignore"):  # inf - inf
        distance = np.nanmax(np.abs(values - others)[differing], initial=0.0)
    largest = np.nanmax(np.abs(values), initial=0.0)
    relative = distance / largest if largest else np.inf
    return differing, f", by at most {distance:.3g} ({relative:.2g} of the largest)"
