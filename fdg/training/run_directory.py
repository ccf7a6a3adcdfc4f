"""Reads and writes the directory of a run: configuration, metrics, learning curve, summary, checkpoints."""

import contextlib
import datetime
import errno
import fcntl
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from fdg import files
from fdg.errors import FdgError, FdgWarning, UnwritableError, listed
from fdg.reading import open_regular, read_json
from fdg.training.settings import check_config

# Folders of a run directory.
CHECKPOINTS = "checkpoints"
DATA = "data"  # copies of data files (`data_copies.py`)
BEST = "best_checkpoint"  # exists only in runs with `--eval-every`
# What every finished run has. A folder with one of them cannot be the directory of a new run.
FILES = ("config.json", "metrics.jsonl", "summary.json", "learning_curve.png", CHECKPOINTS)
RESULTS = ("summary.json", "sweep.json")  # written at the end of a run, and read by other code
# All files and folders that a run may write into its directory.
_FOLDERS = (CHECKPOINTS, BEST, DATA, "samples", "profile", "tensorboard", "wandb", "mlruns", "trials")
_ENTRIES = (
    *(".lock", "config.json", "metrics.jsonl", "metrics.unreadable", "summary.json", "learning_curve.png"),
    *("sweep.json", "sweep.csv", "sweep.png", "search.json", "search.png", "study.journal"),
    *("timeline.svg", "timeline.json"),
    *(f".{CHECKPOINTS}", f".{BEST}", *_FOLDERS),
)
_MAX_LISTED_RUNS = 6  # maximum number of runs in the message about a folder that is not a run
MAX_JSON_BYTES = 64 << 20


