"""A plan's iterations as tasks of a simulation: of the host, groups and links.

Follows the schedule as the engine does (`running.steps`): the host dispatches programs and transfers in order
without waiting, at most a few iterations ahead.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from fdg.costs.simulation import Simulation
from fdg.placing.plans import SteppedPlan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Repeat, ScheduleWalk, Step, all_steps, defs, uses

IN_FLIGHT = 4  # iterations: the one that is being dispatched, and three that the engine leaves running
HOST = "host"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run of a step."""

    host: float  # seconds of the host
    seconds: float  # of the devices or the link, alone
    cores: float = 0.0  # busy cores of the pool
    # whether a transfer is a program of both groups, as between processes (`running.exchange`): it waits
    # for their earlier work, and they do nothing else meanwhile
    meets: bool = False


Slow = Callable[[int], float]
"""The slow-down by stragglers of a step on this many devices, in one trial."""


def device_lanes(groups: Sequence[Group]) -> Mapping[str, tuple[str, ...]]:
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


class ScheduleTasks(ScheduleWalk[int]):
    """Adds the iterations of a schedule to a simulation; `lengths` replaces the lengths of loops.

    Facts are the numbers of the tasks that make the values; -1 for none.
    """

    def __init__(
        self,
        simulation: Simulation,
        plan: SteppedPlan,
        costs: Mapping[Step, Cost],
        host_cores: float,
        slow: Slow,
        lengths: Mapping[int, int],
    ):
        super().__init__(-1)
        self._simulation, self._costs, self._host_cores, self._slow = simulation, costs, host_cores, slow
        self._schedule, self._lanes, self._lengths = plan.schedule, device_lanes(plan.groups), lengths
        self._sizes = {group.name: len(group) for group in plan.groups}
        self._waits: tuple[int, ...] = ()
        self._last: list[int] = []  # the last task of each iteration

    def iteration(self) -> int:
        """Adds one iteration; returns the number of its last task."""
        if len(self._last) >= IN_FLIGHT:
            self._waits = (self._last[-IN_FLIGHT],)
        self.walk(self._schedule.steps)
        self.rebind(self._schedule.carry)
        self._last.append(len(self._simulation.tasks) - 1)
        return self._last[-1]

    def trips(self, repeat: Repeat) -> int:
        """The length of a loop in this simulation."""
        return self._lengths.get(repeat.trips, repeat.trips)

    def call(self, call: Call) -> None:
        """Adds a run of a program."""
        cost = self._costs[call]
        after = self._after(call, call.name)
        seconds = cost.seconds * self._slow(self._sizes[call.group])
        ran = self._simulation.add(call.name, self._lanes[call.group], seconds, after, cost.cores)
        self.facts.update(dict.fromkeys(call.outputs, ran))

    def move(self, move: Move) -> None:
        """Adds a transfer."""
        cost, name = self._costs[move], f"{move.source} -> {move.target}"
        after = self._after(move, name)
        ends = (*self._lanes[move.source], *self._lanes[move.target]) if cost.meets else ()
        moved = self._simulation.add(name, tuple(dict.fromkeys((name, *ends))), cost.seconds, after)
        self.facts.update(dict.fromkeys(defs(move), moved))

    def _after(self, step: Step, name: str) -> list[int]:
        """Adds the host's dispatch of a step; returns the tasks that the step has to wait for."""
        host = self._costs[step].host
        started = self._simulation.add(f"start {name}", (HOST,), host, self._waits, self._host_cores)
        self._waits = ()
        return [started, *(self.facts[value] for value in uses(step))]


def loop_lengths(steps: Sequence[Step]) -> frozenset[int]:
    """The trips of a schedule's loops."""
    return frozenset(step.trips for step, _ in all_steps(steps) if isinstance(step, Repeat))
