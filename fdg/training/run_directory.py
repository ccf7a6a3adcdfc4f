"""What a training run leaves on disk: configuration, metrics, learning curve, summary, checkpoints."""

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
from fdg.errors import FdgError, FdgWarning, RunError, listed
from fdg.reading import open_regular, read_json
from fdg.settings.fields import MOST_STEPS
from fdg.training.settings import read_settings

CHECKPOINTS = "checkpoints"
DATA = "data"
BEST = "best_checkpoint"  # there only in runs that are evaluated while they train
FILES = ("config.json", "metrics.jsonl", "summary.json", "learning_curve.png", CHECKPOINTS)
# All that a run may write into its directory, by whichever of its parts.
_FOLDERS = (CHECKPOINTS, BEST, DATA, "samples", "profile", "tensorboard", "wandb", "mlruns", "trials")
_WRITTEN = (
    *(".lock", "config.json", "metrics.jsonl", "metrics.unreadable", "summary.json", "learning_curve.png"),
    *("sweep.json", "sweep.csv", "sweep.png", "search.json", "search.png", "study.journal"),
    *("timeline.svg", "timeline.json"),
    *(f".{CHECKPOINTS}", f".{BEST}", *_FOLDERS),
)
_LISTED = 6  # runs of a folder that is none
_JSON_BYTES = 64 << 20


