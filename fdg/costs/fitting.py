"""Fits, to timed jobs, the parameters of the cost model that no microbenchmark measures.

These are the overheads (`overheads`) and the share of time that remains after XLA's fusion
(`program_time.SHARES_AFTER_FUSION`). They are fitted together, because each can explain the other's errors.
The residual of a job is the logarithm of predicted divided by measured time; the loss is a soft L1. A weak
prior at known values constrains parameters that few jobs depend on.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fdg.costs.hardware import Cluster
from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.costs.prediction import predict
from fdg.costs.program_time import CLASSES, SHARES_AFTER_FUSION, seconds_of
from fdg.costs.program_work import program_works
from fdg.placing.plans import Plan

_LARGE_ERROR = 0.2  # relative errors above this count less than quadratically (soft L1)
# A parameter that differs from its prior value by a factor of e counts like this relative error of one job.
_PRIOR_WEIGHT = 0.2
_MAX_LOG_RATIO = 2.5  # the bound of log(parameter / prior value)
_FRACTION_FIELDS = ("divided", "shared")  # fields of `Overheads` that are at most 1
_SIGNIFICANT_DIGITS = 3  # of fitted parameters


class JobSample(NamedTuple):
    """A timed job: its plan, its cluster, and measured seconds per iteration."""

    plan: Plan
    cluster: Cluster
    seconds: float

    def cluster_with(self, shares: Mapping[str, float], overheads: Overheads) -> Cluster:
        """The cluster, with fitted shares after fusion and overheads."""
        kind = dataclasses.replace(self.cluster.kind, shares_after_fusion=shares, overheads=overheads)
        return dataclasses.replace(self.cluster, kind=kind)

    @property
    def classes(self) -> set[str]:
        """The classes of operations in the plan's programs."""
        works = [program.work for program in program_works(self.plan, self.cluster)]
        return set().union(*(seconds_of(work, self.cluster.kind).by_class for work in works))


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The result of a fit."""

    shares_after_fusion: Mapping[str, float]  # by class of operation, as `program_time.SHARES_AFTER_FUSION`
    overheads: Overheads  # as `overheads.OVERHEADS`
    before: float  # the median relative error of predictions with the prior values
    after: float  # the median relative error with the fitted parameters


def fit_overheads(samples: Sequence[JobSample], prior_weight: float = _PRIOR_WEIGHT) -> Fitted:
    """Fits `shares_after_fusion` and `overheads` to samples of one platform.

    `samples` are jobs of one machine or several, each with its machine's rates. The prior values are those of
    the platform (`prior_weight`: see `_PRIOR_WEIGHT`). Parameters whose prior value is zero stay zero.
    """
    from scipy.optimize import least_squares  # imported here, since it is slow

    platform = samples[0].cluster.kind.platform
    shares, overheads = SHARES_AFTER_FUSION[platform], OVERHEADS[platform]
    used_classes = set().union(*(sample.classes for sample in samples))
    classes = [name for name in CLASSES if name in used_classes and shares[name] > 0]
    fields = [field.name for field in dataclasses.fields(overheads) if getattr(overheads, field.name) > 0]
    prior_logs = np.log([shares[name] for name in classes] + [getattr(overheads, name) for name in fields])
    measured = np.array([sample.seconds for sample in samples])

    def parameters(logs: Any) -> tuple[Mapping[str, float], Overheads]:
        values = [float(x) for x in np.exp(logs)]
        return (
            {**shares, **dict(zip(classes, values[: len(classes)], strict=True))},
            dataclasses.replace(overheads, **dict(zip(fields, values[len(classes) :], strict=True))),
        )

    def errors(logs: Any) -> Any:
        values = parameters(logs)
        predicted = [predict(sample.plan, sample.cluster_with(*values)).seconds for sample in samples]
        return np.log(np.array(predicted) / measured)

    def residuals(logs: Any) -> Any:
        # `least_squares` squares the residuals: a soft L1 loss for jobs, and a quadratic one for the prior.
        scaled = errors(logs) / _LARGE_ERROR
        soft = np.sign(scaled) * _LARGE_ERROR * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
        return np.concatenate([soft, prior_weight * (logs - prior_logs)])

    upper_bounds = prior_logs + _MAX_LOG_RATIO
    upper_bounds[[i for i, name in enumerate(classes + fields) if name in _FRACTION_FIELDS]] = 0.0  # log(1)
    initial = np.minimum(prior_logs, upper_bounds - 1e-3)
    solution = least_squares(
        residuals, initial, bounds=(prior_logs - _MAX_LOG_RATIO, upper_bounds), diff_step=0.03, max_nfev=20
    )
    rounded = np.log([float(f"{math.exp(x):.{_SIGNIFICANT_DIGITS}g}") for x in solution.x])
    before, after = (float(np.median(abs(np.expm1(errors(x))))) for x in (prior_logs, rounded))
    return Fitted(*parameters(rounded), before, after)
