"""How long each group of devices was busy: measured while programs run, without waiting for them.

Detecting the end of a program takes a waiting thread, and waking it costs more than most steps of a loop on
the host. So of many short iterations only some are watched, a few in a row, and extrapolated:

    iteration   1  2  3  4  5  6 ...  98  99  100  101  102 ...
    watched     x  x  x  x                x   x    x    x          as long as that stays below 1% of the time
"""

import atexit
import collections
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax


class Bar(NamedTuple):
    """One run of a program, for pictures of the timeline."""

    group: str  # the group that it ran on
    name: str
    iteration: int  # counted from the first recorded one
    part: int  # earlier runs of the program in the iteration: the index of the micro-batch or step
    begin: float  # wall-clock seconds (`time.time`)
    end: float


class ProgramRun:
    """One run of a program on a group."""

    __slots__ = ("after", "dispatched", "finished", "group", "iteration", "known", "name")

    def __init__(self, group: str, after: list["ProgramRun"], name: str = "", iteration: int = 0):
        self.group, self.after, self.name, self.iteration = group, after, name, iteration
        self.dispatched = time.perf_counter()
        self.finished = 0.0
        self.known = threading.Event()


_ALWAYS = 4  # the first iterations are always watched, and later at least this many in a row
_COST_S = 100e-6  # approximate overhead of watching one program
_SHARE = 0.01  # the largest overhead, as a share of the time
_AT_EXIT_S = 10.0  # to wait for running programs when Python ends


def affordable(watched: int, programs: int, seconds: float) -> bool:
    """Whether watching one more iteration of `programs` programs keeps the overhead within its share."""
    return watched < _ALWAYS or watched * programs * _COST_S <= _SHARE * seconds


class Timeline:
    """Measures how long each group is busy: one thread per group waits for its programs.

    A program starts at the latest of its dispatch, the end of the group's previous program, and the end of
    the other groups' programs whose results it reads. Transfers count as busy time.
    """

    def __init__(self, groups: Sequence[str]):
        self.busy_s = dict.fromkeys(groups, 0.0)  # busy seconds of each group in watched iterations
        self.iterations = self.watched = 0  # calls of `watches`, and watched ones
        # recorded runs; set it to a list to record, which watches every iteration
        self.bars: list[Bar] | None = None
        self._queues: dict[str, queue.SimpleQueue] = {group: queue.SimpleQueue() for group in groups}
        self._runs: dict[str, ProgramRun] = {}
        self._last: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._begun = time.perf_counter()
        self._watching = False
        self._waited, self._longest = 0.0, 0.0  # seconds, before iterations that were watched again

    def watches(self, programs: int) -> bool:
        """Whether to watch the iteration that begins now, which has `programs` programs.

        After an unwatched iteration this first waits for all dispatched programs, or their time would count
        as that of the first watched one. The devices idle after that, so these waits have the same budget.
        """
        now = time.perf_counter()
        seconds = now - self._begun
        if self._watching or not self.iterations:
            watch = self.bars is not None or affordable(self.watched, programs, seconds)
        else:
            wait = self._waited + self._longest
            watch = affordable(self.watched + _ALWAYS, programs, seconds) and wait <= _SHARE * seconds
            watch = watch or self.bars is not None
            if watch:
                with contextlib.suppress(Exception):  # raised to the reader of the results
                    jax.block_until_ready(self.latest())
                waited = time.perf_counter() - now
                self._waited, self._longest = self._waited + waited, max(self._longest, waited)
        self._watching = watch
        self.iterations += 1
        self.watched += watch
        return watch

    def start(self, group: str, made_by: Iterable[ProgramRun | None], name: str = "") -> ProgramRun:
        """The run of a program that is about to be dispatched; `made_by` are the runs that it depends on."""
        after = list({run for run in made_by if run is not None and run.group != group})
        return ProgramRun(group, after, name, self.iterations)

    def started(self, group: str, run: ProgramRun | None, done: jax.Array) -> None:
        """Registers a dispatched program by a result, `done`; `run` is None if it is not watched."""
        self._last[group] = done
        if run is not None:
            self._runs[group] = run
            self._queues[group].put((run, done))

    def begin(self) -> None:
        """Starts the threads."""
        if not self._threads:
            _watching.add(self)
            for group in self._queues:
                thread = threading.Thread(target=self._watch, args=(group,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Makes the threads end after the programs that were already dispatched."""
        for waiting in self._queues.values():
            waiting.put(None)

    def end(self, seconds: float) -> None:
        """Ends the threads and waits for each, at most `seconds`."""
        self.close()
        for thread in self._threads:
            thread.join(seconds)

    def latest(self) -> list[jax.Array]:
        """Results that are ready when all programs dispatched so far have ended."""
        return list(self._last.values())

    def recorded(self) -> list[Bar]:
        """Waits for the watched programs, stops recording and returns the recorded runs."""
        self.settle()
        bars, self.bars = sorted(self.bars or (), key=lambda bar: bar.begin), None
        now = time.time() - time.perf_counter()
        first = min((bar.iteration for bar in bars), default=0)
        parts: collections.Counter[tuple[str, str, int]] = collections.Counter()
        found = []
        for bar in bars:
            run = bar.group, bar.name, bar.iteration
            found.append(Bar(*run[:2], bar.iteration - first, parts[run], bar.begin + now, bar.end + now))
            parts[run] += 1
        return found

    def settle(self) -> dict[str, float]:
        """Waits for the watched programs; returns busy seconds, scaled to all iterations."""
        for run in list(self._runs.values()):
            run.known.wait()
        return self.so_far()

    def so_far(self) -> dict[str, float]:
        """Busy seconds of the programs that have ended, scaled to all iterations."""
        scale = self.iterations / self.watched if self.watched else 1.0
        return {group: seconds * scale for group, seconds in self.busy_s.items()}

    def _watch(self, group: str) -> None:
        free = 0.0
        while True:
            entry = self._queues[group].get()
            if entry is None:
                return
            run, done = entry
            with contextlib.suppress(Exception):  # raised to the reader of the results
                jax.block_until_ready(done)
            run.finished = time.perf_counter()
            for other in run.after:
                other.known.wait()
            start = max(run.dispatched, free, *(other.finished for other in run.after))
            self.busy_s[group] += max(0.0, run.finished - start)
            if self.bars is not None:
                begun = min(start, run.finished)  # the end of an input may be noticed late
                self.bars.append(Bar(group, run.name, run.iteration, 0, begun, run.finished))
            free = run.finished
            run.after = []
            run.known.set()


_watching: weakref.WeakSet[Timeline] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Waits for the threads: one that is inside XLA when Python exits would abort the process."""
    for timeline in list(_watching):
        timeline.end(_AT_EXIT_S)
