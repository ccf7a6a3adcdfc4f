"""Throughput, cost and goodput of plans on a cluster with stragglers and failures.

A job on N devices fails N times as often as one device. After a failure it loads the last checkpoint and
repeats the work since then. Formulas of first order (Young 1974, "A First Order Approximation to the Optimum
Checkpoint Interval") and of higher order (Daly 2006, "A Higher Order Estimate of the Optimum Checkpoint
Interval for Restart Dumps", equation 37) give the best interval between checkpoints; `best_interval` finds it
by simulations with random failures. Goodput is the fraction of time that is useful work.
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
from fdg.files import writing
from fdg.placing.plans import Plan
from fdg.showing.plan_outline import idle_notes
from fdg.showing.words import duration, quantity, table
from fdg.training.curves import finish_figure, make_figure, style_of


@dataclasses.dataclass(frozen=True)
class FailureModel:
    """How often a job fails, and what checkpoints and failures cost."""

    seconds_between: float  # mean seconds between failures of the whole job; infinite if it never fails
    save: float  # seconds to save a checkpoint; nothing else runs meanwhile
    restart: float  # seconds from a failure until the last checkpoint is loaded

    def __post_init__(self) -> None:
        for name in ("seconds_between", "save", "restart"):
            value = getattr(self, name)
            if not value >= 0 or (name == "seconds_between" and value == 0):
                least = "above" if name == "seconds_between" else "of at least"
                raise FdgError(f"failures: {name} = {value}: give seconds {least} 0")


def young_interval(failures: FailureModel) -> float:
    """The best interval in seconds of work between checkpoints, to first order.

    >>> young_interval(FailureModel(seconds_between=86_400, save=60, restart=300))
    3219.9...
    """
    return math.sqrt(2 * failures.save * failures.seconds_between)


def daly_interval(failures: FailureModel) -> float:
    """The best interval in seconds of work between checkpoints, to higher order.

    >>> daly_interval(FailureModel(seconds_between=86_400, save=60, restart=300))
    3180.06...
    """
    if math.isinf(failures.seconds_between):
        return math.inf
    if failures.save >= 2 * failures.seconds_between:
        return failures.seconds_between
    ratio = failures.save / (2 * failures.seconds_between)
    return young_interval(failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - failures.save


def expected_goodput(failures: FailureModel, interval: float) -> float:
    """The expected goodput if failures are a Poisson process (Daly 2006, equation 13).

    `interval` is the seconds of work between checkpoints.
    """
    between = failures.seconds_between
    if math.isinf(between):
        return interval / (interval + failures.save) if not math.isinf(interval) else 1.0
    try:
        restarts = math.exp(failures.restart / between)
        return interval / (between * restarts * math.expm1((interval + failures.save) / between))
    except OverflowError:
        return 0.0


def simulate(failures: FailureModel, interval: float, work: float, seed: int = 0) -> float:
    """The goodput of a simulation with random failures.

    `interval` is the seconds of work between checkpoints, and `work` the total.
    """
    if max(failures.restart, min(interval, work) + failures.save) > 30 * failures.seconds_between:
        return 0.0  # almost every restart or every interval fails
    random = np.random.default_rng(seed)
    time_limit = 1e3 * (work + failures.restart + failures.save)
    now = useful = 0.0
    failure = (
        now + random.exponential(failures.seconds_between)
        if not math.isinf(failures.seconds_between)
        else math.inf
    )
    while useful < work:
        # All whole intervals before the failure are one step, since there may be millions.
        is_last = work - useful <= interval
        seconds = min(failure, now + time_limit) - now
        num_intervals = 0 if is_last else math.floor(seconds / (interval + failures.save))
        num_intervals = max(0, min(num_intervals, math.ceil((work - useful) / interval) - 1))
        now, useful = now + num_intervals * (interval + failures.save), useful + num_intervals * interval
        remaining = min(interval, work - useful)
        end = now + remaining + (failures.save if useful + remaining < work else 0.0)
        if end <= failure:
            now, useful = end, useful + remaining
            continue
        now = failure
        while (
            failure := now + random.exponential(failures.seconds_between)
        ) <= now + failures.restart and now < time_limit:
            now = failure
        now += failures.restart
        if now > time_limit:
            return useful / now
    return work / now


def best_interval(failures: FailureModel, intervals: Sequence[float], work: float) -> tuple[float, float]:
    """The one of `intervals` with the highest mean goodput in eight simulations, and this goodput.

    `intervals` and `work` are in seconds of work.
    """
    goodput = {i: float(np.mean([simulate(failures, i, work, seed) for seed in range(8)])) for i in intervals}
    best = max(goodput, key=goodput.__getitem__)
    return best, goodput[best]


_WORK_RATIO = 200.0  # work of a simulated job, in mean times between failures
_MAX_INTERVALS = 1e9  # checkpoints of a simulated job; sums of more intervals would lose precision


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of a sweep over policies and numbers of devices: a plan on a cluster, and its predictions."""

    plan: Plan
    prediction: Prediction  # the predicted iteration without stragglers
    straggling: float  # the factor by which stragglers lengthen an iteration
    steps_per_s: float  # environment steps per second, with stragglers, without failures
    failures: FailureModel
    # best interval in seconds of work between checkpoints: (Young, Daly, best simulated)
    save_every: tuple[float, float, float]
    goodput: tuple[float, float]  # (Daly's formula, simulated)
    price_per_million: float  # price per million steps, with failures

    @property
    def row_labels(self) -> tuple[str, str]:
        """The number of devices and the policy, as text."""
        return str(self.plan.num_devices), str(self.plan.policy)


