"""What a training run leaves on disk: configuration, metrics, learning curve, summary, checkpoints."""

import contextlib
import errno
import fcntl
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from fdg.errors import FdgError, FdgWarning, RunError, one_line

FILES = ("config.json", "metrics.jsonl", "summary.json", "learning_curve.png", "checkpoints")
_CURVE_POINTS = 200  # more than that is noise at the size of the picture


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
        return self.path / "checkpoints"

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
        with self._mended("metrics.jsonl"):
            if self._metrics is None:
                self._metrics = (self.path / "metrics.jsonl").open("a")
            self._metrics.writelines(_dumps(row) + "\n" for row in rows)
            self._metrics.flush()
            if not os.fstat(self._metrics.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was removed while the run went on")

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Removes metrics after `iteration`, and a line cut off by a crash; gives the last row left.

        Other lines that cannot be read go to `metrics.unreadable`, with a warning (`FdgWarning`).
        """
        path, last = self.path / "metrics.jsonl", None
        if not path.exists():
            return None
        with self._mended(path.name):
            *lines, cut_off = path.read_bytes().split(b"\n")
            rows = {number: _row(line) for number, line in enumerate([*lines, cut_off], 1)}
            strange = [number for number, line in enumerate(lines, 1) if rows[number] is None]
            if strange:
                with (self.path / "metrics.unreadable").open("ab") as file:
                    file.writelines(lines[number - 1] + b"\n" for number in strange)
                warnings.warn(
                    f"{path}: line {', '.join(map(str, strange[:3]))}{' ...' if strange[3:] else ''} cannot"
                    f" be read, and was moved to metrics.unreadable; all other rows are kept",
                    FdgWarning,
                    stacklevel=2,
                )
            with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=".metrics-", delete=False) as kept:
                for row in rows.values():
                    if row is not None and row["iteration"] <= iteration:
                        kept.write(_dumps(row) + "\n")
                        last = row
            _publish(Path(kept.name), path)
        return last

    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` says; None before the run has ended, or where it cannot be read."""
        try:
            summary = json.loads((self.path / "summary.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return summary if isinstance(summary, dict) else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        with self._mended("summary.json"):
            self._write("summary.json", (_dumps(summary, indent=2) + "\n").encode())

    def draw_learning_curve(self, title: str, solved: float | None = None) -> None:
        """Draws `learning_curve.png` from `metrics.jsonl`: episode return over environment steps.

        Args:
          title: what was trained.
          solved: a return to mark with a line.
        """
        rows = list(read_metrics(self.path / "metrics.jsonl"))
        with self._mended("learning_curve.png"):
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".curve-", delete=False) as picture:
                _draw(rows, title, solved, picture)
            _publish(Path(picture.name), self.path / "learning_curve.png")

    def close(self) -> None:
        """Releases the directory to other processes."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # of what could not be written, which was said then
                    file.close()
        self._metrics = self._lock = None

    def discard(self) -> None:
        """Removes the directory, if nothing was written into it but what says that it is one."""
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {"config.json", ".lock"}:
                for name in ("config.json", ".lock"):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

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
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=f".{name}-", delete=False) as file:
            file.write(content)
        _publish(Path(file.name), self.path / name)

    @contextlib.contextmanager
    def _mended(self, name: str) -> Iterator[None]:
        """A disk that is full, read-only or gone, as an error that says how to go on."""
        try:
            yield
        except OSError as error:
            fix = f"put that right, and go on with --resume {self.path}"
            if not (self.path / "config.json").exists():
                fix = "the folder is gone, and what was saved in it"
            raise RunError(
                f"{self.path / name} cannot be written ({error.strerror or error}): {fix}"
            ) from error


class Unwritten(RunDirectory):
    """What the processes have that do not write: what they call of it does nothing."""

    def truncate_metrics(self, iteration: int) -> dict[str, Any] | None:
        """Does nothing."""
        return None

    def draw_learning_curve(self, title: str, solved: float | None = None) -> None:
        """Does nothing."""

    def discard(self) -> None:
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


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of the run in `path`.

    Raises:
      FdgError: there is no run, or its configuration is damaged.
    """
    try:
        return json.loads((path / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FdgError(
            f"--resume: no run in {path} (it has no config.json): leave out --resume to start one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FdgError(f"--resume: {path / 'config.json'} cannot be read: {one_line(error)}") from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, without lines that cannot be read."""
    if not path.exists():
        return
    with path.open("rb") as lines:
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
    if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
        return None
    return row if all(isinstance(row.get(name), int | float) for name in ("env_steps", "wall_s")) else None


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


def _bins(steps: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_CURVE_POINTS` weighted means over stretches of equal length; empty ones are left out."""
    points = min(_CURVE_POINTS, len(steps))
    edges = np.linspace(0, steps[-1], points + 1)
    which = np.clip(np.searchsorted(edges, steps) - 1, 0, points - 1)
    weights = np.where(np.isfinite(values), weights, 0)
    total = np.bincount(which, weights, minlength=points)
    mean = np.bincount(which, np.nan_to_num(values) * weights, minlength=points) / np.maximum(total, 1e-30)
    return edges[1:][total > 0], mean[total > 0]


def _draw(rows: list[dict[str, Any]], title: str, solved: float | None, picture: Any) -> None:
    # Not pyplot: it picks a window system, and keeps figures alive. Imported here because it takes 0.4 s.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = np.array([row["env_steps"] for row in rows], float)
    returns = np.array([row.get("episode_return") for row in rows], float)  # null becomes not-a-number
    if np.isfinite(returns).any():
        episodes = np.array([row.get("episodes") or 1 for row in rows], float)
        seeds = [row.get("episode_return_per_seed") for row in rows]
        if seeds[0] is not None:
            curves = [_bins(steps, column, episodes) for column in np.array(seeds, float).T]
            for x, y in curves:
                axes.plot(x, y, color="#0072b2", alpha=0.25, linewidth=0.8)
            axes.plot(*_bins(steps, returns, episodes), color="#0072b2", label=f"mean of {len(curves)} seeds")
        else:
            axes.plot(*_bins(steps, returns, episodes), color="#0072b2", label="episode return")
    else:
        axes.text(0.5, 0.5, "no episode ended", transform=axes.transAxes, ha="center", va="center")
    if solved is not None:
        axes.axhline(solved, color="#555555", linestyle="--", linewidth=1, label=f"solved: {solved:g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    axes.set(title=title, xlabel="environment steps", ylabel="mean episode return", xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(picture, format="png", dpi=150)
