"""A discrete-event simulation of tasks on lanes.

    host    dispatch act .  dispatch learn
    actors           act-----------.
    link                           move---.
    learners                              learn----

A task starts when its dependencies have ended and its lanes are free; a lane runs its tasks in the order in
which they were added, as a device does. Tasks may share a pool of cores: if they want more cores than there
are, all of them slow down alike (processor sharing).
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Trace:
    """The times of all tasks."""

    starts: Sequence[float]  # seconds from the start
    ends: Sequence[float]
    latest: Sequence[int]  # for each task, the last task that it waited for; -1 for none

    def critical(self, task: int) -> list[int]:
        """The critical path that ends with a task, in order."""
        chain = []
        while task >= 0:
            chain.append(task)
            task = self.latest[task]
        return chain[::-1]


class Task(NamedTuple):
    """A task: its seconds alone, its cores of the pool (0 if it runs elsewhere), and the tasks before it."""

    label: str
    lanes: tuple[str, ...]
    seconds: float
    cores: float
    after: tuple[int, ...]


class Simulation:
    """The `tasks` in the order in which they were added."""

    def __init__(self, cores: float = math.inf):
        """`cores` is the size of the shared pool; infinite if each task has what it needs."""
        self._cores = cores
        self.tasks: list[Task] = []
        self._last: dict[str, int] = {}

    def add(
        self,
        label: str,
        lanes: tuple[str, ...],
        seconds: float,
        after: Sequence[int] = (),
        cores: float = 0.0,
    ) -> int:
        """Adds a task to its lanes; returns its number."""
        number = len(self.tasks)
        before = dict.fromkeys(task for task in after if task >= 0)
        for lane in lanes:
            if lane in self._last:
                before[self._last[lane]] = None
            self._last[lane] = number
        self.tasks.append(Task(label, lanes, seconds, cores, tuple(before)))
        return number

    def busy(self, trace: Trace, begin: float, end: float) -> Mapping[str, float]:
        """Busy seconds of each lane between two times."""
        found: dict[str, float] = collections.defaultdict(float)
        for task, start, stop in zip(self.tasks, trace.starts, trace.ends, strict=True):
            overlap = min(stop, end) - max(start, begin)
            if overlap > 0:
                for lane in task.lanes:
                    found[lane] += overlap
        return dict(found)

    def run(self) -> Trace:
        """Runs all tasks; the pool slows down while more cores are wanted than there are."""
        tasks, count = self.tasks, len(self.tasks)
        waiting = [len(task.after) for task in tasks]
        followers: list[list[int]] = [[] for _ in range(count)]
        for number, one in enumerate(tasks):
            for other in one.after:
                followers[other].append(number)
        starts, ends, latest = [0.0] * count, [0.0] * count, [-1] * count
        now = pool_now = wanted = 0.0
        apart: list[tuple[float, int]] = []  # (end, task): tasks outside the pool
        pool: list[tuple[float, int]] = []  # (end by the pool's clock, task)
        ready = [task for task in range(count) if not waiting[task]]
        while True:
            for task in ready:
                starts[task] = now
                if tasks[task].cores > 0:
                    heapq.heappush(pool, (pool_now + tasks[task].seconds, task))
                    wanted += tasks[task].cores
                else:
                    heapq.heappush(apart, (now + tasks[task].seconds, task))
            ready = []
            speed = min(1.0, self._cores / wanted) if wanted > self._cores else 1.0
            pool_end = now + (pool[0][0] - pool_now) / speed if pool else float("inf")
            if not pool and not apart:
                return Trace(starts, ends, latest)
            if pool and (not apart or pool_end <= apart[0][0]):
                pool_now, done = heapq.heappop(pool)
                now = pool_end
                wanted -= tasks[done].cores
                if not pool:
                    wanted = 0.0
            else:
                end, done = heapq.heappop(apart)
                pool_now += (end - now) * speed
                now = end
            ends[done] = now
            for task in followers[done]:
                waiting[task] -= 1
                if not waiting[task]:
                    latest[task] = done
                    ready.append(task)
