"""The directory of a training run: configuration, metrics, learning curve, summary, checkpoints."""

import contextlib
import errno
import fcntl
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from fdg import files
from fdg.errors import FdgError, FdgWarning, UnwritableError, listed
from fdg.reading import open_regular, read_json
from fdg.training.settings import read_settings
from fdg.training.writable import refused, refusing

CHECKPOINTS = "checkpoints"
DATA = "data"
BEST = "best_checkpoint"  # only in runs with `--eval-every`
FILES = ("config.json", "metrics.jsonl", "summary.json", "learning_curve.png", CHECKPOINTS)
RESULTS = ("summary.json", "sweep.json")  # written at the end of a run, and read by other code
# Everything that a run may write into its directory.
_FOLDERS = (CHECKPOINTS, BEST, DATA, "samples", "profile", "tensorboard", "wandb", "mlruns", "trials")
_WRITTEN = (
    *(".lock", "config.json", "metrics.jsonl", "metrics.unreadable", "summary.json", "learning_curve.png"),
    *("sweep.json", "sweep.csv", "sweep.png", "search.json", "search.png", "study.journal"),
    *("timeline.svg", "timeline.json"),
    *(f".{CHECKPOINTS}", f".{BEST}", *_FOLDERS),
)
_LISTED = 6  # the most runs in the message about a folder that is not a run
_JSON_BYTES = 64 << 20


