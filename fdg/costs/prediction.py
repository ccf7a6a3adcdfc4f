"""The cost model: predicts the time per iteration of a plan on a cluster, and the parts of this time.

    module          what it computes
    program_work    the work of each program on one device
    program_time    the seconds of this work, by class of operation
    traffic         the seconds of collectives and transfers
    schedule_tasks  the schedule as tasks of the host, the groups and the links
    simulation      the start and end of each task

Overlap, idle time and the effect of staleness result from the simulation.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from fdg.costs import traffic
from fdg.costs.hardware import Cluster
from fdg.costs.program_time import Seconds, seconds_of
from fdg.costs.program_work import ProgramWork, program_works
from fdg.costs.schedule_tasks import HOST, Cost, ScheduleTasks
from fdg.costs.simulation import Simulation, Trace
from fdg.errors import FdgError
from fdg.placing.plans import Plan, SteppedPlan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Move, Repeat, Step, all_steps
from fdg.running.many_programs import IN_FLIGHT

_WARM_UP, _COUNTED = 3, 3  # simulated iterations: this many to warm up, then this many that are averaged
_FEW_TRIPS = 12  # long loops are simulated with this number of trips and with twice as many, and extrapolated


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction of one iteration of a long run."""

    seconds: float  # per iteration
    seconds_by_part: Mapping[str, float]  # along the critical path; they add up to `seconds`
    busy: Mapping[str, float]  # busy seconds of each group
    inside: float  # bytes on links within hosts
    between: float  # bytes on links between hosts
    routes: Mapping[str, float]  # bytes by route: "collectives of all", "actors -> learners"
    devices: int  # number of used devices
    notes: tuple[str, ...] = ()  # assumptions behind the figures, as sentences
    has_known_collectives: bool = True  # False if they are estimated, since only the compiler inserts them

    @property
    def largest_part(self) -> str:
        """The name of the largest part of the time."""
        return max(self.seconds_by_part, key=self.seconds_by_part.__getitem__, default="nothing")

    @property
    def largest_part_text(self) -> str:
        """The largest part of the time with its share, such as "product on actors (40%)"."""
        name = self.largest_part
        return f"{name} ({self.seconds_by_part.get(name, 0.0) / (self.seconds or 1.0):.0%})"

    @property
    def idle(self) -> Mapping[str, float]:
        """The share of the time in which each group is idle."""
        whole = self.seconds or 1.0
        return {group: max(0.0, 1 - busy / whole) for group, busy in self.busy.items()}


def predict(plan: Plan, cluster: Cluster) -> Prediction:
    """Predicts an iteration. Compiles nothing and needs no devices.

    The plan's devices are numbered host by host in the cluster.
    """
    if plan.num_devices > cluster.devices:
        raise FdgError(
            f"a plan for {plan.num_devices} devices does not fit on a cluster of {cluster.devices}:"
            f" use --devices {cluster.devices}, or give more hosts"
        )
    model = _CostModel(plan, cluster)
    times = _stepped_times(model, plan) if isinstance(plan, SteppedPlan) else _single_program_times(model)
    routes, inside, between = model.routes()
    devices = len({device for group in plan.groups for device in group.devices})
    return Prediction(*times, inside, between, routes, devices, model.notes(), not plan.unpredicted)


_Times = tuple[float, Mapping[str, float], Mapping[str, float]]  # the first three fields of `Prediction`


def _straggler_ratio(cluster: Cluster) -> Callable[[int], float]:
    """For a number of devices, the expected ratio of the slowest device's time to the mean.

    Uses Blom's approximation (1958) of the largest normal order statistic.
    """
    spread = cluster.straggling
    if not spread:
        return lambda devices: 1.0
    from scipy.special import ndtri  # imported here, since it takes a tenth of a second

    return lambda devices: 1 + spread * float(ndtri((devices - 0.375) / (devices + 0.25)))


