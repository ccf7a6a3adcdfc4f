"""`predict`: the time of a plan's iteration on a cluster, and what bounds it.

    loads           work of each program on one device
    program_time    its seconds, by class of operation
    traffic         seconds of collectives and transfers
    schedule_tasks  the schedule as tasks of the host, the groups and the links
    simulation      runs the tasks

Overlap, idle time and the effect of staleness result from the simulation.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from fdg.costs import traffic
from fdg.costs.hardware import Cluster
from fdg.costs.loads import Load, loads
from fdg.costs.program_time import Seconds, seconds_of
from fdg.costs.schedule_tasks import HOST, IN_FLIGHT, Cost, ScheduleTasks, loop_lengths
from fdg.costs.simulation import Simulation, Trace
from fdg.errors import FdgError
from fdg.placing.plans import Plan, SteppedPlan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Move, Step

_WARM, _COUNTED = 3, 3  # iterations until the steady state, and averaged iterations
_TRIPS = 12  # of a long loop, this many trips and twice as many are simulated and extrapolated


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted iteration."""

    seconds: float  # of an iteration in the steady state
    shares: Mapping[str, float]  # seconds by part along the critical path; they add up to `seconds`
    busy: Mapping[str, float]  # busy seconds of each group
    inside: float  # bytes on links within hosts, and between hosts
    between: float
    routes: Mapping[str, float]  # bytes by route: "collectives of all", "actors -> learners"
    devices: int  # number of used devices
    notes: tuple[str, ...] = ()  # sentences on the basis of the figures
    complete: bool = True  # False if collectives are estimated because they are known only after compiling

    @property
    def bound(self) -> str:
        """The largest part of the time."""
        return max(self.shares, key=lambda name: self.shares[name], default="nothing")

    @property
    def idle(self) -> Mapping[str, float]:
        """The share of the time in which each group is idle."""
        whole = self.seconds or 1.0
        return {group: max(0.0, 1 - busy / whole) for group, busy in self.busy.items()}


def predict(plan: Plan, cluster: Cluster) -> Prediction:
    """Predicts an iteration. Compiles nothing and needs no devices.

    The plan's devices are the cluster's, host by host.
    """
    if plan.num_devices > cluster.devices:
        raise FdgError(
            f"a plan for {plan.num_devices} devices does not go on a cluster of {cluster.devices}:"
            f" use --devices {cluster.devices}, or more hosts"
        )
    model = _Model(plan, cluster)
    slow = _stragglers(cluster)
    times = _of_steps(model, plan, slow) if isinstance(plan, SteppedPlan) else _of_one(model, slow)
    return model.prediction(times)


_Times = tuple[float, Mapping[str, float], Mapping[str, float]]  # seconds, shares and busy of `Prediction`


def _stragglers(cluster: Cluster) -> Callable[[int], float]:
    """The expected ratio of the slowest of some devices' time to the mean.

    Blom's approximation (1958) of the largest normal order statistic.
    """
    spread = cluster.straggling
    if not spread:
        return lambda devices: 1.0
    from scipy.special import ndtri  # here, since it takes a tenth of a second

    return lambda devices: 1 + spread * float(ndtri((devices - 0.375) / (devices + 0.25)))