class RunDirectory:
    """The directory of a run. Files are replaced atomically; metrics are appended.

    Links inside the directory are never followed for writing; `path` itself may be a link.

    Use `create` or `reopen`. `checkpoints` is the folder of checkpoints, and `best` that of the one with the
    best evaluation.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints, self.best = path / CHECKPOINTS, path / BEST
        self._metrics: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunDirectory":
        """Creates the directory of a new run, and its parents."""
        check_free(path)
        run = cls(path)
        with refusing(f"--out {path}", "written to"):
            path.mkdir(parents=True, exist_ok=True)
            run._acquire()
            check_free(path)
            files.write(path / "config.json", json_line(config, indent=2)[:-1])
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Opens the directory of an earlier run to resume it."""
        run = cls(path)
        with refusing(path, "written to"):
            run._acquire()
        return run

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows to `metrics.jsonl`, one line each, and flushes."""
        with self._mended("metrics.jsonl"):
            if self._metrics is None:
                self._metrics = files.open_to_append(self.path / "metrics.jsonl")
            self._metrics.writelines(map(json_line, rows))
            self._metrics.flush()
            if self._is_gone() or not os.fstat(self._metrics.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was removed while the run went on")

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Removes metrics after `iteration`, and a last line cut off by a crash; returns the last row kept.

        Other unreadable lines are moved to `metrics.unreadable`, with an `FdgWarning`. Results of an earlier
        end are removed: a run that continues has not ended.
        """
        path, last = self.path / "metrics.jsonl", None
        for name in RESULTS:
            with self._mended(name):
                (self.path / name).unlink(missing_ok=True)
        if not path.exists():
            return None
        with self._mended(path.name):
            with open_regular(path) as file:
                *lines, cut_off = file.read().split(b"\n")
            rows = {number: _row(line) for number, line in enumerate([*lines, cut_off], 1)}
            strange = [number for number, line in enumerate(lines, 1) if rows[number] is None]
            if strange:
                with files.open_to_append(self.path / "metrics.unreadable") as unreadable:
                    unreadable.writelines(lines[number - 1] + b"\n" for number in strange)
                warnings.warn(
                    f"{path}: line {', '.join(map(str, strange[:3]))}{' ...' if strange[3:] else ''} cannot"
                    f" be read, and was moved to metrics.unreadable; all other rows are kept",
                    FdgWarning,
                    stacklevel=2,
                )
            with files.replacing(path) as kept:
                for row in rows.values():
                    if row is not None and row["iteration"] <= iteration:
                        kept.write(json_line(row))
                        last = row
        return last

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replaces `config.json`."""
        with refusing(self.path, "written to"):
            files.write(self.path / "config.json", json_line(config, indent=2)[:-1])

    def summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None before the run has ended."""
        return read_summary(self.path)

    def publish_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replaces a JSON file of the run atomically."""
        self.publish(name, lambda file: file.write(json_line(content, indent=2)))

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Replaces a file of the run atomically by what `write` writes."""
        path = self.path / name
        with self._mended(name):
            if path.parent != self.path:
                files.make_folder(path.parent)
            with files.replacing(path) as file:
                write(file)

    def check_there(self) -> None:
        """Checks that the directory still exists."""
        if self._is_gone():
            raise unwritable(self.path, "", "", is_gone=True)

    def close(self) -> None:
        """Closes files and releases the lock."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # a failed write, which has already raised
                    file.close()
        self._metrics = self._lock = None

    def discard(self) -> None:
        """Removes the directory if it holds only `config.json` and the lock."""
        if self._is_gone():  # another run may be at this path by now
            return
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {"config.json", ".lock"}:
                for name in ("config.json", ".lock"):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    def _acquire(self) -> None:
        """Checks the existing files, then locks the directory until this process ends."""
        for name in _WRITTEN:
            with refusing(self.path / name):
                files.check_own(self.path / name, name in _FOLDERS)
        self._lock = files.open_to_append(self.path / ".lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FdgError(
                f"{self.path} is in use: another process is training there; give another --out"
            ) from None

    def _is_gone(self) -> bool:
        """Whether the path no longer leads to the directory that this process has locked."""
        if self._lock is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self._lock.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return not (self.path / "config.json").exists()
        except OSError:  # such as from a network file system: writing raises the cause
            return False

    @contextlib.contextmanager
    def _mended(self, name: str) -> Iterator[None]:
        """Turns an OSError (disk full, read-only or gone) into an error that says how to resume."""
        try:
            yield
        except OSError as error:
            what, why = f"{self.path / name} cannot be written", error.strerror or str(error)
            raise unwritable(self.path, what, why, self._is_gone()) from error


class Unwritten(RunDirectory):
    """The run directory in processes other than 0: its methods do nothing."""

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Does nothing."""
        return None

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Does nothing."""

    def discard(self) -> None:
        """Does nothing."""


def unwritable(path: Path, what: str, why: str, is_gone: bool, fix: str = "fix that") -> UnwritableError:
    """The error of a run that cannot write: what is lost, and how to resume.

    `why` is the system's message, and `fix` the fix for one without a known fix.
    """
    if is_gone:
        return UnwritableError(
            f"{path} was removed or moved while the run went on: the folder is gone, and what was saved in"
            f" it: bring it back and go on with --resume {path}, or start the run again"
        )
    saved = [int(one.name) for one in (path / CHECKPOINTS).glob("[0-9]*") if one.name.isdecimal()]
    rest = (
        f" from iteration {max(saved):,}: what came after it is lost" if saved else ": nothing was saved yet"
    )
    return UnwritableError(f"{what} ({why}): {_FIXES.get(why, fix)}, and go on with --resume {path}{rest}")


_FIXES = {
    **{os.strerror(code): "make room there" for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)},
    **{os.strerror(code): "make it writable" for code in (errno.EACCES, errno.EPERM, errno.EROFS)},
}


def check_free(path: Path) -> None:
    """Checks that a path can become the directory of a new run; creates nothing."""
    check_spelled(path)
    try:
        if path.exists() and not path.is_dir():
            raise FdgError(f"--out {path} is a file: give a directory")
        taken = [name for name in FILES if os.path.lexists(path / name)]
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise refused(f"--out {path}", error, "written to") from error
    if "config.json" in taken:
        raise FdgError(
            f"--out {path} holds a run already: give another directory, or go on with --resume {path}"
            " (in Python: resume=True)"
        )
    if taken:
        raise FdgError(
            f"--out {path} holds {taken[0]} already, which would be overwritten: give another directory"
        )
    if not existing.is_dir():
        raise FdgError(f"--out {path} cannot be made: {existing} is a file")
    if cause := files.refusal(existing):
        raise refused(f"--out {path}", cause, "written to")


def check_spelled(path: Path) -> None:
    """Checks that a path is UTF-8, as TensorStore requires."""
    try:
        str(path.absolute()).encode()
        os.fsencode(path)
    except UnicodeEncodeError:
        fix = "give another directory"
        if sys.getfilesystemencoding() != "utf-8":
            fix = f"this process takes names of files for {sys.getfilesystemencoding()}: set PYTHONUTF8=1"
        raise FdgError(f"{ascii(str(path))[1:-1]}: its name is no UTF-8: {fix}") from None


def read_config(path: Path, prefix: str = "--resume: ") -> dict[str, Any]:
    """Reads the configuration of the run in `path`; error messages start with `prefix`."""
    check_spelled(path)
    file = path / "config.json"
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        around = [one / "config.json" for one in path.absolute().parents[:2]]
        found = (*around, *sorted(path.glob("*/config.json")))
        near = [one.parent for one in found if os.path.isfile(one)]
        fix = "leave out --resume to start one" if prefix == "--resume: " else "give the run directory"
        more = f" ({len(near) - _LISTED} more)" if len(near) > _LISTED else ""
        fix = f"give {listed(near[:_LISTED])}{more}" if near else fix
        raise FdgError(f"{prefix}no run in {path} (it has no config.json): {fix}") from None
    except (OSError, ValueError):  # reading it raises the cause
        pass
    try:
        said = read_json(file, _JSON_BYTES)
    except FdgError as error:
        why = str(error).removeprefix(f"{file}: ").removeprefix("cannot be read: ")
        fix = "bring it back from a copy, or start a new run"
        raise FdgError(f"{prefix}{file} cannot be read: {why}: {fix}") from None
    return checked_config(file, said)


_NEEDED = {"algo", "policy", "policy_fields", "hyperparameters"}  # required keys of a configuration
_KINDS: dict[str, Any] = {"policy_fields": dict, "hyperparameters": dict, "resumes": list}


def checked_config(file: Path, said: Any) -> dict[str, Any]:
    """Checks the types of a configuration's values, so that later code can rely on them."""
    if not isinstance(said, dict) or not said.keys() >= _NEEDED:
        right = file.with_name("config.json")
        fix = right if right != file and right.is_file() else "the config.json of a run directory"
        raise FdgError(f"{file} is no configuration of a run: give {fix}")
    for name, kind in _KINDS.items():
        if not isinstance(said.get(name, kind()), kind):
            what = {dict: "an object of names", list: "a list"}[kind]
            raise FdgError(f"{file} has {name} = {said[name]!r:.60}, which is not {what}")
    read_settings(file, said)
    return said


