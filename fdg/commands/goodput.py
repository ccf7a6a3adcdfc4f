"""The cost of failures: the best checkpoint interval, and goodput (the fraction of time that is useful work).

A job on N devices fails at N times the rate of one. After a failure it loads the last checkpoint, and repeats
the work since then. The best interval is known to first order (Young 1974, "A First Order
Approximation to the Optimum Checkpoint Interval") and to higher order (Daly 2006, "A Higher Order Estimate
of the Optimum Checkpoint Interval for Restart Dumps", equation 37); `simulate` draws failures, and needs
neither.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from fdg.costs.hardware import Cluster
from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Failing:
    """A job that may fail.

    Attributes:
      between: mean seconds from failure to failure of the whole job; infinite for none.
      save: seconds that saving takes, in which nothing else is done.
      restart: seconds from a failure until the last checkpoint is loaded.
    """

    between: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        for name in ("between", "save", "restart"):
            value = getattr(self, name)
            if not value >= 0 or (name == "between" and value == 0):
                least = "above" if name == "between" else "of at least"
                raise FdgError(f"failures: {name} = {value}: give seconds {least} 0")


def failing(cluster: Cluster, devices: int, state_bytes: float) -> Failing:
    """A job on so many devices of a cluster, whose state is so large."""
    rate = cluster.failures * devices / 3600
    between = 1 / rate if rate else math.inf
    return Failing(between, state_bytes / cluster.storage, cluster.restart)


def young(job: Failing) -> float:
    """The best seconds of work between two checkpoints, to first order.

    >>> young(Failing(between=86_400, save=60, restart=300))
    3219.9...
    """
    return math.sqrt(2 * job.save * job.between)


def daly(job: Failing) -> float:
    """The same to higher order.

    >>> daly(Failing(between=86_400, save=60, restart=300))
    3180.06...
    """
    if math.isinf(job.between):
        return math.inf
    if job.save >= 2 * job.between:
        return job.between
    part = job.save / (2 * job.between)
    return math.sqrt(2 * job.save * job.between) * (1 + math.sqrt(part) / 3 + part / 9) - job.save


def expected_goodput(job: Failing, interval: float) -> float:
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


def simulate(job: Failing, interval: float, work: float, seed: int = 0) -> float:
    """Goodput in a simulation with randomly drawn failures.

    Args:
      job: the job, with its rates.
      interval: seconds of work between checkpoints.
      work: seconds of work to be done in all.
      seed: of the failures.
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


def best_interval(job: Failing, intervals: Sequence[float], work: float) -> tuple[float, float]:
    """The interval with the highest mean goodput of eight simulations, and that goodput."""
    found = {
        interval: float(np.mean([simulate(job, interval, work, seed) for seed in range(8)]))
        for interval in intervals
    }
    best = max(found, key=lambda interval: found[interval])
    return best, found[best]
