"""Chooses a lag: the smallest one with a predicted time near the best."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fdg.costs.choosing import TIE
from fdg.costs.hardware import Cluster
from fdg.costs.prediction import Prediction, predict
from fdg.errors import FdgError
from fdg.placing.place import place
from fdg.placing.staleness import micro_batches
from fdg.showing.words import table
from fdg.tracing.graph import FDG

_MOST = 2  # iterations: groups in a row (generating, judging, training) overlap wholly by then


@dataclasses.dataclass(frozen=True)
class LagChoice:
    """A lag, with the candidates."""

    lag: int  # in micro-batches
    micro_batches: int  # of an iteration
    predictions: dict[int, Prediction]  # by lag

    @property
    def table(self) -> str:
        """A table of the candidates with predicted times."""
        best = min(one.seconds for one in self.predictions.values())
        rows = [
            (str(lag), f"{one.seconds * 1e3:.3g} ms", f"{one.seconds / best:.2f}", _idle(one))
            for lag, one in sorted(self.predictions.items())
        ]
        header = ("lag", "predicted", "of the best", "idle")
        reason = (
            f"lag: {self.lag} of {self.micro_batches} micro-batches an iteration, the smallest within"
            f" {TIE - 1:.0%} of the best prediction"
        )
        return "\n".join([*table(header, rows, range(3)), reason])


def _idle(one: Prediction) -> str:
    return ", ".join(f"{group} {share:.0%}" for group, share in one.idle.items())


def quickest_lag(
    graph: FDG, policy: Any, devices: int | Sequence[Any], cluster: Cluster, num_seeds: int | None = None
) -> LagChoice:
    """The smallest lag with a predicted time of at most 5% above that of the best lag.

    A longer lag never takes longer, so it is found by bisection. `policy` has a field `lag` (its value is
    ignored) and a staleness of 0.
    """
    if not any(field.name == "lag" for field in dataclasses.fields(policy)):
        raise FdgError(f"lag: {type(policy).__name__} has none: its actors always have the newest parameters")
    trips = micro_batches(graph)
    if not trips:
        raise FdgError(
            "lag='auto': no scan calls the actors, so an iteration is one micro-batch: use staleness, or two"
            " micro_batches or more"
        )
    found: dict[int, Prediction] = {}

    def seconds(lag: int) -> float:
        if lag not in found:
            plan = place(graph, dataclasses.replace(policy, lag=lag), devices, num_seeds)
            found[lag] = predict(plan, cluster)
        return found[lag].seconds

    most = _MOST * trips
    enough = TIE * min(seconds(lag) for lag in (0, trips, most))
    below, lag = -1, next(lag for lag in (0, trips, most) if seconds(lag) <= enough)
    while lag - below > 1:
        middle = (below + lag) // 2
        below, lag = (below, middle) if seconds(middle) <= enough else (middle, lag)
    return LagChoice(lag, trips, found)