def read_summary(path: Path) -> dict[str, Any] | None:
    """The content of `summary.json`; None before the run has ended, or if it is unreadable."""
    try:
        summary = read_json(path / "summary.json", _JSON_BYTES)
    except FdgError:
        return None
    fit = all(fits(summary.get(name)) for name, fits in _SUMMARY.items())
    return summary if fit else None


# Checks of the entries that other code reads.
_SUMMARY: dict[str, Callable[[Any], bool]] = {
    "eval_return": lambda value: _is_metric("", value),
    "eval_returns": lambda value: value is None or _is_metric("_per_seed", value),
    "devices": lambda value: isinstance(value, list | None),
}


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, without unreadable lines."""
    if not os.path.lexists(path):
        return
    with open_regular(path) as lines:
        for line in lines:
            row = _row(line)
            if row is not None:
                yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics; None if the line is not one."""
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
    """Whether a value is a metric: a number or None; for `..._per_seed`, a list of them."""
    if name.endswith("_per_seed"):
        return isinstance(value, list) and all(_is_metric("", one) for one in value)
    return value is None or (isinstance(value, int | float) and -_MOST < value < _MOST)


_MOST = 1e300  # the largest absolute value of a metric


def plain(value: Any) -> Any:
    """Converts to JSON types: NumPy numbers to Python's, NaN and infinities to null.

    A float32 gets the fewest digits that round-trip.

    >>> plain({"loss": np.float32(0.1), "episode_return": np.nan, "seeds": (0, 1)})
    {'loss': 0.1, 'episode_return': None, 'seeds': [0, 1]}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    if isinstance(value, np.floating | float):
        return float(str(value)) if math.isfinite(value) else None
    return value


def json_line(value: Any, indent: int | None = None) -> bytes:
    """`plain(value)` as a line of JSON."""
    return json.dumps(plain(value), indent=indent, allow_nan=False).encode() + b"\n"