class _Model:
    """Costs of the parts of a plan on a cluster."""

    def __init__(self, plan: Plan, cluster: Cluster):
        self.plan, self.cluster = plan, cluster
        self.groups = {group.name: group for group in plan.groups}
        self.lost = cluster.kind.lost
        self.loads = loads(plan, cluster.target)
        self.seconds: dict[str, Seconds] = {}
        self.sent: dict[str, list[tuple[traffic.Sent, float]]] = {}  # with the number of synchronisations
        for load in self.loads:
            cores, devices = self.lost.cores(self.cores(load.group)), load.group.devices
            self.seconds[load.program] = seconds_of(load.work, cluster.kind, cores)
            self.sent[load.program] = [
                (traffic.collective(one, devices, cluster), one.calls * self.lost.meetings)
                for one in load.collectives
            ]

    def cores(self, group: Group) -> float:
        """Cores that each device of a group can use alone: all of its machine's, if the other groups wait."""
        if self.cluster.cores is None:
            return 1.0
        return self.cluster.cores / max(1, min(len(group), self.cluster.devices_per_machine))

    def wanted(self, load: Load) -> float:
        """Cores of the pool that a program uses; 0 without a pool."""
        if self.cluster.cores is None:
            return 0.0
        return len(load.group) * self.seconds[load.program].cores

    @property
    def pool(self) -> float:
        """Cores of all machines; infinite if each device has its own."""
        if self.cluster.cores is None:
            return math.inf
        share = 1.0 if len(self.plan.groups) == 1 else self.lost.shared
        return self.cluster.cores * self.cluster.machines * share

    def parts(self, load: Load, stretched: float = 1.0) -> dict[str, float]:
        """Seconds of a program by part, alone on its host."""
        stretched *= self.lost.stretch(min(self.plan.num_devices, self.cluster.devices_per_host))
        found = {
            f"{name} on {load.group.name}": seconds * stretched
            for name, seconds in self.seconds[load.program].by_class.items()
        }
        for sent, calls in self.sent[load.program]:
            name = f"{sent.bound} among {load.group.name}"
            found[name] = found.get(name, 0.0) + sent.seconds * calls
        return found

    def routes(self) -> tuple[dict[str, float], float, float]:
        """Bytes of an iteration by route, within hosts and between them."""
        routes: dict[str, float] = collections.defaultdict(float)
        inside = between = 0.0
        times = {program.name: program.calls_per_iteration for program in self.plan.programs}
        for load in self.loads:
            for sent, calls in self.sent[load.program]:
                count = calls / self.lost.meetings * times[load.program]  # bytes travel once
                inside, between = inside + sent.inside * count, between + sent.between * count
                routes[f"collectives of {load.group.name}"] += (sent.inside + sent.between) * count
        for move, count in self.plan.moves():
            sent = self.transfer(move)
            inside, between = inside + sent.inside * count, between + sent.between * count
            routes[f"{move.source} -> {move.target}"] += (sent.inside + sent.between) * count
        return dict(routes), inside, between

    def transfer(self, move: Move) -> traffic.Sent:
        """The cost of one transfer."""
        source, target = self.groups[move.source], self.groups[move.target]
        return traffic.transfer_cost(move, source.devices, target.devices, self.cluster)

    def costs(self) -> dict[Step, Cost]:
        """The costs of every call and move of the schedule."""
        kind = self.cluster.kind
        start, array = kind.rate("dispatch"), kind.rate("argument")
        found: dict[Step, Cost] = {}
        for load, (call, _) in zip(self.loads, self.plan.calls(), strict=True):
            seconds = sum(self.parts(load).values()) + self.lost.seconds_to_start(len(load.group))
            found[call] = Cost(start + array * load.arrays, seconds, self.wanted(load))
        for move, _ in self.plan.moves():
            source, target = self.groups[move.source].devices, self.groups[move.target].devices
            work = traffic.handling(move, source, target, self.cluster)
            host = kind.rate("transfer") + work.programs * start + work.arrays * (array + self.lost.array)
            sent = self.transfer(move)
            seconds = sent.seconds + work.arrays * self.lost.arrival
            found[move] = Cost(host, seconds, meets=sent.between > 0)
        return found

    def notes(self) -> tuple[str, ...]:
        """Sentences on the basis of the figures."""
        found = []
        if not all(load.work.exact for load in self.loads):
            found.append(
                "operations depend on the data (a loop counts as its longest, or once where that is unknown;"
                " a branch as its dearest)"
            )
        if any("host" in load.work.flops or "host" in load.work.bytes for load in self.loads):
            found.append("functions on the host are taken to be as quick as a call of one that does nothing")
        if self.plan.unpredicted:
            groups = ", ".join(self.plan.unpredicted)
            found.append(
                f"exchanges of {groups} are estimated: parameters gathered for each pass, gradients scattered"
            )
        return (*found, *([self.cluster.note] if self.cluster.note else []))

    def prediction(self, times: _Times) -> Prediction:
        """A `Prediction` with the given times."""
        routes, inside, between = self.routes()
        devices = len({device for group in self.plan.groups for device in group.devices})
        return Prediction(*times, inside, between, routes, devices, self.notes(), not self.plan.unpredicted)


