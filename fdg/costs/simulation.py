"""A discrete-event simulation of tasks on resources, with which the cost model predicts a schedule's time.

    host    dispatch act .  dispatch learn
    actors           act-----------.
    link                           move---.
    learners                              learn----

A task starts when its dependencies have ended and its resources are free. A resource runs one task at a time,
in the order in which tasks were added. Tasks may share a pool of cores. If they need more cores than the pool
has, each gets an equal share of it, or less if it needs less (max-min fairness), and slows down accordingly.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NEVER = (math.inf, -1)  # the end of no task


@dataclasses.dataclass(frozen=True)
class Trace:
    """The times of all tasks."""

    starts: Sequence[float]  # for each task, the seconds from the start of the simulation
    ends: Sequence[float]
    latest: Sequence[int]  # for each task, the last task that it waited for; -1 if it did not wait

    def critical_path(self, task: int) -> list[int]:
        """The critical path that ends with a task, in order."""
        chain = []
        while task >= 0:
            chain.append(task)
            task = self.latest[task]
        return chain[::-1]


class Task(NamedTuple):
    """Work that occupies resources for some time."""

    label: str
    resources: tuple[str, ...]  # the names of the resources that it occupies
    seconds: float  # the duration if the pool has enough cores
    cores: float  # the number of cores of the pool that it needs; 0 if it runs outside the pool
    dependencies: tuple[int, ...]  # the indices of the tasks that must end before it starts


class Simulation:
    """Collects tasks (`add`), and computes when each starts and ends (`run`)."""

    def __init__(self, cores: float = math.inf):
        """`cores` is the size of the shared pool; infinite if tasks do not slow each other down."""
        self._cores = cores
        self.tasks: list[Task] = []
        self._last_by_resource: dict[str, int] = {}

    def add(
        self,
        label: str,
        resources: tuple[str, ...],
        seconds: float,
        dependencies: Sequence[int] = (),
        cores: float = 0.0,
    ) -> int:
        """Adds a task (see `Task`) after the earlier tasks of its resources; returns its index."""
        index = len(self.tasks)
        all_dependencies = dict.fromkeys(task for task in dependencies if task >= 0)
        for resource in resources:
            if resource in self._last_by_resource:
                all_dependencies[self._last_by_resource[resource]] = None
            self._last_by_resource[resource] = index
        self.tasks.append(Task(label, resources, seconds, cores, tuple(all_dependencies)))
        return index

    def busy(self, trace: Trace, begin: float, end: float) -> Mapping[str, float]:
        """Seconds for which each resource is busy between the times `begin` and `end`."""
        busy: dict[str, float] = collections.defaultdict(float)
        for task, start, stop in zip(self.tasks, trace.starts, trace.ends, strict=True):
            overlap = min(stop, end) - max(start, begin)
            if overlap > 0:
                for resource in task.resources:
                    busy[resource] += overlap
        return dict(busy)

    def run(self) -> Trace:
        """Simulates all tasks."""
        tasks, count = self.tasks, len(self.tasks)
        num_unfinished = [len(task.dependencies) for task in tasks]
        followers: list[list[int]] = [[] for _ in range(count)]
        for index, (*_, dependencies) in enumerate(tasks):
            for dependency in dependencies:
                followers[dependency].append(index)
        starts, ends, latest = [0.0] * count, [0.0] * count, [-1] * count
        now = 0.0
        unpooled: list[tuple[float, int]] = []  # (end, task): tasks outside the pool
        pool: dict[int, float] = {}  # task -> remaining seconds at full speed
        ready = [task for task in range(count) if not num_unfinished[task]]
        while True:
            for task in ready:
                starts[task] = now
                if tasks[task].cores > 0:
                    pool[task] = tasks[task].seconds
                else:
                    heapq.heappush(unpooled, (now + tasks[task].seconds, task))
            ready = []
            if not pool and not unpooled:
                return Trace(starts, ends, latest)
            speeds = self._speeds(list(pool))
            end, finished = min(
                ((now + left / speeds[task], task) for task, left in pool.items()), default=_NEVER
            )
            if unpooled and unpooled[0][0] < end:
                end, finished = heapq.heappop(unpooled)
            for task in pool:
                pool[task] -= (end - now) * speeds[task]
            pool.pop(finished, None)
            now = end
            ends[finished] = now
            for task in followers[finished]:
                num_unfinished[task] -= 1
                if not num_unfinished[task]:
                    latest[task] = finished
                    ready.append(task)

    def _speeds(self, running: Sequence[int]) -> Mapping[int, float]:
        """The speed of each task of the pool that runs now; 1 if it has all cores that it needs."""
        speeds, free = {}, self._cores
        by_need = sorted(running, key=lambda task: self.tasks[task].cores)
        for count, task in zip(range(len(by_need), 0, -1), by_need, strict=True):
            needed = self.tasks[task].cores
            cores = min(needed, free / count)
            speeds[task], free = cores / needed, free - cores
        return speeds
