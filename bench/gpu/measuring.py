"""Runs measurements in time-limited parts, and records each result at once.

A part is a list of measurements, the most valuable first. They run one after the other in a separate process.
If it crashes, hangs or runs out of memory, the measurement has failed, and the next one gets a new process.
A measurement that needs more than the remaining time is skipped, and the record says so.
"""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.results import machine_facts
from fdg import files
from fdg.errors import FdgError

Figures = dict[str, Any]
"""Values by column. Lists and dicts are recorded, but are not columns. The key `ROWS` has a list of rows."""
ROWS = "rows"
_PATIENCE = 1.0  # seconds for a process to end


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the command.

    Attributes:
      out: the folder of the records.
      tiny: whether this is a rehearsal on a CPU.
      peers: a folder with checkouts of peers, by name.
    """

    out: Path
    tiny: bool = False
    peers: Path | None = None

    def full_or_tiny(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of a table, or several.

    Attributes:
      table: name of the table in which it is a row.
      row: name of the row.
      measure: returns the figures.
      seconds: its approximate time on a GPU; with less time left it is skipped.
      limit: its time limit in seconds.
      alone: whether it needs a new process, because it reads the peak memory of the process.
    """

    table: str
    row: str
    measure: Callable[[], Figures]
    seconds: float = 15.0
    limit: float = 120.0
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.table}: {self.row}"


@dataclasses.dataclass(frozen=True)
class Part:
    """The measurements of one command.

    Attributes:
      title: a heading.
      seconds: the time limit of all measurements together.
      measurements: makes the list of measurements.
    """

    title: str
    seconds: float
    measurements: Callable[[Settings], list[Measurement]]


class Record:
    """The figures of a part, in a file that is replaced atomically.

    Attributes:
      content: `tiny`, `machine`, and by name of a measurement `measured` (figures), `failed` and `left out`
        (reasons).

    Raises:
      FdgError: the file is not a record, or `tiny` differs from the record's.
    """

    def __init__(self, path: Path, tiny: bool = False):
        self._path = path
        self.content: dict[str, Any] = {
            "tiny": tiny,
            "machine": {},
            "measured": {},
            "failed": {},
            "left out": {},
        }
        if path.exists():
            try:
                self.content |= json.loads(path.read_text())
            except (OSError, ValueError, TypeError) as error:
                raise FdgError(
                    f"{path} is no record of this command ({error}): name another folder"
                ) from None
        if self.content["tiny"] != tiny:
            kinds = ("measurements", "a rehearsal") if tiny else ("a rehearsal", "measurements")
            raise FdgError(f"{path} has figures of {kinds[0]}, and this is {kinds[1]}: name another folder")

    @property
    def measured(self) -> Mapping[str, Figures]:
        return self.content["measured"]

    def keep(self, kind: str, name: str, value: Any) -> None:
        """Writes the figures of a measurement (`kind` "measured"), or why it "failed" or was "left out"."""
        for other in ("measured", "failed", "left out"):
            self.content[other].pop(name, None)
        self.content[kind][name] = value
        self.content["machine"] = {**self.content["machine"], **machine_facts()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(self._path) as file:
            file.write((json.dumps(self.content, indent=1) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


Call = Callable[[Measurement, float], Figures]
"""Makes a measurement within a number of seconds; raises `FailedError`."""


class FailedError(Exception):
    """The measurement failed."""


def measure_here(measurement: Measurement, limit: float) -> Figures:
    """A `Call` that makes a measurement in this process. `limit` is ignored.

    Raises:
      FailedError: the measurement raised an error.
    """
    try:
        return measurement.measure()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        first_line = (str(error).splitlines() or [""])[0]
        raise FailedError(f"{type(error).__name__}: {first_line}"[:300]) from error


def measure(part: Part, settings: Settings, record: Record, call: Call, seconds: float | None = None) -> None:
    """Makes the missing measurements of a part while there is time; `seconds` replaces the part's limit."""
    end = time.monotonic() + (part.seconds if seconds is None else seconds)
    for item in part.measurements(settings):
        if item.name in record.measured:
            print(f"{item.name}: measured already", flush=True)
            continue
        remaining = end - time.monotonic()
        if remaining < item.seconds:
            reason = f"{remaining:.0f} s were left, and it takes about {item.seconds:.0f}"
            record.keep("left out", item.name, reason)
            continue
        begun = time.monotonic()
        try:
            limit = remaining if settings.tiny else min(remaining, item.limit)  # `item.limit` is for a GPU
            figures = call(item, limit)
        except FailedError as error:
            record.keep("failed", item.name, str(error))
            print(f"{item.name}: failed: {error}", flush=True)
            continue
        record.keep("measured", item.name, figures)
        columns = ", ".join(f"{value} {column}" for column, value in columns_of(figures).items())
        print(f"{item.name}: {columns} ({time.monotonic() - begun:.1f} s)", flush=True)


def columns_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a row, as text.

    >>> columns_of({"steps/s": 1234567.0, "s": 0.0123456, "solved": None, "kind": "cpu", "curve": [1, 2]})
    {'steps/s': '1,234,567', 's': '0.01235', 'solved': '-', 'kind': 'cpu'}
    """
    return {column: _text(value) for column, value in figures.items() if not isinstance(value, list | dict)}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class MeasuringProcess:
    """A spawned process that makes measurements; after a failure a new one replaces it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, measurement: Measurement, limit: float) -> Figures:
        """See `Call`."""
        if measurement.alone:
            self.close()
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, other = spawn.Pipe()
            self._process = spawn.Process(target=serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        try:
            self._pipe.send(measurement)
            if not self._pipe.poll(limit):
                self.close()
                raise FailedError(f"longer than {limit:.0f} s")
            figures, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_PATIENCE)
            status = self._process.exitcode
            self.close()
            raise FailedError(f"its process ended with status {status}") from None
        if error:
            self.close()  # frees its memory on the device
            raise FailedError(error)
        return figures

    def close(self) -> None:
        if self._process is not None:
            # The process may have ended, or have no process group yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def serve(pipe: Any) -> None:
    """Runs in the spawned process: answers each measurement with figures and an error, one of them None."""
    os.setsid()  # `killpg` then kills its children, too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # libraries print to standard error
    with contextlib.suppress(EOFError):
        while True:
            measurement = pipe.recv()
            try:
                pipe.send((measure_here(measurement, math.inf), None))
            except FailedError as error:
                pipe.send((None, str(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
