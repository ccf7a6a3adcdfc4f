"""How long each group of devices was busy: measured while programs run, without waiting for them.

To see when a program ends a thread has to wait for it, and to be woken costs more than most steps of a loop
on the host do. So of many short iterations only some are watched, a few in a row, and stand for the others:

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
    """One run of a program, as a picture of the timeline has it.

    Attributes:
      group: that it ran on.
      name: of the program.
      iteration: counted from the first that was recorded.
      part: how often the program ran before in the iteration: the micro-batch, or the step.
      begin, end: seconds on the wall (`time.time`).
    """

    group: str
    name: str
    iteration: int
    part: int
    begin: float
    end: float


class ProgramRun:
    """One run of a program on a group."""

    __slots__ = ("after", "finished", "group", "handed_over", "iteration", "known", "name")

    def __init__(self, group: str, after: list["ProgramRun"], name: str = "", iteration: int = 0):
        self.group, self.after, self.name, self.iteration = group, after, name, iteration
        self.handed_over = time.perf_counter()
        self.finished = 0.0
        self.known = threading.Event()


_ALWAYS = 4  # iterations that are watched at first, whatever that costs; and so many at least in a row
_COST_S = 100e-6  # of watching one program, about
_SHARE = 0.01  # of the time that watching may take
_AT_EXIT_S = 10.0  # to wait for what still runs when Python ends


def affordable(watched: int, programs: int, seconds: float) -> bool:
    """Whether to watch another iteration of so many programs, when `watched` were in so many seconds."""
    return watched < _ALWAYS or watched * programs * _COST_S <= _SHARE * seconds


class Timeline:
    """Watches when each group's programs end, one thread a group.

    A program begins when it was handed over, its group was done with the one before, and the programs of
    other groups whose results it reads had ended, whichever is last; the time of moving them counts as busy.

    Attributes:
      busy_s: seconds in which each group's devices ran programs that were watched.
      iterations: that were begun (`watches`).
      watched: those of them that were watched.
      bars: all that was watched since somebody put a list here; then every iteration is watched.
    """

    def __init__(self, groups: Sequence[str]):
        self.busy_s = dict.fromkeys(groups, 0.0)
        self.iterations = self.watched = 0
        self.bars: list[Bar] | None = None
        self._queues: dict[str, queue.SimpleQueue] = {group: queue.SimpleQueue() for group in groups}
        self._runs: dict[str, ProgramRun] = {}
        self._last: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._begun = time.perf_counter()
        self._watching = False
        self._waited, self._longest = 0.0, 0.0  # seconds, before iterations that were watched again

    def watches(self, programs: int) -> bool:
        """Whether the iteration that begins now, of so many programs, is watched.

        After one that was not it waits for all that was started, so that nothing unseen runs meanwhile. Since
        the devices run dry then, those waits are kept below the same share of the time.
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
                with contextlib.suppress(Exception):  # the reader of the results gets it
                    jax.block_until_ready(self.latest())
                waited = time.perf_counter() - now
                self._waited, self._longest = self._waited + waited, max(self._longest, waited)
        self._watching = watch
        self.iterations += 1
        self.watched += watch
        return watch

    def start(self, group: str, made_by: Iterable[ProgramRun | None], name: str = "") -> ProgramRun:
        """A program is about to be handed to a group; `made_by` are the runs that make what it reads."""
        after = list({run for run in made_by if run is not None and run.group != group})
        return ProgramRun(group, after, name, self.iterations)

    def started(self, group: str, run: ProgramRun | None, done: jax.Array) -> None:
        """A program was handed over; `done` is there when it has ended. No `run` if it is not watched."""
        self._last[group] = done
        if run is not None:
            self._runs[group] = run
            self._queues[group].put((run, done))

    def begin(self) -> None:
        """Starts to watch."""
        if not self._threads:
            _watching.add(self)
            for group in self._queues:
                thread = threading.Thread(target=self._watch, args=(group,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Ends the watching; what was started before is still recorded."""
        for waiting in self._queues.values():
            waiting.put(None)

    def end(self, seconds: float) -> None:
        """Ends the watching, and waits so long at most until nobody watches."""
        self.close()
        for thread in self._threads:
            thread.join(seconds)

    def latest(self) -> list[jax.Array]:
        """What to wait for to have all that was started so far."""
        return list(self._last.values())

    def recorded(self) -> list[Bar]:
        """Waits until all that is watched has ended; the bars since `bars` was set, which ends."""
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
        """Waits until all that is watched has ended; returns seconds of all iterations, by those watched."""
        for run in list(self._runs.values()):
            run.known.wait()
        return self.so_far()

    def so_far(self) -> dict[str, float]:
        """The same without waiting: of what has ended."""
        scale = self.iterations / self.watched if self.watched else 1.0
        return {group: seconds * scale for group, seconds in self.busy_s.items()}

    def _watch(self, group: str) -> None:
        free = 0.0
        while True:
            entry = self._queues[group].get()
            if entry is None:
                return
            run, done = entry
            with contextlib.suppress(Exception):  # the reader of the results gets it
                jax.block_until_ready(done)
            run.finished = time.perf_counter()
            for other in run.after:
                other.known.wait()
            start = max(run.handed_over, free, *(other.finished for other in run.after))
            self.busy_s[group] += max(0.0, run.finished - start)
            if self.bars is not None:
                begun = min(start, run.finished)  # what it reads may have been seen to end later than it did
                self.bars.append(Bar(group, run.name, run.iteration, 0, begun, run.finished))
            free = run.finished
            run.after = []
            run.known.set()


_watching: weakref.WeakSet[Timeline] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """No thread may wait in XLA when Python ends: it would be unwound there, which aborts the process."""
    for timeline in list(_watching):
        timeline.end(_AT_EXIT_S)
