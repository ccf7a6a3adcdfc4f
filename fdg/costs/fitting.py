"""Fits the non-rate parameters to timed jobs: shares of operations after fusion, and overheads.

They are fitted together, because each can explain the other's errors: least squares of the logarithm of
predicted by measured time with a soft L1 loss, and a weak prior at the known values for parameters that few
jobs constrain.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fdg.costs.hardware import Cluster
from fdg.costs.loads import loads
from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.costs.prediction import predict
from fdg.costs.program_time import CLASSES, JOINED, seconds_of
from fdg.placing.plans import Plan

_LARGE = 0.2  # larger errors count less
_KNOWN = 0.2  # weight of the known values: a factor of e from them counts like this error in one job
_FURTHEST = 2.5  # largest logarithm of the ratio to the known value
_SHARES = ("divided", "shared")  # at most 1
_DIGITS = 3


class JobSample(NamedTuple):
    """A timed job: its plan, its cluster, and seconds of an iteration."""

    plan: Plan
    cluster: Cluster
    seconds: float

    def on(self, joined: Mapping[str, float], overheads: Overheads) -> Cluster:
        """The cluster with other fitted parameters."""
        kind = dataclasses.replace(self.cluster.kind, joined=joined, overheads=overheads)
        return dataclasses.replace(self.cluster, kind=kind)

    @property
    def classes(self) -> set[str]:
        """The classes of operations in the plan's programs."""
        works = [load.work for load in loads(self.plan, self.cluster.target)]
        return set().union(*(seconds_of(work, self.cluster.kind).by_class for work in works))


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The result of a fit."""

    joined: Mapping[str, float]  # by class of operation: see `program_time.JOINED`
    overheads: Overheads  # see `overheads.OVERHEADS`
    before: float  # median relative error of the samples
    after: float


def fit(
    samples: Sequence[JobSample],
    joined: Mapping[str, float] | None = None,
    overheads: Overheads | None = None,
    known: float = _KNOWN,
) -> Fitted:
    """Fits both to samples of one platform.

    `samples` are jobs of at least one machine, each with its rates. `joined` and `overheads` are prior
    values, of weight `known`; None for those of the platform. Zeros stay zero.
    """
    from scipy.optimize import least_squares  # here, since it takes a while to import

    platform = samples[0].cluster.kind.platform
    joined = JOINED[platform] if joined is None else joined
    overheads = OVERHEADS[platform] if overheads is None else overheads
    counted = set().union(*(sample.classes for sample in samples))
    classes = [name for name in CLASSES if name in counted and joined[name] > 0]
    fields = [field.name for field in dataclasses.fields(overheads) if getattr(overheads, field.name) > 0]
    start = np.log([joined[name] for name in classes] + [getattr(overheads, name) for name in fields])
    measured = np.array([sample.seconds for sample in samples])

    def named(logs: Any) -> tuple[Mapping[str, float], Overheads]:
        values = [float(x) for x in np.exp(logs)]
        return (
            {**joined, **dict(zip(classes, values[: len(classes)], strict=True))},
            dataclasses.replace(overheads, **dict(zip(fields, values[len(classes) :], strict=True))),
        )

    def errors(logs: Any) -> Any:
        found = named(logs)
        predicted = [predict(sample.plan, sample.on(*found)).seconds for sample in samples]
        return np.log(np.array(predicted) / measured)

    def residuals(logs: Any) -> Any:
        # The loss is robust for jobs, but not for known values.
        off = errors(logs) / _LARGE
        soft = np.sign(off) * _LARGE * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([soft, known * (logs - start)])

    highest = start + _FURTHEST
    highest[[i for i, name in enumerate(classes + fields) if name in _SHARES]] = 0.0
    begun = np.minimum(start, highest - 1e-3)
    found = least_squares(residuals, begun, bounds=(start - _FURTHEST, highest), diff_step=0.03, max_nfev=20)
    rounded = np.log([float(f"{math.exp(x):.{_DIGITS}g}") for x in found.x])
    before, after = (float(np.median(abs(np.expm1(errors(x))))) for x in (start, rounded))
    return Fitted(*named(rounded), before, after)
