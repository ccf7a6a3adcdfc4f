"""How long each group of devices was busy: measured while programs run, without waiting for them."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax


class ProgramRun:
    """One run of a program on a group."""

    __slots__ = ("after", "finished", "group", "handed_over", "known")

    def __init__(self, group: str, after: list["ProgramRun"]):
        self.group, self.after = group, after
        self.handed_over = time.perf_counter()
        self.finished = 0.0
        self.known = threading.Event()


class Timeline:
    """Watches when each group's programs end, one thread a group.

    A program begins when it was handed over, its group was done with the one before, and the programs of
    other groups whose results it reads had ended, whichever is last; the time of moving them counts as busy.

    Attributes:
      busy_s: seconds in which each group's devices ran programs.
    """

    def __init__(self, groups: Sequence[str]):
        self.busy_s = dict.fromkeys(groups, 0.0)
        self._queues: dict[str, queue.SimpleQueue] = {group: queue.SimpleQueue() for group in groups}
        self._last: dict[str, tuple[ProgramRun, Any]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, group: str, made_by: Iterable[ProgramRun | None]) -> ProgramRun:
        """A program is about to be handed to a group; `made_by` are the runs that make what it reads."""
        return ProgramRun(group, list({run for run in made_by if run is not None and run.group != group}))

    def started(self, run: ProgramRun, done: jax.Array) -> None:
        """It was handed over; `done` is there when it has ended."""
        self._last[run.group] = run, done
        self._queues[run.group].put((run, done))

    def begin(self) -> None:
        """Starts to watch."""
        if not self._threads:
            for group in self._queues:
                thread = threading.Thread(target=self._watch, args=(group,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Ends the watching; what was started before is still recorded."""
        for waiting in self._queues.values():
            waiting.put(None)

    def latest(self) -> list[jax.Array]:
        """What to wait for to have all that was started so far."""
        return [done for _, done in self._last.values()]

    def settle(self) -> dict[str, float]:
        """Waits until all that was started has ended; returns `busy_s`."""
        for run, _ in self._last.values():
            run.known.wait()
        return dict(self.busy_s)

    def _watch(self, group: str) -> None:
        free = 0.0
        while True:
            entry = self._queues[group].get()
            if entry is None:
                return
            run, done = entry
            with contextlib.suppress(Exception):  # whoever waits for the results hears of it
                jax.block_until_ready(done)
            run.finished = time.perf_counter()
            for other in run.after:
                other.known.wait()
            start = max(run.handed_over, free, *(other.finished for other in run.after))
            self.busy_s[group] += max(0.0, run.finished - start)
            free = run.finished
            run.after = []
            run.known.set()
