"""Progress of a run: a live display in a terminal, occasional lines elsewhere."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from fdg.training.statistics import format_numbers

_LOG_LINES = 10  # approximate number of lines that a run prints, if not in a terminal
_LOG_WIDTH = 80
_MAX_LOG_SECONDS = 30.0  # maximum seconds between these lines


class Progress:
    """Shows iterations, steps, steps per second, the episode return, and elapsed and remaining time.

    Use as a context manager; call `update` as results arrive. `steps_per_iteration` counts the steps of all
    agents, and `start` the iterations before a resume.
    """

    def __init__(
        self, num_iterations: int, steps_per_iteration: int, start: int = 0, file: TextIO | None = None
    ):
        self._num_iterations, self._start = num_iterations, start
        self._steps_per_iteration = steps_per_iteration
        self._file: TextIO | None = sys.stdout if file is None else file
        self._start_time = self._print_time = time.monotonic()
        self._num_lines = start * _LOG_LINES // num_iterations
        self._return: float | None = None
        self._stream = ""
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        self._start_time = self._print_time = time.monotonic()
        can_update = os.environ.get("TERM") not in ("dumb", "unknown")
        # The file is None if the process has no standard output.
        if self._file is not None and self._file.isatty() and can_update:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            percent, text = "[bold]{task.percentage:>3.0f}%", "{task.description}"
            columns = TextColumn(percent), BarColumn(20), TextColumn(text)
            self._bar = Bar(*columns, console=Console(file=self._file), refresh_per_second=4)
            self._bar.start()
            text = "\n".join(self._status_lines(self._start))
            self._bar.add_task(text, total=self._num_iterations, completed=self._start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, iteration: int, episode_return: float | None = None, stream: str = "") -> None:
        """Shows that `iteration` iterations are done; `episode_return=None` keeps the last return."""
        self._return = self._return if episode_return is None else episode_return
        self._stream = stream
        if self._bar is not None:  # no need to shorten the lines: they fit into 80 columns
            text = "\n".join(self._status_lines(iteration))
            self._bar.update(self._bar.task_ids[0], completed=iteration, description=text)
            return
        now, line_number = time.monotonic(), iteration * _LOG_LINES // self._num_iterations
        if line_number > self._num_lines or now - self._print_time >= _MAX_LOG_SECONDS:
            self._num_lines, self._print_time = line_number, now
            percent = 100 * iteration // self._num_iterations
            parts = " | ".join(self._status_lines(iteration)[:2]).split(" | ")
            print(f"{percent:3d}%", _fit_line(parts, _LOG_WIDTH - 5), file=self._file, flush=True)
            if stream:
                print("    ", stream, file=self._file, flush=True)

    def say(self, line: str) -> None:
        """Prints a line, above the display if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._file, flush=True)

    def _status_lines(self, iteration: int) -> list[str]:
        elapsed = time.monotonic() - self._start_time
        completed, remaining = iteration - self._start, self._num_iterations - iteration
        time_parts = [f"iteration {iteration:,}/{self._num_iterations:,}", f"{clock(elapsed)} elapsed"]
        step_parts = [f"{iteration * self._steps_per_iteration:,} steps"]
        if completed:
            time_parts.append(f"{clock(elapsed / completed * remaining)} left")
            step_parts.append(f"{completed * self._steps_per_iteration / elapsed:,.0f} steps/s")
        if self._return is not None:
            step_parts.append(f"return {format_numbers(self._return)[0]}")
        return [" | ".join(time_parts), " | ".join(step_parts), *([self._stream] if self._stream else [])]


def stream_line(rows: Sequence[Mapping[str, Any]], busy: Mapping[str, float]) -> str:
    """One line with statistics of a stream over the iterations of `rows`; "" if there is no stream.

    `busy` is the fraction of the time in which each group of devices ran programs.

    >>> row = {"slots_busy": 0.96, "queued": 37, "running": 12, "staleness": 1.25, "staleness_max": 3}
    >>> stream_line([row, row], {"actors": 0.94, "learners": 0.88})
    'queue 37 | age 1.2 (at most 3) | slots 96% | actors 94% | learners 88% busy'
    >>> stream_line([{**row, "eta": 4}], {})
    'queue 37 | age 1.2 (at most 3, eta 4) | slots 96% busy'
    >>> stream_line([{"slots_busy": 0.96, "queued": 37, "running": 12}], {})  # the staleness is unknown
    'queue 37 | slots 96% busy'
    """
    if not rows or not all("slots_busy" in row for row in rows):
        return ""
    ages = [
        (row["staleness"], row.get("staleness_max", row["staleness"])) for row in rows if "staleness" in row
    ]
    parts = []
    if "queued" in rows[-1]:
        parts.append(f"queue {rows[-1]['queued']:.0f}")
    if ages:
        mean, largest = sum(age for age, _ in ages) / len(ages), max(age for _, age in ages)
        bound = f", eta {rows[-1]['eta']}" if "eta" in rows[-1] else ""
        parts.append(f"age {mean:.1f} (at most {largest:.0f}{bound})")
    parts.append(f"slots {100 * sum(row['slots_busy'] for row in rows) / len(rows):.0f}%")
    parts += [f"{group} {100 * fraction:.0f}%" for group, fraction in busy.items()]
    return " | ".join(parts) + " busy"


def _fit_line(parts: list[str], width: int) -> str:
    """Joins parts to a line of at most `width` characters; drops the least important parts.

    >>> _fit_line(["iteration 10/100", "0:05 elapsed", "0:45 left", "500 steps/s"], 45)
    'iteration 10/100 | 0:45 left | 500 steps/s'
    """
    for word in ("elapsed", "steps/s", "left", "iteration"):
        if len(" | ".join(parts)) > width:
            parts = [part for part in parts if word not in part]
    return " | ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, with hours if there are any.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
