"""Measures how long each group of devices is busy, without blocking the thread that dispatches programs.

To detect the end of a program, a thread has to wait for it, and waking this thread takes longer than the host
takes for most steps of a loop. So if iterations are short, only some are watched, a few in a row; the busy
time of all iterations is extrapolated from the watched ones:

    iteration   1  2  3  4  5  6 ...  98  99  100  101  102 ...
    watched     x  x  x  x                x   x    x    x      while the overhead is below 1% of the time
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

    group: str  # the group that ran the program
    name: str
    iteration: int  # counted from the first recorded iteration
    part: int  # the number of earlier runs of the program in this iteration
    begin: float  # wall-clock seconds (`time.time`)
    end: float


class ProgramRun:
    """One run of a program on a group."""

    __slots__ = ("dependencies", "dispatched", "finished", "group", "is_finished", "iteration", "name")

    def __init__(self, group: str, dependencies: list["ProgramRun"], name: str = "", iteration: int = 0):
        self.group, self.dependencies, self.name, self.iteration = group, dependencies, name, iteration
        self.dispatched = time.perf_counter()  # in seconds, like `finished`
        self.finished = 0.0
        self.is_finished = threading.Event()


_MIN_WATCHED = 4  # this many iterations are watched at the start, and at least as many in a row later
_WATCH_COST_S = 100e-6  # approximate overhead of watching one program
_MAX_OVERHEAD = 0.01  # the largest overhead, as a share of the time
_EXIT_TIMEOUT_S = 10.0  # how long to wait for running programs when Python exits


def may_watch(watched: int, programs: int, seconds: float) -> bool:
    """Whether one more iteration can be watched without exceeding `_MAX_OVERHEAD`.

    `watched` iterations of `programs` programs each have been watched, in `seconds` seconds of training.
    """
    return watched < _MIN_WATCHED or watched * programs * _WATCH_COST_S <= _MAX_OVERHEAD * seconds


class Timeline:
    """Measures how long each group is busy: one thread per group waits for its programs.

    A program starts at the latest of its dispatch, the end of the group's previous program, and the end of
    the other groups' programs whose results it reads. Transfers count as busy time.
    """

    def __init__(self, groups: Sequence[str]):
        self.busy_s = dict.fromkeys(groups, 0.0)  # busy seconds of each group in watched iterations
        self.iterations = self.watched = 0  # the numbers of all and of watched iterations
        # The recorded runs; None to record nothing. While it is a list, every iteration is watched.
        self.bars: list[Bar] | None = None
        self._queues: dict[str, queue.SimpleQueue] = {group: queue.SimpleQueue() for group in groups}
        self._last_runs: dict[str, ProgramRun] = {}
        self._last_results: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._start_s = time.perf_counter()
        self._is_watching = False
        # Total and longest wait for dispatched programs before an iteration is watched again.
        self._wait_s, self._max_wait_s = 0.0, 0.0

    def begin_iteration(self, programs: int) -> bool:
        """Begins an iteration of `programs` programs; returns whether to watch it.

        After an unwatched iteration this first waits for all dispatched programs; otherwise their time would
        count as busy time of the first watched iteration. The devices are idle after such a wait, so
        `_MAX_OVERHEAD` also limits the waits.
        """
        now = time.perf_counter()
        seconds = now - self._start_s
        starts_watching = self.iterations > 0 and not self._is_watching
        is_watched = may_watch(self.watched + _MIN_WATCHED * starts_watching, programs, seconds)
        if starts_watching:
            is_watched = is_watched and self._wait_s + self._max_wait_s <= _MAX_OVERHEAD * seconds
        is_watched = is_watched or self.bars is not None
        if is_watched and starts_watching:
            with contextlib.suppress(Exception):  # a program's error is raised where its results are read
                jax.block_until_ready(self.last_results())
            waited = time.perf_counter() - now
            self._wait_s, self._max_wait_s = self._wait_s + waited, max(self._max_wait_s, waited)
        self._is_watching = is_watched
        self.iterations += 1
        self.watched += is_watched
        return is_watched

    def start(self, group: str, inputs_from: Iterable[ProgramRun | None], name: str = "") -> ProgramRun:
        """The run of a program that is about to be dispatched; it depends on the runs `inputs_from`."""
        dependencies = list({run for run in inputs_from if run is not None and run.group != group})
        return ProgramRun(group, dependencies, name, self.iterations)

    def register(self, group: str, run: ProgramRun | None, result: jax.Array) -> None:
        """Registers a dispatched program by one of its results; `run` is None if it is not watched."""
        self._last_results[group] = result
        if run is not None:
            self._last_runs[group] = run
            self._queues[group].put((run, result))

    def begin(self) -> None:
        """Starts the threads."""
        if not self._threads:
            _timelines.add(self)
            for group in self._queues:
                thread = threading.Thread(target=self._watch, args=(group,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Tells the threads to end after the programs that are already dispatched."""
        for runs in self._queues.values():
            runs.put(None)

    def end(self, seconds: float) -> None:
        """Ends the threads and waits for each, at most `seconds`."""
        self.close()
        for thread in self._threads:
            thread.join(seconds)

    def last_results(self) -> list[jax.Array]:
        """Results that are ready when all programs dispatched so far have ended."""
        return list(self._last_results.values())

    def stop_recording(self) -> list[Bar]:
        """Waits for the watched programs, stops recording and returns the recorded runs."""
        self.busy_at_end()
        bars, self.bars = sorted(self.bars or (), key=lambda bar: bar.begin), None
        offset = time.time() - time.perf_counter()
        first_iteration = min((bar.iteration for bar in bars), default=0)
        parts: collections.Counter[tuple[str, str, int]] = collections.Counter()
        results = []
        for group, name, iteration, _, begin, end in bars:
            part = parts[group, name, iteration]
            results.append(Bar(group, name, iteration - first_iteration, part, begin + offset, end + offset))
            parts[group, name, iteration] += 1
        return results

    def busy_at_end(self) -> dict[str, float]:
        """Waits for the watched programs; returns busy seconds, scaled to all iterations."""
        for run in list(self._last_runs.values()):
            run.is_finished.wait()
        return self.busy_so_far()

    def busy_so_far(self) -> dict[str, float]:
        """Busy seconds of the programs that have ended, scaled to all iterations."""
        scale = self.iterations / self.watched if self.watched else 1.0
        return {group: seconds * scale for group, seconds in self.busy_s.items()}

    def _watch(self, group: str) -> None:
        """The thread of a group: waits for each watched run, and adds its busy time."""
        previous_end = 0.0
        while (entry := self._queues[group].get()) is not None:
            run, result = entry
            with contextlib.suppress(Exception):  # a program's error is raised where its results are read
                jax.block_until_ready(result)
            run.finished = time.perf_counter()
            for dependency in run.dependencies:
                dependency.is_finished.wait()
            ends = [dependency.finished for dependency in run.dependencies]
            start = max(run.dispatched, previous_end, *ends)
            self.busy_s[group] += max(0.0, run.finished - start)
            if self.bars is not None:
                begin = min(start, run.finished)  # the end of a dependency may be noticed late
                self.bars.append(Bar(group, run.name, run.iteration, 0, begin, run.finished))
            previous_end = run.finished
            run.dependencies = []
            run.is_finished.set()


_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()  # ended when Python exits


@atexit.register
def _end_all() -> None:
    """Waits for the threads: a thread that is inside XLA when Python exits would abort the process."""
    for timeline in list(_timelines):
        timeline.end(_EXIT_TIMEOUT_S)