def _of_one(model: _Model, slow: Callable[[int], float]) -> _Times:
    """Times of a plan with one program, which the host dispatches once for many iterations."""
    (load,), (group,) = model.loads, model.plan.groups
    crowded = max(1.0, model.wanted(load) / model.pool)
    late, shares = slow(len(group)), model.parts(load, crowded)
    computing = sum(value for name, value in shares.items() if " on " in name)
    if late > 1:
        shares[f"stragglers of {group.name}"] = (late - 1) * computing
    seconds = sum(shares.values())
    return seconds, shares, {group.name: computing if len(group) > 1 else seconds}


def _of_steps(model: _Model, plan: SteppedPlan, slow: Callable[[int], float]) -> _Times:
    costs = model.costs()
    lengths = loop_lengths(plan.schedule.steps)
    long = [length for length in lengths if length > 2 * _TRIPS]
    run = functools.partial(_run, model, plan, costs, slow)
    base = run(dict.fromkeys(long, 2 * _TRIPS))
    total = collections.defaultdict(float, base)
    for length in long:
        shorter = run({**dict.fromkeys(long, 2 * _TRIPS), length: _TRIPS})
        for name in base.keys() | shorter.keys():
            a_trip = (base.get(name, 0.0) - shorter.get(name, 0.0)) / _TRIPS
            total[name] += a_trip * (length - 2 * _TRIPS)
    shares = {name[1]: seconds for name, seconds in total.items() if name[0] == "share" and seconds > 0}
    busy = {name[1]: seconds for name, seconds in total.items() if name[0] == "busy"}
    seconds = total["seconds", ""]
    whole = sum(shares.values()) or 1.0
    shares = {name: value * seconds / whole for name, value in shares.items()}
    return seconds, shares, {group: busy.get(group, 0.0) for group in model.groups}


def _run(
    model: _Model,
    plan: SteppedPlan,
    costs: Mapping[Step, Cost],
    slow: Callable[[int], float],
    trips: Mapping[int, int],
) -> dict[tuple[str, str], float]:
    """Simulates some iterations; times of one: ("seconds", ""), ("busy", group), ("share", part)."""
    simulation = Simulation(model.pool)
    of_host = 0.0 if model.cluster.cores is None else 1.0
    stepper = ScheduleTasks(simulation, plan, costs, of_host, slow, trips)
    ahead = plan.delayed.staleness if plan.delayed is not None else 0
    warm = _WARM + ahead
    # Other programs come after those that count, since groups that are ahead run them meanwhile.
    last = [stepper.iteration() for _ in range(warm + _COUNTED + IN_FLIGHT)]
    trace = simulation.run()
    begin, end = (max(trace.ends[: last[i - 1] + 1]) for i in (warm, warm + _COUNTED))
    found = {("seconds", ""): (end - begin) / _COUNTED}
    busy = simulation.busy(trace, begin, end)
    for group in model.groups:
        lanes = [name for name in busy if group in name.split("&")]
        found["busy", group] = max((busy[name] for name in lanes), default=0.0) / _COUNTED
    final = max(range(last[warm + _COUNTED - 1] + 1), key=trace.ends.__getitem__)
    for name, seconds in _shares(model, simulation, trace, final, begin, end).items():
        found["share", name] = seconds / _COUNTED
    return found


def _shares(
    model: _Model, simulation: Simulation, trace: Trace, final: int, begin: float, end: float
) -> Mapping[str, float]:
    """The parts of the critical path of a task between two times."""
    found: dict[str, float] = collections.defaultdict(float)
    split = {load.program: model.parts(load) for load in model.loads}
    for task in trace.critical(final):
        seconds = min(trace.ends[task], end) - max(trace.starts[task], begin)
        if seconds <= 0:
            continue
        label, lanes, *_ = simulation.tasks[task]
        if lanes == (HOST,):
            found["starting programs on the host"] += seconds
        elif label in split and (whole := sum(split[label].values())):
            for name, part in split[label].items():
                found[name] += seconds * part / whole
        else:
            found[f"transfer {label}"] += seconds
    return found
