"""Converts iterations of a plan into simulated tasks: of the host, the groups of devices, and the links.

The tasks follow the schedule as the engine does (`running.steps`): the host dispatches programs and transfers
in order without waiting for them, up to `IN_FLIGHT` iterations at once.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

from fdg.costs.simulation import Simulation
from fdg.placing.plans import SteppedPlan
from fdg.placing.scheduling.schedule import Call, Move, Repeat, ScheduleWalk, Step, defs, uses
from fdg.running.many_programs import IN_FLIGHT

HOST = ""  # the resource of the host; groups have names


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run of a step."""

    host: float  # seconds of the host
    seconds: float  # seconds of the devices or the link, if nothing else uses them
    cores: float = 0.0  # number of cores of the simulation's pool that the step keeps busy
    # True if a transfer is a program that both groups run, as between processes (`running.exchange`); then it
    # waits for their earlier work and keeps both busy
    occupies_groups: bool = False


class ScheduleTasks(ScheduleWalk[int]):
    """Adds the iterations of a schedule to a simulation.

    `facts` maps each value to the index of the task that computes it; -1: available from the start.

    Args:
      dispatch_cores: cores of the pool that are busy while the host dispatches.
      straggler_ratio: maps a number of devices to the factor by which stragglers lengthen a step.
      lengths: maps a loop's number of trips to the number of simulated trips, which is smaller for long loops
        (`prediction` extrapolates); other loops are simulated in full.
    """

    def __init__(
        self,
        simulation: Simulation,
        plan: SteppedPlan,
        costs: Mapping[Step, Cost],
        dispatch_cores: float,
        straggler_ratio: Callable[[int], float],
        lengths: Mapping[int, int],
    ):
        super().__init__(-1)
        self._simulation, self._costs = simulation, costs
        self._dispatch_cores, self._straggler_ratio = dispatch_cores, straggler_ratio
        self._schedule, self._lengths = plan.schedule, lengths
        self._sizes = {group.name: len(group) for group in plan.groups}
        groups_by_device: dict[int, list[str]] = collections.defaultdict(list)
        for group in plan.groups:
            for device in group.devices:
                groups_by_device[device].append(group.name)
        group_sets = dict.fromkeys(map(tuple, groups_by_device.values()))
        # The simulated resources of each group: devices that belong to the same groups are one resource.
        self._resources = {
            name: tuple("&".join(names) for names in group_sets if name in names) for name in self._sizes
        }
        self._host_dependencies: tuple[int, ...] = ()  # the tasks that the host's next dispatch waits for
        self._last_tasks: list[int] = []  # the last task of each iteration

    def add_iteration(self) -> int:
        """Adds one iteration; returns the index of its last task."""
        if len(self._last_tasks) >= IN_FLIGHT:
            self._host_dependencies = (self._last_tasks[-IN_FLIGHT],)
        self.walk(self._schedule.steps)
        self.rebind(self._schedule.carry)
        self._last_tasks.append(len(self._simulation.tasks) - 1)
        return self._last_tasks[-1]

    def trips(self, repeat: Repeat) -> int:
        """The number of simulated trips of a loop."""
        return self._lengths.get(repeat.trips, repeat.trips)

    def call(self, call: Call) -> None:
        """Adds a run of a program."""
        cost = self._costs[call]
        dependencies = self._add_dispatch(call, call.name)
        seconds = cost.seconds * self._straggler_ratio(self._sizes[call.group])
        task = self._simulation.add(call.name, self._resources[call.group], seconds, dependencies, cost.cores)
        self.facts.update(dict.fromkeys(call.outputs, task))

    def move(self, move: Move) -> None:
        """Adds a transfer."""
        cost, name = self._costs[move], f"{move.source} -> {move.target}"
        dependencies = self._add_dispatch(move, name)
        groups = (move.source, move.target) if cost.occupies_groups else ()
        resources = dict.fromkeys((name, *(r for group in groups for r in self._resources[group])))
        task = self._simulation.add(name, tuple(resources), cost.seconds, dependencies)
        self.facts.update(dict.fromkeys(defs(move), task))

    def _add_dispatch(self, step: Step, name: str) -> list[int]:
        """Adds the host's dispatch of a step; returns the tasks that the step has to wait for."""
        host_seconds = self._costs[step].host
        dispatch = self._simulation.add(
            f"start {name}", (HOST,), host_seconds, self._host_dependencies, self._dispatch_cores
        )
        self._host_dependencies = ()
        return [dispatch, *(self.facts[value] for value in uses(step))]
