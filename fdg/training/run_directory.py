"""What a training run leaves on disk: configuration, metrics, learning curve, summary, checkpoints."""

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from fdg.errors import FdgError

CHECKPOINTS = "checkpoints"
BEST = "best_checkpoint"  # there only in runs that are evaluated while they train
FILES = ("config.json", "metrics.jsonl", "summary.json", "learning_curve.png", CHECKPOINTS)


class RunDirectory:
    """One run's directory. Every file but the metrics is replaced as a whole, so none is ever half written.

    Use `create` or `reopen`.
    """

    def __init__(self, path: Path):
        self.path = path
        self._metrics: IO[str] | None = None
        self._lock: IO[str] | None = None

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
            run._write("config.json", _dumps(config, indent=2).encode())
        except OSError as error:
            raise FdgError(f"--out {path} cannot be written to: {error.strerror or error}") from error
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Opens the directory of an earlier run to go on with it.

        Raises:
          FdgError: another process is at work in it, or it cannot be written to.
        """
        run = cls(path)
        try:
            run._acquire()
        except OSError as error:
            raise FdgError(f"{path} cannot be written to: {error.strerror or error}") from error
        return run

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds one line a row to `metrics.jsonl`, and hands them to the operating system."""
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("a")
        self._metrics.writelines(_dumps(row) + "\n" for row in rows)
        self._metrics.flush()

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Removes metrics after `iteration`, and a line cut off by a crash; gives the last row left."""
        path, last = self.path / "metrics.jsonl", None
        if not path.exists():
            return None
        with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=".metrics-", delete=False) as kept:
            for row in read_metrics(path):
                if row["iteration"] <= iteration:
                    kept.write(_dumps(row) + "\n")
                    last = row
        _publish(Path(kept.name), path)
        return last

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replaces `config.json`.

        Raises:
          FdgError: it cannot be written.
        """
        try:
            self._write("config.json", _dumps(config, indent=2).encode())
        except OSError as error:
            raise FdgError(f"{self.path} cannot be written to: {error.strerror or error}") from error

    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` says; None before the run has ended."""
        return read_summary(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        self._write("summary.json", (_dumps(summary, indent=2) + "\n").encode())

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Replaces a file of the run as a whole, by what `write` writes."""
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=f".{name}-", delete=False) as file:
            write(file)
        _publish(Path(file.name), self.path / name)

    def close(self) -> None:
        """Releases the directory to other processes."""
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()
        self._metrics = self._lock = None

    def _acquire(self) -> None:
        """Keeps other processes out until this one ends, however it ends."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FdgError(
                f"{self.path} is in use: another process is training there; give another --out"
            ) from None

    def _write(self, name: str, content: bytes) -> None:
        self.publish(name, lambda file: file.write(content))


class Unwritten(RunDirectory):
    """What the processes have that do not write: what they call of it does nothing."""

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Does nothing."""
        return None

    def publish(self, name: str, write: Callable[[Any], object]) -> None:
        """Does nothing."""


def check_free(path: Path) -> None:
    """Refuses a place for a new run that cannot be one; makes nothing.

    Raises:
      FdgError: it is a file, lies below one, cannot be written to, or holds a run.
    """
    try:
        if path.exists() and not path.is_dir():
            raise FdgError(f"--out {path} is a file: give a directory")
        taken = [name for name in FILES if (path / name).exists()]
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except OSError as error:
        raise FdgError(f"--out {path} cannot be written to: {error.strerror or error}") from error
    if "config.json" in taken:
        raise FdgError(
            f"--out {path} holds a run already: give another directory, or go on with --resume {path}"
        )
    if taken:
        raise FdgError(
            f"--out {path} holds {taken[0]} already, which would be overwritten: give another directory"
        )
    if not existing.is_dir():
        raise FdgError(f"--out {path} cannot be made: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FdgError(f"--out {path} cannot be written to: no permission to write in {existing}")


def read_config(path: Path, prefix: str = "--resume: ") -> dict[str, Any]:
    """The configuration of the run in `path`; `prefix` begins errors.

    Raises:
      FdgError: there is no run, or its configuration is damaged.
    """
    try:
        return json.loads((path / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FdgError(
            f"{prefix}no run in {path} (it has no config.json)"
            + (": leave out --resume to start one" if prefix else "")
        ) from None
    except (OSError, ValueError) as error:
        raise FdgError(f"{prefix}{path / 'config.json'} cannot be read: {error}") from error


def read_summary(path: Path) -> dict[str, Any] | None:
    """What `summary.json` in a run directory says; None before the run has ended.

    Raises:
      FdgError: it cannot be read.
    """
    try:
        return json.loads((path / "summary.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FdgError(f"{path / 'summary.json'} cannot be read: {error}") from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, up to the first line that is not whole."""
    if not path.exists():
        return
    with path.open() as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                return


def plain(value: Any) -> Any:
    """`value` with what JSON knows: NumPy numbers as Python's, not-a-number and infinities as null.

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


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def _publish(temporary: Path, final: Path) -> None:
    """Puts a file in its place at once, with ordinary permissions (temporary files are private)."""
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o666 & ~mask)
    os.replace(temporary, final)