def predict_point(plan: Plan, cluster: Cluster, steps: int) -> Point:
    """Predicts a plan with stragglers and failures; `steps` is the number per iteration, over all agents."""
    prediction = predict(plan, dataclasses.replace(cluster, straggling=0.0))
    slowdown = predict(plan, cluster).seconds / prediction.seconds if cluster.straggling else 1.0
    state = plan.graph.of_all(plan.graph.state)
    state_bytes = max(1, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)))
    used = {device for group in plan.groups for device in group.devices}
    failure_rate = cluster.per_hour("failures", used) / 3600
    between = 1 / failure_rate if failure_rate else math.inf
    failures = FailureModel(between, state_bytes / cluster.storage, cluster.restart)
    intervals, goodputs = _intervals_and_goodputs(failures)
    steps_per_second = steps / (prediction.seconds * slowdown)
    price = cluster.per_hour("price", range(plan.num_devices)) / 3600 / steps_per_second * 1e6
    price = price / goodputs[1] if goodputs[1] else math.inf
    return Point(plan, prediction, slowdown, steps_per_second, failures, intervals, goodputs, price)


def _intervals_and_goodputs(failures: FailureModel) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """`Point.save_every` and `Point.goodput`. Simulations try multiples of Daly's interval."""
    if math.isinf(failures.seconds_between):
        return (math.inf, math.inf, math.inf), (1.0, 1.0)
    first_order, higher_order = young_interval(failures), daly_interval(failures)
    tried_factors = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8)
    intervals = [higher_order * factor for factor in tried_factors]
    work = min(_WORK_RATIO * failures.seconds_between, _MAX_INTERVALS * higher_order)
    best_simulated, goodput = best_interval(failures, intervals, work)
    return (first_order, higher_order, best_simulated), (expected_goodput(failures, higher_order), goodput)


def points_report(points: Sequence[Point], price: bool) -> str:
    """The table of points; below it one of failures (with prices if `price`), idle devices and notes."""
    header = ["devices", "policy", "iteration", "steps/s", "scaling", "idle"]
    header += ["between hosts", "memory", "largest part"]
    rows = []
    for point in points:
        base = next(base for base in points if type(base.plan.policy) is type(point.plan.policy))
        scaling = point.steps_per_s / base.steps_per_s * base.plan.num_devices / point.plan.num_devices
        rows.append(
            (
                *point.row_labels,
                duration(point.prediction.seconds * point.straggling),
                quantity(point.steps_per_s),
                f"{scaling:.0%}",
                ", ".join(f"{group} {share:.0%}" for group, share in point.prediction.idle.items()),
                quantity(point.prediction.between, "B"),
                quantity(max(size for _, size in point.plan.memory), "B"),
                point.prediction.largest_part_text,
            )
        )
    lines = table(header, rows, numeric=(0, 2, 3, 4, 6, 7))
    if price or any(
        point.straggling > 1 or not math.isinf(point.failures.seconds_between) for point in points
    ):
        header = ["devices", "policy", "stragglers", "fails every", "save every: Young", "Daly", "simulated"]
        header += ["goodput: Daly", "simulated", "price of 1M steps"]
        failure_rows: list[tuple[str, ...]] = []
        for point in points:
            intervals = [duration(seconds) for seconds in point.save_every]
            goodputs = [f"{share:.1%}" for share in point.goodput]
            cost = f"{point.price_per_million:.4g}" if price else ""
            slowdown = f"+{point.straggling - 1:.1%}"
            failures = duration(point.failures.seconds_between)
            failure_rows.append((*point.row_labels, slowdown, failures, *intervals, *goodputs, cost))
        lines += ["", *table(header, failure_rows, numeric=(0, *range(2, 10)))]
    unused = [f"{' on '.join(p.row_labels[::-1])}: {line}" for p in points for line in idle_notes(p.plan)]
    lines += [*([""] if unused else []), *unused]
    notes = dict.fromkeys(note for point in points for note in point.prediction.notes)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def draw_sweep(points: Sequence[Point], path: Path, title: str) -> None:
    """Plots throughput, idle time, bytes and goodput by devices to a PNG, one line per policy."""
    points_by_policy: dict[str, list[Point]] = {}
    for point in points:
        points_by_policy.setdefault(type(point.plan.policy).__name__, []).append(point)
    figure, *panels = make_figure(4)
    figure.suptitle(title)
    quantities: dict[str, Callable[[Point], float]] = {
        "steps/s": lambda p: p.steps_per_s,
        "idle time of the idlest group, %": lambda p: 100 * max(p.prediction.idle.values(), default=0.0),
        "bytes over links per iteration": lambda p: max(p.prediction.inside + p.prediction.between, 1),
        "goodput, %": lambda p: p.goodput[1] * 100,
    }
    for axes, (label, quantity_of) in zip(panels, quantities.items(), strict=True):
        for i, (name, policy_points) in enumerate(points_by_policy.items()):
            devices, values = zip(*((p.plan.num_devices, quantity_of(p)) for p in policy_points), strict=True)
            axes.plot(devices, values, "o-", color=style_of(i)[1], label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="devices", ylabel=label)
    smallest = points[0]
    ideal = [smallest.steps_per_s * point.plan.num_devices / smallest.plan.num_devices for point in points]
    panels[0].plot([point.plan.num_devices for point in points], ideal, ":", color="grey", label="linear")
    for axes in (panels[0], panels[2]):
        axes.set_yscale("log")
    finish_figure(figure, panels, "devices")
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=110)