class RunDirectory:
    """The directory of a run. Files are replaced atomically; metrics are appended.

    Links inside the directory are never followed for writing; `path` itself may be a link.

    Use `create` or `reopen`. `checkpoints` is the folder of checkpoints, `best` the folder of the checkpoint
    with the best evaluation.
    """

    def __init__(self, path: Path):
        self._given, self._absolute = path, path.absolute()
        self.checkpoints, self.best = path / CHECKPOINTS, path / BEST
        self._metrics: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        """The directory as it was given, or its absolute path if `os.chdir` was called since (a callback)."""
        return self._given if self._given.absolute() == self._absolute else self._absolute

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunDirectory":
        """Creates the directory of a new run, and its parents."""
        check_free(path)
        with files.explain_os_errors(f"--out {path}", "written to"):
            path.mkdir(parents=True, exist_ok=True)
            with cls(path).closed_on_error() as run:
                run._acquire()
                check_free(path)
                files.write(path / "config.json", json_line(config, indent=2)[:-1])
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Opens the directory of an earlier run to resume it."""
        run = cls(path)
        with files.explain_os_errors(path, "written to"):
            run._acquire()
        return run

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator["RunDirectory"]:
        """A context with this directory, which an error closes: its traceback would keep the lock."""
        try:
            yield self
        except BaseException:
            self.close()
            raise

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows to `metrics.jsonl`, one line each, and flushes."""
        with self.explain_write_errors("metrics.jsonl"):
            if self._metrics is None:
                self._metrics = files.open_to_append(self.path / "metrics.jsonl")
            self._metrics.writelines(map(json_line, rows))
            self._metrics.flush()
            if self._is_gone() or not os.fstat(self._metrics.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was removed while the run went on")

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Removes metrics after `iteration`, and a line truncated by a crash; returns the last kept row.

        Moves other unreadable lines to `metrics.unreadable`, with an `FdgWarning`. Removes `RESULTS`, since a
        run that continues has not ended.
        """
        path, last_row = self.path / "metrics.jsonl", None
        for name in RESULTS:
            with self.explain_write_errors(name):
                (self.path / name).unlink(missing_ok=True)
        if not path.exists():
            return None
        with self.explain_write_errors(path.name):
            with open_regular(path) as file:
                *lines, truncated_line = file.read().split(b"\n")
            rows = {number: _parse_row(line) for number, line in enumerate([*lines, truncated_line], 1)}
            invalid = [number for number, line in enumerate(lines, 1) if rows[number] is None]
            if invalid:
                with files.open_to_append(self.path / "metrics.unreadable") as unreadable:
                    unreadable.writelines(lines[number - 1] + b"\n" for number in invalid)
                warnings.warn(
                    f"{path}: line {', '.join(map(str, invalid[:3]))}{' ...' if invalid[3:] else ''} cannot"
                    f" be read, and was moved to metrics.unreadable; all other rows are kept",
                    FdgWarning,
                    stacklevel=2,
                )
            with files.replacing(path) as writer:
                for row in rows.values():
                    if row is not None and row["iteration"] <= iteration:
                        writer.write(json_line(row))
                        last_row = row
        return last_row

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replaces `config.json`."""
        with files.explain_os_errors(self.path, "written to"):
            files.write(self.path / "config.json", json_line(config, indent=2)[:-1])

    def publish_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replaces a JSON file of the run atomically."""
        self.publish(name, lambda file: file.write(json_line(content, indent=2)))

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Replaces a file of the run atomically; `write` gets the open file."""
        path = self.path / name
        with self.explain_write_errors(name):
            if path.parent != self.path:
                files.make_folder(path.parent)
            with files.replacing(path) as file:
                write(file)

    def check_exists(self) -> None:
        """Raises `UnwritableError` if the directory was removed or moved."""
        if self._is_gone():
            raise unwritable_error(self.path, "", "", is_gone=True)

    def close(self) -> None:
        """Closes files and releases the lock."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # the write that failed has raised its error already
                    file.close()
        self._metrics = self._lock = None

    def remove_if_unused(self) -> None:
        """Removes the directory if it holds only `config.json` and the lock."""
        if self._is_gone():  # another run may have this path by now
            return
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {"config.json", ".lock"}:
                for name in ("config.json", ".lock"):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    def _acquire(self) -> None:
        """Refuses links among the run's files, then locks the directory until `close` or the process ends."""
        for name in _ENTRIES:
            with files.explain_os_errors(self.path / name):
                files.check_own(self.path / name, name in _FOLDERS)
        self._lock = files.open_to_append(self.path / ".lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FdgError(
                f"{self.path} is in use by a run that has not ended: wait for it or end it, or use another"
                " directory"
            ) from None

    def _is_gone(self) -> bool:
        """Whether the path no longer names the directory that this process has locked."""
        if self._lock is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self._lock.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return not (self.path / "config.json").exists()
        except OSError:  # for example on a network file system; the next write raises the error
            return False

    @contextlib.contextmanager
    def explain_write_errors(self, name: str) -> Iterator[None]:
        """Turns an OSError (disk full, read-only, removed) into an error that says how to resume."""
        try:
            yield
        except OSError as error:
            problem, reason = f"{self.path / name} cannot be written", error.strerror or str(error)
            raise unwritable_error(self.path, problem, reason, self._is_gone()) from error


class NullRunDirectory(RunDirectory):
    """The run directory in processes other than 0: the methods that all processes call do nothing."""

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Does nothing."""
        return None

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Does nothing."""

    def remove_if_unused(self) -> None:
        """Does nothing."""


def unwritable_error(
    path: Path, problem: str, reason: str, is_gone: bool, fix: str = "fix that"
) -> UnwritableError:
    """The error of a run that cannot write: what is lost, and how to resume.

    `problem` begins the message; `reason` is the system's message; `fix` is used if `_FIXES` has none for it.
    """
    if is_gone:
        return UnwritableError(
            f"{path} was removed or moved during the run, with all that was saved in it: restore it and go"
            f" on with --resume {path}, or start the run again"
        )
    saved = [int(file.name) for file in (path / CHECKPOINTS).glob("[0-9]*") if file.name.isdecimal()]
    loss = (
        f" from iteration {max(saved):,}: what came after it is lost" if saved else ": nothing was saved yet"
    )
    return UnwritableError(
        f"{problem} ({reason}): {_FIXES.get(reason, fix)}, and go on with --resume {path}{loss}"
    )


_FIXES = {  # the system's message -> the fix
    **{os.strerror(code): "make room there" for code in files.FULL},
    **{os.strerror(code): "make it writable" for code in (errno.EACCES, errno.EPERM, errno.EROFS)},
}


def make_new_run_folder(env: str | None, algo: str, seed: Any) -> Path:
    """Creates a new folder `runs/ENV-ALGO-SEED-TIME`, without parts that are None or empty."""
    env = None if env is None else re.sub(r"[^?&=]*/", "", env)  # keeps only the name of a file path
    parts = [str(part) for part in (env, algo.rpartition(":")[2], seed) if part not in (None, "")]
    name = "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts)
    start = path = Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            break
        except OSError as error:
            if not path.exists():
                check_free(path)  # its errors name the fix
                raise files.path_error(f"--out {path}", error, "written to") from error
        path = Path(f"{start}-{number}")
    return path


def check_free(path: Path) -> None:
    """Checks that a path can become the directory of a new run; creates nothing."""
    check_utf8(path)
    try:
        if path.exists() and not path.is_dir():
            raise FdgError(f"--out {path} is a file: give a directory")
        names = [name for name in FILES if os.path.lexists(path / name)]
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise files.path_error(f"--out {path}", error, "written to") from error
    if "config.json" in names:
        raise FdgError(
            f"--out {path} already contains a run: give another directory, or go on with --resume {path}"
            " (in Python: resume=True)"
        )
    if names:
        raise FdgError(
            f"--out {path} already contains {names[0]}, which would be overwritten: give another directory"
        )
    if not existing.is_dir():
        raise FdgError(f"--out {path} cannot be made: {existing} is a file")
    if refusal := files.refusal(existing):
        raise files.path_error(f"--out {path}", refusal, "written to")


def check_utf8(path: Path) -> None:
    """Checks that a path is UTF-8, as TensorStore requires."""
    try:
        str(path.absolute()).encode()
        os.fsencode(path)
    except UnicodeEncodeError:
        fix = "give another directory"
        if sys.getfilesystemencoding() != "utf-8":
            fix = f"this process reads file names as {sys.getfilesystemencoding()}: set PYTHONUTF8=1"
        raise FdgError(f"{ascii(str(path))[1:-1]}: its name is not UTF-8: {fix}") from None


def read_config(path: Path, prefix: str = "--resume: ") -> dict[str, Any]:
    """Reads the configuration of the run in `path`; error messages start with `prefix`."""
    check_utf8(path)
    file = path / "config.json"
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        parent_configs = [parent / "config.json" for parent in path.absolute().parents[:2]]
        configs = (*parent_configs, *sorted(path.glob("*/config.json")))
        nearby_runs = [config.parent for config in configs if os.path.isfile(config)]
        fix = "leave out --resume to start one" if prefix == "--resume: " else "give the run directory"
        num_unlisted = len(nearby_runs) - _MAX_LISTED_RUNS
        suffix = f" ({num_unlisted} more)" if num_unlisted > 0 else ""
        fix = f"give {listed(nearby_runs[:_MAX_LISTED_RUNS])}{suffix}" if nearby_runs else fix
        raise FdgError(f"{prefix}no run in {path} (it has no config.json): {fix}") from None
    except (OSError, ValueError):  # `read_json` below raises the error
        pass
    try:
        content = read_json(file, MAX_JSON_BYTES)
    except FdgError as error:
        reason = str(error).removeprefix(f"{file}: ").removeprefix("cannot be read: ")
        fix = "bring it back from a copy, or start a new run"
        raise FdgError(f"{prefix}{file} cannot be read: {reason}: {fix}") from None
    return check_config(file, content)


def read_summary(path: Path) -> dict[str, Any] | None:
    """The content of `summary.json`; None before the run has ended, or if it is unreadable."""
    try:
        summary = read_json(path / "summary.json", MAX_JSON_BYTES)
    except FdgError:
        return None
    # Only the entries that other code reads are checked.
    kinds: dict[str, Any] = {
        **dict.fromkeys(("devices", "seeds", "failed_seeds"), list | None),
        "versions": dict | None,
        "eval_episodes": int | None,
    }
    kinds_match = all(isinstance(summary.get(name), kind) for name, kind in kinds.items())
    mean, returns = summary.get("eval_return"), summary.get("eval_returns")
    are_returns = _is_metric("", mean) and (returns is None or _is_metric("_per_seed", returns))
    return summary if kinds_match and are_returns else None


def device_count(config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> int:
    """The number of devices that a run was planned for, from its files; 0 if unknown."""
    trained_on = (summary or {}).get("devices") or ()
    return config.get("devices") or config.get("devices_chosen") or len(trained_on)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a `metrics.jsonl`; skips unreadable lines."""
    if not os.path.lexists(path):
        return
    with open_regular(path) as lines:
        for line in lines:
            row = _parse_row(line)
            if row is not None:
                yield row


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Parses a row of metrics; None if the line is not a valid row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("iteration")) is not int:
        return None
    if not all(type(row.get(name)) in (int, float) for name in ("env_steps", "wall_s")):
        return None
    return row if all(_is_metric(name, value) for name, value in row.items()) else None


def _is_metric(name: str, value: Any) -> bool:
    """Whether a value is valid for a metric: a number or None; for values by agent, a list of these."""
    if name.endswith("_per_seed") or name in ("eval_returns", "eval_returns_sampled"):
        return isinstance(value, list) and all(_is_metric("", x) for x in value)
    return value is None or (isinstance(value, int | float) and -_MAX_METRIC < value < _MAX_METRIC)


_MAX_METRIC = 1e300  # the largest absolute value of a metric


def to_json_types(value: Any) -> Any:
    """Converts to JSON types: NumPy numbers to Python's, NaN and infinities to null.

    A float32 gets the fewest digits that round-trip.

    >>> to_json_types({"loss": np.float32(0.1), "episode_return": np.nan, "seeds": (0, 1)})
    {'loss': 0.1, 'episode_return': None, 'seeds': [0, 1]}
    """
    if isinstance(value, Mapping):
        return {str(name): to_json_types(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [to_json_types(item) for item in value]
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    if isinstance(value, np.floating | float):
        return float(str(value)) if math.isfinite(value) else None
    return value


def json_line(value: Any, indent: int | None = None) -> bytes:
    """`to_json_types(value)` as JSON with a line break at the end."""
    return json.dumps(to_json_types(value), indent=indent, allow_nan=False).encode() + b"\n"
