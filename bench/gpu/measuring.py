"""Parts of measurements: each is kept the moment it is there, and has a limit of time.

A part is a list of measurements, the most valuable first. They run one after the other in a process of their
own, which may crash, hang or run out of memory: then its measurement has failed, and the next begins another
process. One that is longer than the time that is left is passed over, and said to be.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bench.results import machine_facts
from fdg.errors import FdgError

Figures = dict[str, Any]
"""Column: value. Lists and dicts are kept, and are no columns; those of `ROWS` are rows of their own."""
ROWS = "rows"
_BEGIN = 1.0  # seconds that a process may take to end


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of a call.

    Attributes:
      out: the folder of the records.
      tiny: sizes of a rehearsal on a CPU.
      peers: a folder with checkouts of peers, by name; None for none.
    """

    out: Path
    tiny: bool = False
    peers: Path | None = None

    def size(self, full: Any, tiny: Any) -> Any:
        """The one or the other."""
        return tiny if self.tiny else full


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of a table, or several.

    Attributes:
      table: that it belongs to.
      row: its name there.
      measure: returns the figures.
      seconds: that it takes about on a GPU; with less left it is not begun.
      limit: after so many seconds it is given up.
      alone: whether it begins in a fresh process, as what looks at the memory of one must.
    """

    table: str
    row: str
    measure: Callable[[], Figures]
    seconds: float = 15.0
    limit: float = 120.0
    alone: bool = False

    @property
    def name(self) -> str:
        """Of the whole part."""
        return f"{self.table}: {self.row}"


Measurements: TypeAlias = Callable[[Settings], list[Measurement]]


@dataclasses.dataclass(frozen=True)
class Part:
    """Measurements of one command.

    Attributes:
      title: for people.
      seconds: that the whole command has.
      measurements: of some settings; each begins without what is on the devices.
    """

    title: str
    seconds: float
    measurements: Measurements


class Record:
    """The figures of a part, in a file that is whole at any moment.

    Raises:
      FdgError: the file is none of these, or of a rehearsal where this is none.
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
        """What is finished, by name."""
        return self.content["measured"]

    def keep(self, kind: str, name: str, value: Any) -> None:
        """Enters what was measured, or why it was not; on the disk when this returns."""
        for other in ("measured", "failed", "left out"):
            self.content[other].pop(name, None)
        self.content[kind][name] = value
        self.content["machine"] = {**self.content["machine"], **machine_facts()}
        with contextlib.suppress(FileExistsError):
            self._path.parent.mkdir(parents=True)
        new = self._path.with_suffix(".new")
        with new.open("w") as file:
            file.write(json.dumps(self.content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


Call = Callable[[Measurement, float], Figures]
"""Makes a measurement within some seconds; raises `FailedError`."""


class FailedError(Exception):
    """Why there are no figures."""


def here(measurement: Measurement, limit: float) -> Figures:
    """Makes it in this process, however long it takes.

    Raises:
      FailedError: it raised something else.
    """
    try:
        return measurement.measure()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        first_line = (str(error).splitlines() or [""])[0]
        raise FailedError(f"{type(error).__name__}: {first_line}"[:300]) from error


def measure(part: Part, settings: Settings, record: Record, call: Call, seconds: float | None = None) -> None:
    """Makes every measurement of a part that is not there yet, as long as there is time."""
    end = time.monotonic() + (part.seconds if seconds is None else seconds)
    for one in part.measurements(settings):
        if one.name in record.measured:
            print(f"{one.name}: measured already", flush=True)
            continue
        left = end - time.monotonic()
        if left < one.seconds:
            record.keep("left out", one.name, f"{left:.0f} s were left, and it takes about {one.seconds:.0f}")
            continue
        begun = time.monotonic()
        try:
            figures = call(one, left if settings.tiny else min(left, one.limit))  # limits are a GPU's
        except FailedError as error:
            record.keep("failed", one.name, str(error))
            print(f"{one.name}: failed: {error}", flush=True)
            continue
        record.keep("measured", one.name, figures)
        columns = ", ".join(f"{value} {column}" for column, value in shown(figures).items())
        print(f"{one.name}: {columns} ({time.monotonic() - begun:.1f} s)", flush=True)


def shown(figures: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a row, as text.

    >>> shown({"steps/s": 1234567.0, "s": 0.0123456, "solved": None, "kind": "cpu", "curve": [1, 2]})
    {'steps/s': '1,234,567', 's': '0.01235', 'solved': '-', 'kind': 'cpu'}
    """
    return {column: _text(value) for column, value in figures.items() if not isinstance(value, list | dict)}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Apart:
    """Makes measurements in another process, which outlives those that went well."""

    def __init__(self, measurements: Measurements, settings: Settings):
        self._measurements, self._settings = measurements, settings
        self._process: Any = None
        self._pipe: Any = None

    def __call__(self, one: Measurement, limit: float) -> Figures:
        """See `Call`."""
        if one.alone:
            self.close()
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, other = spawn.Pipe()
            self._process = spawn.Process(
                target=serve, args=(other, self._measurements, self._settings), daemon=True
            )
            self._process.start()
            other.close()
        try:
            self._pipe.send(one.name)
            if not self._pipe.poll(limit):
                self.close()
                raise FailedError(f"longer than {limit:.0f} s")
            figures, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_BEGIN)
            status = self._process.exitcode
            self.close()
            raise FailedError(f"its process ended with status {status}") from None
        if error:
            self.close()  # whatever it left on the device
            raise FailedError(error)
        return figures

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, or not begun its group
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


@contextlib.contextmanager
def apart(measurements: Measurements, settings: Settings) -> Iterator[Apart]:
    """`Apart`, until its process ends with this block."""
    made = Apart(measurements, settings)
    try:
        yield made
    finally:
        made.close()


def serve(pipe: Any, measurements: Measurements, settings: Settings) -> None:
    """The other process: figures and an error, one of them None, for each name that it is sent."""
    os.setsid()  # what it starts ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what libraries print
    known = {one.name: one for one in measurements(settings)}
    with contextlib.suppress(EOFError):
        while True:
            name = pipe.recv()
            try:
                pipe.send((here(known[name], math.inf), None))
            except FailedError as error:
                pipe.send((None, str(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