class RunDirectory:
    """One run's directory. Every file but the metrics is replaced as a whole, so none is ever half written.

    Only regular files and real directories are written to, never what a link leads to; `path` may be a link.

    Use `create` or `reopen`.
    """

    def __init__(self, path: Path):
        self.path = path
        self._metrics: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where `fdg.checkpoint.Checkpoints` writes."""
        return self.path / CHECKPOINTS

    @property
    def best(self) -> Path:
        """Where the checkpoint goes whose evaluation was best."""
        return self.path / BEST

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunDirectory":
        """Makes the directory of a new run, parents included.

        Raises:
          FdgError: the place cannot be written to, or holds a run, whose data is never overwritten.
        """
        check_free(path)
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._acquire()
            check_free(path)
            files.replace(path / "config.json", json_line(config, indent=2)[:-1])
        except OSError as error:
            raise FdgError(f"--out {path} cannot be written to: {error.strerror or error}") from error
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Opens the directory of an earlier run to go on with it.

        Raises:
          FdgError: another process is at work in it, it cannot be written to, or what it holds is no regular
            file where the run has one.
        """
        run = cls(path)
        try:
            run._acquire()
        except OSError as error:
            raise FdgError(f"{path} cannot be written to: {error.strerror or error}") from error
        return run

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds one line a row to `metrics.jsonl`, and hands them to the operating system."""
        with self._mended("metrics.jsonl"):
            if self._metrics is None:
                self._metrics = files.open_to_append(self.path / "metrics.jsonl")
            self._metrics.writelines(map(json_line, rows))
            self._metrics.flush()
            if self._is_gone() or not os.fstat(self._metrics.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was removed while the run went on")

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Removes metrics after `iteration`, and a line cut off by a crash; gives the last row left.

        Other lines that cannot be read go to `metrics.unreadable`, with a warning (`FdgWarning`).
        """
        path, last = self.path / "metrics.jsonl", None
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
        """Replaces `config.json`.

        Raises:
          FdgError: it cannot be written.
        """
        try:
            files.replace(self.path / "config.json", json_line(config, indent=2)[:-1])
        except OSError as error:
            raise FdgError(f"{self.path} cannot be written to: {error.strerror or error}") from error

    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` says; None before the run has ended."""
        return read_summary(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        self.publish_json("summary.json", summary)

    def publish_json(self, name: str, content: Mapping[str, Any]) -> None:
        """`publish` of a file of JSON."""
        self.publish(name, lambda file: file.write(json_line(content, indent=2)))

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Replaces a file of the run, or of a folder in it, as a whole, by what `write` writes.

        Raises:
          RunError: it cannot be written.
        """
        path = self.path / name
        with self._mended(name):
            if path.parent != self.path:
                files.make_folder(path.parent)
            with files.replacing(path) as file:
                write(file)

    def check_there(self) -> None:
        """Refuses to go on where the directory was removed or moved.

        Raises:
          RunError: it was.
        """
        if self._is_gone():
            raise unwritable(self.path, "", "", is_gone=True)

    def close(self) -> None:
        """Releases the directory to other processes."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # of what could not be written, which was said then
                    file.close()
        self._metrics = self._lock = None

    def discard(self) -> None:
        """Removes the directory, if nothing was written into it but what says that it is one."""
        if self._is_gone():  # and it may be another run's by now
            return
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {"config.json", ".lock"}:
                for name in ("config.json", ".lock"):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    def _acquire(self) -> None:
        """Keeps other processes out until this one ends, however it ends; first looks at what is there."""
        for name in _WRITTEN:
            try:
                files.check_own(self.path / name, name in _FOLDERS)
            except OSError as error:
                raise FdgError(f"{self.path / name} cannot be written: {error.strerror}") from None
        self._lock = files.open_to_append(self.path / ".lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FdgError(
                f"{self.path} is in use: another process is training there; give another --out"
            ) from None

    def _is_gone(self) -> bool:
        """Whether the path leads no longer to what this process has locked."""
        if self._lock is None:
            return False
        try:
            return not os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self._lock.fileno()))
        except (FileNotFoundError, NotADirectoryError):  # or it was removed
            return not (self.path / "config.json").exists()
        except OSError:  # of a network, say: writing says what is wrong
            return False

    @contextlib.contextmanager
    def _mended(self, name: str) -> Iterator[None]:
        """A disk that is full, read-only or gone, as an error that says how to go on."""
        try:
            yield
        except OSError as error:
            what, why = f"{self.path / name} cannot be written", error.strerror or str(error)
            raise unwritable(self.path, what, why, self._is_gone()) from error


class Unwritten(RunDirectory):
    """What the processes have that do not write: what they call of it does nothing."""

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Does nothing."""
        return None

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Does nothing."""

    def check_there(self) -> None:
        """Does nothing."""

    def discard(self) -> None:
        """Does nothing."""


def unwritable(path: Path, what: str, why: str, is_gone: bool, fix: str = "put that right") -> RunError:
    """The error of a run that can write no more: what is lost, and how to go on.

    Args:
      path: the run directory.
      what: cannot be written, as a sentence.
      why: as the system says it.
      is_gone: whether the directory was removed or moved.
      fix: of what the system says in words of its own.
    """
    if is_gone:
        return RunError(
            f"{path} was removed or moved while the run went on: the folder is gone, and what was saved in"
            f" it: bring it back and go on with --resume {path}, or start the run again"
        )
    saved = [int(one.name) for one in (path / CHECKPOINTS).glob("[0-9]*") if one.name.isdecimal()]
    rest = (
        f" from iteration {max(saved):,}: what came after it is lost" if saved else ": nothing was saved yet"
    )
    return RunError(f"{what} ({why}): {_FIXES.get(why, fix)}, and go on with --resume {path}{rest}")


_FIXES = {
    **{os.strerror(code): "make room there" for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)},
    **{os.strerror(code): "make it writable" for code in (errno.EACCES, errno.EPERM, errno.EROFS)},
}


def check_free(path: Path) -> None:
    """Refuses a place for a new run that cannot be one; makes nothing.

    Raises:
      FdgError: it is a file, lies below one, cannot be written to, or holds a run.
    """
    check_spelled(path)
    try:
        if path.exists() and not path.is_dir():
            raise FdgError(f"--out {path} is a file: give a directory")
        taken = [name for name in FILES if os.path.lexists(path / name)]
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except (OSError, ValueError) as error:  # ValueError: a null character
        why = getattr(error, "strerror", None) or error
        raise FdgError(f"--out {path} cannot be written to: {why}") from error
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
    if refused := files.refusal(existing):
        raise FdgError(f"--out {path} cannot be written to: {refused.strerror}")


def check_spelled(path: Path) -> None:
    """Refuses a run directory whose name checkpoints cannot be written under: TensorStore takes UTF-8 alone.

    Raises:
      FdgError: it is no UTF-8, or this process's locale cannot spell it.
    """
    try:
        str(path.absolute()).encode()
        os.fsencode(path)
    except UnicodeEncodeError:
        fix = "give another directory"
        if sys.getfilesystemencoding() != "utf-8":
            fix = f"this process takes names of files for {sys.getfilesystemencoding()}: set PYTHONUTF8=1"
        raise FdgError(f"{ascii(str(path))[1:-1]}: its name is no UTF-8: {fix}") from None


def read_config(path: Path, prefix: str = "--resume: ") -> dict[str, Any]:
    """The configuration of the run in `path`; `prefix` begins errors.

    Raises:
      FdgError: there is no run, or its configuration is damaged.
    """
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
    except (OSError, ValueError):  # as reading it says
        pass
    try:
        said = read_json(file, _JSON_BYTES)
    except FdgError as error:
        why = str(error).removeprefix(f"{file}: ").removeprefix("cannot be read: ")
        fix = "bring it back from a copy, or start a new run"
        raise FdgError(f"{prefix}{file} cannot be read: {why}: {fix}") from None
    return checked_config(file, said)


_KINDS: dict[str, Any] = {"policy_fields": dict, "hyperparameters": dict, "resumes": list}
_DEEPEST = 20  # values within values; ours have three


def checked_config(file: Path, said: Any) -> dict[str, Any]:
    """A configuration whose values are of the kinds that it has: later code need not look again.

    Raises:
      FdgError: it is none of a run; names the value.
    """
    if not isinstance(said, dict):
        raise FdgError(f"{file} is no configuration of a run: give the config.json of a run directory")
    for name, value in said.items():
        wrong = ""
        if name in _KINDS and not isinstance(value, _KINDS[name]):
            wrong = {dict: "an object of names", list: "a list"}[_KINDS[name]]
        elif _is_beyond(value):
            wrong = f"numbers up to {MOST_STEPS:.0e}, in less than {_DEEPEST} levels"
        if wrong:
            raise FdgError(f"{file} has {name} = {value!r:.60}, which is not {wrong}")
    read_settings(file, said)
    return said


def _is_beyond(value: Any) -> bool:
    """Whether values lie within values in too many levels, or a whole number is above all that count."""
    level = [value]
    for _ in range(_DEEPEST):
        if any(isinstance(one, int) and abs(one) > MOST_STEPS for one in level):
            return True
        items = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [item for one in items for item in one]
    return bool(level)


def read_summary(path: Path) -> dict[str, Any] | None:
    """What `summary.json` in a run directory says; None before the run has ended, or if it cannot be read."""
    try:
        summary = read_json(path / "summary.json", _JSON_BYTES)
    except FdgError:
        return None
    fit = all(fits(summary.get(name)) for name, fits in _SUMMARY.items())
    return summary if fit and not _is_beyond(summary) else None


# Of a summary, what others read.
_SUMMARY: dict[str, Callable[[Any], bool]] = {
    "eval_return": lambda value: _is_metric("", value),
    "eval_returns": lambda value: value is None or _is_metric("_per_seed", value),
    "devices": lambda value: isinstance(value, list | None),
}


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, without lines that cannot be read.

    Raises:
      FdgError: it is no regular file, or cannot be opened.
    """
    if not os.path.lexists(path):
        return
    with open_regular(path) as lines:
        for line in lines:
            row = _row(line)
            if row is not None:
                yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics, None for a line that is none."""
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
    """Whether a value of a row is what a row has: a number, or of `..._per_seed` one of each agent."""
    if name.endswith("_per_seed"):
        return isinstance(value, list) and all(_is_metric("", one) for one in value)
    return value is None or (isinstance(value, int | float) and -_MOST < value < _MOST)


_MOST = 1e300  # what NumPy has as a number


def plain(value: Any) -> Any:
    """`value` as JSON types: NumPy numbers become Python's; NaN and infinities become null.

    A float32 gets the shortest digits that give it back.

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
    """`plain(value)` as JSON that ends with a line break."""
    return json.dumps(plain(value), indent=indent, allow_nan=False).encode() + b"\n"