class _CostModel:
    """The costs of a plan's programs and transfers on a cluster."""

    def __init__(self, plan: Plan, cluster: Cluster):
        self.plan, self.cluster = plan, cluster
        self.straggler_ratio = _straggler_ratio(cluster)
        self.groups = {group.name: group for group in plan.groups}
        self.hosts = {group.name: cluster.part_of(group.devices) for group in plan.groups}
        self.overheads = {name: hosts.kind.effective_overheads for name, hosts in self.hosts.items()}
        self.program_works = program_works(plan, cluster)
        self.seconds: dict[str, Seconds] = {}
        # for each program: the cost of each collective, and its number of runs; `meetings` is the number of
        # compiled collectives per collective of the plan
        self.collective_costs: dict[str, list[tuple[traffic.CommunicationCost, float]]] = {}
        for program in self.program_works:
            name, devices = program.group.name, program.group.devices
            overheads = self.overheads[name]
            cores, meetings = overheads.cores(self.cores(program.group)), overheads.meetings
            self.seconds[program.name] = seconds_of(program.work, self.hosts[name].kind, cores)
            self.collective_costs[program.name] = [
                (traffic.collective(collective, devices, cluster), collective.calls * meetings)
                for collective in program.collectives
            ]

    def cores(self, group: Group) -> float:
        """Cores per device of a group, if the other groups are idle."""
        hosts = self.hosts[group.name]
        if hosts.cores is None:
            return 1.0
        return hosts.cores / max(1, min(len(group), hosts.devices_per_machine))

    def used_cores(self, program: ProgramWork) -> float:
        """The number of shared cores that a program occupies; 0 if each device has its own cores."""
        if self.hosts[program.group.name].cores is None:
            return 0.0
        return len(program.group) * self.seconds[program.name].cores

    @property
    def pool_cores(self) -> float:
        """The number of cores that groups share, on all machines; infinite if each device has its own."""
        cores = sum((part.cores or 0) * part.machines for part in self.cluster.parts)
        if not cores:
            return math.inf
        sharing = [name for name, hosts in self.hosts.items() if hosts.cores is not None]
        # `shared` is the fraction of cores that several groups can use
        usable_fraction = 1.0 if len(sharing) < 2 else self.overheads[sharing[0]].shared
        return cores * usable_fraction

    def parts(self, program: ProgramWork, stretch: float = 1.0) -> dict[str, float]:
        """Seconds of a program by part, times `stretch`, while no other group runs."""
        hosts, overheads = self.hosts[program.group.name], self.overheads[program.group.name]
        stretch *= overheads.stretch(min(self.plan.num_devices, hosts.devices_per_host))
        parts = {
            f"{name} on {program.group.name}": seconds * stretch
            for name, seconds in self.seconds[program.name].by_class.items()
        }
        for cost, calls in self.collective_costs[program.name]:
            name = f"{cost.largest_part} among {program.group.name}"
            parts[name] = parts.get(name, 0.0) + cost.seconds * calls
        return parts

    def routes(self) -> tuple[dict[str, float], float, float]:
        """Bytes per iteration: by route, in total within hosts, and in total between hosts."""
        routes: dict[str, float] = collections.defaultdict(float)
        inside = between = 0.0
        calls_per_iteration = {program.name: program.calls_per_iteration for program in self.plan.programs}
        for program in self.program_works:
            for cost, calls in self.collective_costs[program.name]:
                # Bytes are those of the plan's collectives: without the factor of the compiled program.
                meetings = self.overheads[program.group.name].meetings
                num_runs = calls / meetings * calls_per_iteration[program.name]
                inside, between = inside + cost.inside * num_runs, between + cost.between * num_runs
                routes[f"collectives of {program.group.name}"] += (cost.inside + cost.between) * num_runs
        for move, num_runs in self.plan.moves():
            cost = self.transfer(move)
            inside, between = inside + cost.inside * num_runs, between + cost.between * num_runs
            routes[f"{move.source} -> {move.target}"] += (cost.inside + cost.between) * num_runs
        return dict(routes), inside, between

    def transfer(self, move: Move) -> traffic.CommunicationCost:
        """The cost of one transfer."""
        source, target = self.groups[move.source], self.groups[move.target]
        return traffic.transfer_cost(move, source.devices, target.devices, self.cluster)

    def costs(self) -> dict[Step, Cost]:
        """The cost of each call and move of the schedule."""
        costs: dict[Step, Cost] = {}
        for program, (call, _) in zip(self.program_works, self.plan.calls(), strict=True):
            hosts = self.hosts[program.group.name]
            # the devices of a machine: those of other machines start at the same time
            devices = min(len(program.group), hosts.devices_per_machine)
            seconds = sum(self.parts(program).values())
            seconds += self.overheads[program.group.name].seconds_to_start(devices)
            host = hosts.kind.rate("dispatch") + hosts.kind.rate("argument") * program.num_arrays
            costs[call] = Cost(host, seconds, self.used_cores(program))
        for move, _ in self.plan.moves():
            source, target = self.groups[move.source].devices, self.groups[move.target].devices
            programs, arrays = traffic.host_work(move, source, target, self.cluster)
            kind, overheads = self.hosts[move.source].kind, self.overheads[move.source]
            seconds_per_array = kind.rate("argument") + overheads.array
            host = kind.rate("transfer") + programs * kind.rate("dispatch") + arrays * seconds_per_array
            cost = self.transfer(move)
            seconds = cost.seconds + arrays * overheads.arrival
            costs[move] = Cost(host, seconds, occupies_groups=cost.between > 0)
        return costs

    def notes(self) -> tuple[str, ...]:
        """Assumptions behind the figures, as sentences."""
        notes = []
        if not all(program.work.exact for program in self.program_works):
            notes.append(
                "operations depend on the data (a loop is counted with its declared or largest number of"
                " trips, or else one; a branch as its most expensive case)"
            )
        if any(
            "host" in program.work.flops or "host" in program.work.bytes for program in self.program_works
        ):
            notes.append("functions on the host are assumed to take no time in addition to their calls")
        if self.plan.unpredicted:  # names of groups
            groups = ", ".join(self.plan.unpredicted)
            notes.append(
                f"collectives of {groups} are estimated: parameters gathered per pass, gradients scattered"
            )
        return (*notes, *([self.cluster.note] if self.cluster.note else []))


