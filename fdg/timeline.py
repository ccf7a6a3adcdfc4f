"""How long each group of devices was busy: measured while programs run, without waiting for them."""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax


class _Run:
    """One run of a program."""

    __slots__ = ("started", "after", "finished", "known")

    def __init__(self, started: float, after: list["_Run"]):
        self.started, self.after = started, after
        self.finished = 0.0
        self.known = threading.Event()


class Timeline:
    """Watches when each group's programs end, one thread a group.

    A program begins when it was handed over, its group was done with the one before, and the programs whose
    results were moved to it had ended, whichever is last; the time of the move itself counts as busy.

    Attributes:
      busy_s: seconds in which each group's devices ran programs.
    """

    def __init__(self, groups: Sequence[str]):
        self.busy_s = dict.fromkeys(groups, 0.0)
        self._queues: dict[str, queue.SimpleQueue] = {group: queue.SimpleQueue() for group in groups}
        self._last: dict[str, _Run | None] = dict.fromkeys(groups)
        self._moved: dict[str, list[_Run]] = {group: [] for group in groups}
        self._tokens: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Starts to watch."""
        if not self._threads:
            for group in self._queues:
                thread = threading.Thread(target=self._watch, args=(group,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def ran(self, group: str, done: jax.Array) -> None:
        """A program was started; `done` is there when it has ended."""
        run = _Run(time.perf_counter(), self._moved[group])
        self._moved[group] = []
        self._last[group], self._tokens[group] = run, done
        self._queues[group].put((run, done))

    def moves(self, source: str, target: str) -> None:
        """What the source's last program made is needed by the target's next."""
        last = self._last[source]
        if last is not None:
            self._moved[target].append(last)

    def latest(self) -> list[jax.Array]:
        """What to wait for to have all that was started so far."""
        return list(self._tokens.values())

    def settle(self) -> dict[str, float]:
        """Waits until all that was started has ended; returns `busy_s`."""
        for run in self._last.values():
            if run is not None:
                run.known.wait()
        return dict(self.busy_s)

    def _watch(self, group: str) -> None:
        free = 0.0
        while True:
            run, done = self._queues[group].get()
            try:
                jax.block_until_ready(done)
            except Exception:  # whoever waits for the results hears of it
                pass
            run.finished = time.perf_counter()
            for other in run.after:
                other.known.wait()
            start = max(run.started, free, *(other.finished for other in run.after))
            self.busy_s[group] += max(0.0, run.finished - start)
            free = run.finished
            run.after = []
            run.known.set()
