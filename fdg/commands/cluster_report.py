"""Throughput, cost and goodput of a plan on a cluster with stragglers and failures.

A job on N devices fails N times as often as a device. After a failure it loads the last checkpoint and
repeats the work since then. The best interval between checkpoints is known to first order (Young 1974, "A
First Order Approximation to the Optimum Checkpoint Interval") and to higher order (Daly 2006, "A Higher Order
Estimate of the Optimum Checkpoint Interval for Restart Dumps", equation 37); `simulate` draws failures
instead. Goodput is the fraction of time that is useful work.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from fdg.costs.hardware import Cluster
from fdg.costs.prediction import Prediction, predict
from fdg.errors import FdgError
from fdg.placing.plans import Plan
from fdg.showing.plan_outline import idle_notes
from fdg.showing.words import duration, quantity, table
from fdg.training.curves import figure_of, finish, style


@dataclasses.dataclass(frozen=True)
class FailureModel:
    """A job with failures."""

    between: float  # mean seconds between failures of the whole job; infinite for none
    save: float  # seconds to save a checkpoint, in which nothing else runs
    restart: float  # seconds from a failure until the last checkpoint is loaded

    def __post_init__(self) -> None:
        for name in ("between", "save", "restart"):
            value = getattr(self, name)
            if not value >= 0 or (name == "between" and value == 0):
                least = "above" if name == "between" else "of at least"
                raise FdgError(f"failures: {name} = {value}: give seconds {least} 0")


def failure_model(cluster: Cluster, devices: int, state_bytes: float) -> FailureModel:
    """The failure rates of a job, from its number of devices on a cluster and the size of its state."""
    rate = cluster.failures * devices / 3600
    between = 1 / rate if rate else math.inf
    return FailureModel(between, state_bytes / cluster.storage, cluster.restart)


def young(job: FailureModel) -> float:
    """The best seconds of work between checkpoints, to first order.

    >>> young(FailureModel(between=86_400, save=60, restart=300))
    3219.9...
    """
    return math.sqrt(2 * job.save * job.between)


def daly(job: FailureModel) -> float:
    """The best seconds of work between checkpoints, to higher order.

    >>> daly(FailureModel(between=86_400, save=60, restart=300))
    3180.06...
    """
    if math.isinf(job.between):
        return math.inf
    if job.save >= 2 * job.between:
        return job.between
    part = job.save / (2 * job.between)
    return math.sqrt(2 * job.save * job.between) * (1 + math.sqrt(part) / 3 + part / 9) - job.save


def expected_goodput(job: FailureModel, interval: float) -> float:
    """Expected goodput if failures are a Poisson process (Daly, equation 13)."""
    if math.isinf(job.between):
        return interval / (interval + job.save) if not math.isinf(interval) else 1.0
    try:
        whole = (
            job.between
            * math.exp(job.restart / job.between)
            * math.expm1((interval + job.save) / job.between)
        )
    except OverflowError:
        return 0.0
    return interval / whole


def simulate(job: FailureModel, interval: float, work: float, seed: int = 0) -> float:
    """Goodput in a simulation with random failures.

    `interval` and `work` are seconds of work: between checkpoints, and in total.
    """
    random = np.random.default_rng(seed)
    most = 1e3 * (work + job.restart + job.save)
    now = done = 0.0
    failure = now + random.exponential(job.between) if not math.isinf(job.between) else math.inf
    while done < work:
        # Whole intervals until it fails, all at once: there may be millions.
        ready = work - done <= interval
        whole = 0 if ready else math.floor((min(failure, now + most) - now) / (interval + job.save))
        whole = max(0, min(whole, math.ceil((work - done) / interval) - 1))
        now, done = now + whole * (interval + job.save), done + whole * interval
        left = min(interval, work - done)
        end = now + left + (job.save if done + left < work else 0.0)
        if end <= failure:
            now, done = end, done + left
            continue
        now = failure
        if job.restart > 30 * job.between:  # it fails again while it starts, practically for ever
            return 0.0
        while (failure := now + random.exponential(job.between)) <= now + job.restart and now < most:
            now = failure
        now += job.restart
        if now > most:
            return done / now
    return work / now


def best_interval(job: FailureModel, intervals: Sequence[float], work: float) -> tuple[float, float]:
    """The interval with the highest mean goodput of eight simulations, and that goodput."""
    found = {
        interval: float(np.mean([simulate(job, interval, work, seed) for seed in range(8)]))
        for interval in intervals
    }
    best = max(found, key=lambda interval: found[interval])
    return best, found[best]


_WORK = 200.0  # times the mean time between failures: the work of a simulated job


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan on a cluster."""

    plan: Plan
    prediction: Prediction  # the predicted iteration without stragglers
    straggling: float  # slow-down of an iteration by stragglers; 1 for none
    steps_per_s: float  # environment steps per second, with stragglers, without failures
    job: FailureModel  # its failures
    # best seconds of work between checkpoints: (Young, Daly, best simulated)
    save_every: tuple[float, float, float]
    goodput: tuple[float, float]  # (by Daly's formula, simulated)
    price_per_million: float  # price of a million steps, with failures

    @property
    def where(self) -> tuple[str, str]:
        """The number of devices and the policy, as text."""
        return str(self.plan.num_devices), str(self.plan.policy)