def _single_program_times(model: _CostModel) -> _Times:
    """Times of a plan with one program, which the host dispatches once for many iterations."""
    (program,), (group,) = model.program_works, model.plan.groups
    contention = max(1.0, model.used_cores(program) / model.pool_cores)
    straggler_ratio, parts = model.straggler_ratio(len(group)), model.parts(program, contention)
    compute_seconds = sum(value for name, value in parts.items() if name.endswith(f" on {group.name}"))
    if straggler_ratio > 1:
        parts[f"stragglers of {group.name}"] = (straggler_ratio - 1) * compute_seconds
    seconds = sum(parts.values())
    return seconds, parts, {group.name: compute_seconds if len(group) > 1 else seconds}


def _stepped_times(model: _CostModel, plan: SteppedPlan) -> _Times:
    """Times of a plan with several programs; long loops are extrapolated from two simulations."""
    costs = model.costs()
    lengths = {step.trips for step, _ in all_steps(plan.schedule.steps) if isinstance(step, Repeat)}
    long_lengths = [length for length in lengths if length > 2 * _FEW_TRIPS]
    simulate = functools.partial(_simulated_times, model, plan, costs)
    many_trips = dict.fromkeys(long_lengths, 2 * _FEW_TRIPS)
    long_run = simulate(many_trips)
    totals = collections.defaultdict(float, long_run)
    for length in long_lengths:
        shorter = simulate({**many_trips, length: _FEW_TRIPS})
        for name in long_run.keys() | shorter.keys():
            seconds_per_trip = (long_run.get(name, 0.0) - shorter.get(name, 0.0)) / _FEW_TRIPS
            totals[name] += seconds_per_trip * (length - 2 * _FEW_TRIPS)
    seconds = totals["seconds", ""]
    parts = {name: value for (kind, name), value in totals.items() if kind == "part" and value > 0}
    parts_total = sum(parts.values()) or 1.0
    parts = {name: value * seconds / parts_total for name, value in parts.items()}
    return seconds, parts, {group: totals["busy", group] for group in model.groups}


def _simulated_times(
    model: _CostModel,
    plan: SteppedPlan,
    costs: Mapping[Step, Cost],
    loop_trips: Mapping[int, int],
) -> dict[tuple[str, str], float]:
    """Simulated seconds per iteration by key: ("seconds", ""), ("busy", group), ("part", name).

    `loop_trips` has the simulated number of trips of each long loop (`ScheduleTasks`, `lengths`).
    """
    simulation = Simulation(model.pool_cores)
    dispatch_cores = 0.0 if all(part.cores is None for part in model.cluster.parts) else 1.0
    tasks = ScheduleTasks(simulation, plan, costs, dispatch_cores, model.straggler_ratio, loop_trips)
    staleness = plan.delayed.staleness if plan.delayed is not None else 0
    warm_up = _WARM_UP + staleness
    # Further iterations follow the averaged ones, since groups that run ahead execute them at the same time.
    last_tasks = [tasks.add_iteration() for _ in range(warm_up + _COUNTED + IN_FLIGHT)]
    trace = simulation.run()
    begin, end = (max(trace.ends[: last_tasks[i - 1] + 1]) for i in (warm_up, warm_up + _COUNTED))
    times = {("seconds", ""): (end - begin) / _COUNTED}
    busy = simulation.busy(trace, begin, end)
    for group in model.groups:
        resources = [name for name in busy if group in name.split("&")]  # "a&b": devices of groups a and b
        times["busy", group] = max((busy[name] for name in resources), default=0.0) / _COUNTED
    final_task = max(range(last_tasks[warm_up + _COUNTED - 1] + 1), key=trace.ends.__getitem__)
    for name, seconds in _seconds_by_part(model, simulation, trace, final_task, begin, end).items():
        times["part", name] = seconds / _COUNTED
    return times


def _seconds_by_part(
    model: _CostModel, simulation: Simulation, trace: Trace, final_task: int, begin: float, end: float
) -> Mapping[str, float]:
    """Seconds by part, between two times, on the critical path that ends with task `final_task`."""
    parts: dict[str, float] = collections.defaultdict(float)
    program_parts = {program.name: model.parts(program) for program in model.program_works}
    for task in trace.critical_path(final_task):
        seconds = min(trace.ends[task], end) - max(trace.starts[task], begin)
        if seconds <= 0:
            continue
        label, resources, *_ = simulation.tasks[task]
        if resources == (HOST,):
            parts["starting programs on the host"] += seconds
        elif label in program_parts and (total := sum(program_parts[label].values())):
            for name, part in program_parts[label].items():
                parts[name] += seconds * part / total
        else:
            parts[f"transfer {label}"] += seconds
    return parts
