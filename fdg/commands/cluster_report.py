"""What a plan gives on a cluster: throughput, cost, and what stragglers and failures leave of it."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax

from fdg.commands import goodput
from fdg.costs.hardware import Cluster
from fdg.costs.prediction import Prediction, predict
from fdg.placing.plans import Plan
from fdg.showing.plan_outline import idle_notes
from fdg.showing.words import duration, quantity, table

_WORK = 200.0  # times the mean time between failures: the work of a simulated job


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan on a cluster.

    Attributes:
      devices: given to the plan.
      policy: that made it, as text.
      prediction: of an iteration where all devices are alike.
      straggling: of an iteration with stragglers, in times of that; 1 without.
      steps_per_s: environment steps a second, stragglers counted, failures not.
      job: how it fails.
      save_every: (Young, Daly, best of the simulated) seconds of work between checkpoints.
      goodput: the part of the time that is work which is kept: (by Daly's formula, simulated).
      price_per_million: of a million steps, failures counted.
      memory: estimated peak on a device of each group, in bytes (`Plan.memory`).
      idle: devices that the placement does not use, and why: a sentence each.
    """

    devices: int
    policy: str
    prediction: Prediction
    straggling: float
    steps_per_s: float
    job: goodput.Failing
    save_every: tuple[float, float, float]
    goodput: tuple[float, float]
    price_per_million: float
    memory: dict[str, int]
    idle: tuple[str, ...] = ()


def point(plan: Plan, cluster: Cluster, steps: int) -> Point:
    """Predicts a plan, with stragglers and failures.

    Args:
      plan: on as many devices as the cluster has.
      cluster: to run on.
      steps: environment steps of an iteration, of all agents together.
    """
    alike = predict(plan, dataclasses.replace(cluster, straggling=0.0))
    slower = 1.0
    if cluster.straggling:
        slower = predict(plan, cluster).seconds / alike.seconds
    state = plan.graph.of_all(plan.graph.state)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    job = goodput.failing(cluster, alike.devices, state_bytes)
    every, kept = _saving(job)
    per_second = steps / (alike.seconds * slower)
    price = cluster.price * plan.num_devices / 3600 / (per_second * kept[1]) * 1e6
    return Point(
        plan.num_devices,
        str(plan.policy),
        alike,
        slower,
        per_second,
        job,
        every,
        kept,
        price,
        dict(plan.memory),
        tuple(idle_notes(plan)),
    )


def _saving(job: goodput.Failing) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """How often to save, and what is kept then."""
    if math.isinf(job.between):
        return (math.inf, math.inf, math.inf), (1.0, 1.0)
    young, daly = goodput.young(job), goodput.daly(job)
    tried = [daly * by for by in (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8) if daly > 0] or [1.0]
    best, kept = goodput.best_interval(job, tried, _WORK * job.between)
    return (young, daly, best), (goodput.expected_goodput(job, daly), kept)


def report(points: Sequence[Point], price: bool) -> str:
    """The points as a table, with what fails below it."""
    header = [
        "devices",
        "policy",
        "iteration",
        "steps/s",
        "scaling",
        "idle",
        "between hosts",
        "memory",
        "most of it is",
    ]
    rows = []
    for one in points:
        first = next(
            other for other in points if other.policy.partition("(")[0] == one.policy.partition("(")[0]
        )
        scaling = one.steps_per_s / one.devices / (first.steps_per_s / first.devices)
        bound, whole = one.prediction.bound, one.prediction.seconds or 1.0
        rows.append(
            (
                str(one.devices),
                one.policy,
                duration(one.prediction.seconds * one.straggling),
                quantity(one.steps_per_s),
                f"{scaling:.0%}",
                ", ".join(f"{group} {share:.0%}" for group, share in one.prediction.idle.items()),
                quantity(one.prediction.between, "B"),
                quantity(max(one.memory.values(), default=0), "B"),
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
            lost.append(
                (str(one.devices), one.policy, slower, duration(one.job.between), *every, *kept, cost)
            )
        lines += ["", *table(header, lost, numeric=(0, *range(2, 10)))]
    unused = [f"{one.policy} on {one.devices}: {line}" for one in points for line in one.idle]
    lines += [*([""] if unused else []), *unused]
    notes = dict.fromkeys(note for one in points for note in one.prediction.notes)
    return "\n".join([*lines, *([""] if notes else []), *notes])


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe & Ito


def draw_sweep(points: Sequence[Point], path: Path, title: str) -> None:
    """Writes a PNG: a line for each policy."""
    from matplotlib.figure import Figure

    lines: dict[str, list[Point]] = {}
    for one in points:
        lines.setdefault(one.policy.partition("(")[0], []).append(one)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    figure.suptitle(title)
    for colour, (name, some) in zip(COLOURS * 9, lines.items(), strict=False):
        devices = [one.devices for one in some]
        axes[0, 0].plot(devices, [one.steps_per_s for one in some], "o-", color=colour, label=name)
        idle = [100 * max(one.prediction.idle.values(), default=0.0) for one in some]
        axes[0, 1].plot(devices, idle, "o-", color=colour)
        axes[1, 0].plot(
            devices,
            [max(one.prediction.inside + one.prediction.between, 1) for one in some],
            "o-",
            color=colour,
        )
        axes[1, 1].plot(devices, [one.goodput[1] / one.straggling * 100 for one in some], "o-", color=colour)
    first = points[0]
    ideal = [first.steps_per_s * one.devices / first.devices for one in points]
    axes[0, 0].plot([one.devices for one in points], ideal, ":", color="grey", label="linear")
    axes[0, 0].legend()
    labels = ("steps/s", "idle time of the idlest group, %", "bytes over links, an iteration", "goodput, %")
    for axis, label in zip(axes.flat, labels, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("devices")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    for axis in (axes[0, 0], axes[1, 0]):
        axis.set_yscale("log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
