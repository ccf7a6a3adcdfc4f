"""A plan's iterations as tasks of a simulation: of the host, groups and links.

Follows the schedule as the engine does (`running.steps`): the host dispatches programs and transfers in order
without waiting, at most a few iterations ahead.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from fdg.costs.simulation import Simulation
from fdg.placing.plans import SteppedPlan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value

AHEAD = 4  # iterations: one that is being started, and three that the engine lets be in flight
HOST = "host"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run of a step.

    Attributes:
      host: seconds of the host.
      seconds: of the devices or the link, alone.
      cores: busy cores of the pool.
      meets: whether a transfer is a program of both groups, as between processes (`running.exchange`): it
        waits for their earlier work, and they do nothing else meanwhile.
    """

    host: float
    seconds: float
    cores: float = 0.0
    meets: bool = False


Slow = Callable[[int], float]
"""How much longer than usual so many devices take together, this time."""


def lanes_of(groups: Sequence[Group]) -> Mapping[str, tuple[str, ...]]:
    """The lanes of each group: devices that belong to the same groups form a lane."""
    members: dict[int, list[str]] = {}
    for group in groups:
        for device in group.devices:
            members.setdefault(device, []).append(group.name)
    found: dict[str, dict[str, None]] = {group.name: {} for group in groups}
    for names in members.values():
        for name in names:
            found[name]["&".join(names)] = None
    return {name: tuple(lanes) for name, lanes in found.items()}


class ScheduleTasks:
    """Adds the iterations of a schedule to a simulation; `trips` replaces the lengths of loops."""

    def __init__(
        self,
        simulation: Simulation,
        plan: SteppedPlan,
        costs: Mapping[Step, Cost],
        host_cores: float,
        slow: Slow,
        trips: Mapping[int, int],
    ):
        self._simulation, self._costs, self._host_cores, self._slow = simulation, costs, host_cores, slow
        self._schedule: Schedule = plan.schedule
        self._lanes = lanes_of(plan.groups)
        self._sizes = {group.name: len(group) for group in plan.groups}
        self._trips = trips
        self._made: dict[Value, int] = {}
        self._waits: tuple[int, ...] = ()
        self._last: list[int] = []  # the last task of each iteration

    def iteration(self) -> int:
        """Adds one iteration; returns the number of its last task."""
        if len(self._last) >= AHEAD:
            self._waits = (self._last[-AHEAD],)
        self._steps(self._schedule.steps)
        self._rebind(self._schedule.carry)
        self._last.append(len(self._simulation.seconds) - 1)
        return self._last[-1]

    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Call):
                self._call(step)
            elif isinstance(step, Move):
                self._move(step)
            else:
                self._repeat(step)

    def _start(self, what: str, seconds: float) -> int:
        """Adds a dispatch by the host."""
        started = self._simulation.add(f"start {what}", (HOST,), seconds, self._waits, self._host_cores)
        self._waits = ()
        return started

    def _call(self, call: Call) -> None:
        cost = self._costs[call]
        started = self._start(call.name, cost.host)
        after = [started, *(self._made.get(value, -1) for value in call.inputs)]
        seconds = cost.seconds * self._slow(self._sizes[call.group])
        ran = self._simulation.add(call.name, self._lanes[call.group], seconds, after, cost.cores)
        self._made.update(dict.fromkeys(call.outputs, ran))

    def _move(self, move: Move) -> None:
        cost, name = self._costs[move], f"{move.source} -> {move.target}"
        started = self._start(name, cost.host)
        after = [started, *(self._made.get(a, -1) for a, _ in move.pairs)]
        ends = (*self._lanes[move.source], *self._lanes[move.target]) if cost.meets else ()
        moved = self._simulation.add(name, tuple(dict.fromkeys((name, *ends))), cost.seconds, after)
        self._made.update((b, moved) for _, b in move.pairs)

    def _repeat(self, repeat: Repeat) -> None:
        self._rebind(repeat.enter)
        trips = self._trips.get(repeat.trips, repeat.trips)
        for trip in range(trips):
            self._steps(repeat.steps)
            if trip < trips - 1:
                self._rebind(repeat.carry)
        self._rebind(repeat.leave)

    def _rebind(self, pairs: Sequence[tuple[Value, Value]]) -> None:
        made = [self._made.get(a, -1) for a, _ in pairs]
        self._made.update((b, task) for (_, b), task in zip(pairs, made, strict=True))


def loop_lengths(steps: Sequence[Step]) -> frozenset[int]:
    """The trips of a schedule's loops."""
    found: set[int] = set()
    for step in steps:
        if isinstance(step, Repeat):
            found |= {step.trips} | loop_lengths(step.steps)
    return frozenset(found)