def point(plan: Plan, cluster: Cluster, steps: int) -> Point:
    """Predicts a plan with stragglers and failures.

    `steps` are those of an iteration, of all agents together.
    """
    alike = predict(plan, dataclasses.replace(cluster, straggling=0.0))
    slower = 1.0
    if cluster.straggling:
        slower = predict(plan, cluster).seconds / alike.seconds
    state = plan.graph.of_all(plan.graph.state)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    job = failure_model(cluster, alike.devices, state_bytes)
    every, kept = _saving(job)
    per_second = steps / (alike.seconds * slower)
    price = cluster.price * plan.num_devices / 3600 / (per_second * kept[1]) * 1e6
    return Point(plan, alike, slower, per_second, job, every, kept, price)


def _saving(job: FailureModel) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """The checkpoint interval and the goodput."""
    if math.isinf(job.between):
        return (math.inf, math.inf, math.inf), (1.0, 1.0)
    first_order, higher_order = young(job), daly(job)
    factors = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8)
    tried = [higher_order * factor for factor in factors if higher_order > 0] or [1.0]
    best, kept = best_interval(job, tried, _WORK * job.between)
    return (first_order, higher_order, best), (expected_goodput(job, higher_order), kept)


def points_report(points: Sequence[Point], price: bool) -> str:
    """The table of points, and notes on failures below it."""
    header = ["devices", "policy", "iteration", "steps/s", "scaling", "idle"]
    header += ["between hosts", "memory", "most of it is"]
    rows = []
    for one in points:
        first = next(other for other in points if type(other.plan.policy) is type(one.plan.policy))
        scaling = one.steps_per_s / first.steps_per_s * first.plan.num_devices / one.plan.num_devices
        bound, whole = one.prediction.bound, one.prediction.seconds or 1.0
        rows.append(
            (
                *one.where,
                duration(one.prediction.seconds * one.straggling),
                quantity(one.steps_per_s),
                f"{scaling:.0%}",
                ", ".join(f"{group} {share:.0%}" for group, share in one.prediction.idle.items()),
                quantity(one.prediction.between, "B"),
                quantity(max(size for _, size in one.plan.memory), "B"),
                f"{bound} ({one.prediction.shares.get(bound, 0.0) / whole:.0%})",
            )
        )
    lines = table(header, rows, numeric=(0, 2, 3, 4, 6, 7))
    if (
        any(not math.isinf(one.job.between) for one in points)
        or price
        or any(one.straggling > 1 for one in points)
    ):
        header = ["devices", "policy", "stragglers", "fails every", "save every: Young", "Daly", "simulated"]
        header += ["goodput: Daly", "simulated", "price of 1M steps"]
        lost: list[tuple[str, ...]] = []
        for one in points:
            every = [duration(seconds) for seconds in one.save_every]
            kept = [f"{share:.1%}" for share in one.goodput]
            cost = f"{one.price_per_million:.4g}" if price else ""
            slower = f"+{one.straggling - 1:.1%}"
            lost.append((*one.where, slower, duration(one.job.between), *every, *kept, cost))
        lines += ["", *table(header, lost, numeric=(0, *range(2, 10)))]
    unused = [f"{' on '.join(one.where[::-1])}: {line}" for one in points for line in idle_notes(one.plan)]
    lines += [*([""] if unused else []), *unused]
    notes = dict.fromkeys(note for one in points for note in one.prediction.notes)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def draw_sweep(points: Sequence[Point], path: Path, title: str) -> None:
    """Writes a PNG: a line for each policy."""
    lines: dict[str, list[Point]] = {}
    for one in points:
        lines.setdefault(type(one.plan.policy).__name__, []).append(one)
    figure, *panels = figure_of(4)
    figure.suptitle(title)
    drawn: dict[str, Callable[[Point], float]] = {
        "steps/s": lambda one: one.steps_per_s,
        "idle time of the idlest group, %": lambda one: 100 * max(one.prediction.idle.values(), default=0.0),
        "bytes over links, an iteration": lambda one: max(one.prediction.inside + one.prediction.between, 1),
        "goodput, %": lambda one: one.goodput[1] / one.straggling * 100,
    }
    for axes, (label, value) in zip(panels, drawn.items(), strict=True):
        for i, (name, some) in enumerate(lines.items()):
            values = [value(one) for one in some]
            axes.plot([one.plan.num_devices for one in some], values, "o-", color=style(i)[1], label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="devices", ylabel=label)
    first = points[0]
    ideal = [first.steps_per_s * one.plan.num_devices / first.plan.num_devices for one in points]
    panels[0].plot([one.plan.num_devices for one in points], ideal, ":", color="grey", label="linear")
    for axes in (panels[0], panels[2]):
        axes.set_yscale("log")
    finish(figure, panels, "devices")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
