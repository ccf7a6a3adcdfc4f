"""Chooses a distribution policy: predicts each candidate's plan, and takes the fastest that fits into memory.

`policies.auto` lists the candidates: policies and the sizes of their groups. Nothing is run or allocated.
"""

import bisect
import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fdg.costs.hardware import Cluster
from fdg.costs.prediction import Prediction, predict
from fdg.errors import FdgError, PlanError
from fdg.garbage import infrequent_gc
from fdg.identity_cache import IdentityCache
from fdg.placing.place import place
from fdg.placing.plans import Plan
from fdg.placing.staleness import micro_batches
from fdg.showing.words import clip, duration, quantity, table
from fdg.tracing.graph import FDG

_MAX_ROWS = 12  # rows of a printed table
_FIRST_TRIALS = 2  # the number of candidates of each kind (see `_predict_rows`) that are predicted first
_FAR_RATIO = 1.5  # a kind is dropped if its first trials take longer than this factor times the best
_MAX_LAG = 2  # in iterations; enough for groups in a chain (generate, judge, train) to overlap fully
TIE = 1.05  # predictions within this ratio are a tie
GraphOf = Callable[[tuple[tuple[str, Any], ...]], tuple[Any, FDG]]  # changed fields -> algorithm, graph
DevicesOf = Callable[[int], Sequence[Any] | int]  # a number of devices -> what `place` takes as `devices`
# `Row.refused` of a candidate that could be feasible, but is not predicted.
_SKIPPED = "skipped: others of its kind are faster, or all are far slower than the best"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy on a number of devices."""

    policy: Any  # the policy, with the sizes of its groups
    devices: int  # the number of devices that the policy uses, the first in the list
    variant: tuple[tuple[str, Any], ...] = ()  # changes of the algorithm: (field, new value)
    required_flag: str = ""  # the flag that allows this candidate, if it changes results; else ""

    def __str__(self) -> str:
        changed = "".join(f", {name}={value}" for name, value in self.variant)
        return f"{self.policy}{changed}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate with its prediction, or the reason why it has none."""

    candidate: Candidate
    prediction: Prediction | None  # None if it is not feasible, or was skipped
    refused: str = ""  # why there is no prediction, in one line: infeasible, or skipped (`_SKIPPED`); else ""
    measured: float | None = None  # measured seconds per iteration; None if it was not timed

    @property
    def seconds(self) -> float:
        """Seconds per iteration, measured or else predicted; infinite if neither."""
        if self.measured is not None:
            return self.measured
        return self.prediction.seconds if self.prediction is not None else float("inf")

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Seconds, and the numbers of groups, devices and micro-batches of lag, for `break_ties`."""
        groups = 0 if self.prediction is None else len(self.prediction.busy)
        return self.seconds, groups, self.candidate.devices, _staleness_and_lag(self.candidate.policy)[1]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen candidate and the others."""

    algorithm: Any  # the algorithm, with the chosen candidate's changes
    graph: FDG
    rows: tuple[Row, ...]  # all candidates: the chosen one, then the others by time, infeasible ones last
    search_seconds: float  # the seconds that the choice itself took
    cluster: Cluster  # the devices for which times were predicted

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate."""
        return self.rows[0].candidate

    @property
    def policy(self) -> Any:
        """The chosen policy."""
        return self.candidate.policy

    @property
    def devices(self) -> int:
        """The number of devices to use."""
        return self.candidate.devices

    @property
    def prediction(self) -> Prediction:
        """The prediction of an iteration."""
        assert self.rows[0].prediction is not None
        return self.rows[0].prediction

    @property
    def seconds(self) -> float:
        """Predicted seconds per iteration."""
        return self.prediction.seconds

    @property
    def reason(self) -> str:
        """Why this candidate was chosen, in one line."""
        feasible = feasible_rows(self.rows)
        best, *others = feasible
        fastest = min(others, key=lambda row: row.seconds, default=best)
        slower = next((row for row in others if row.seconds > best.seconds), None)
        comparison = ""
        if fastest.seconds < best.seconds:
            comparison = (
                f", within {TIE - 1:.0%} of {fastest.candidate} on {_size(fastest)} at"
                f" {duration(fastest.seconds)}, which has more groups, devices or lag"
            )
        elif slower is not None:
            comparison = (
                f", {slower.seconds / best.seconds:.2f} x as fast as {slower.candidate} on {_size(slower)}"
            )
        basis = "measured" if best.measured is not None else "predicted"
        return (
            f"{best.candidate} on {_size(best)}: {duration(best.seconds)} per iteration {basis}{comparison};"
            f" the largest part is {self.prediction.largest_part}"
        )

    @property
    def table(self) -> str:
        """A table of candidates with predicted times and the largest part of each, then the reason."""
        measured = any(row.measured is not None for row in self.rows)
        header = ("policy", "devices", "predicted", *["measured"] * measured, "idle", "largest part", "")
        good = [row for row in self.rows if row.prediction is not None]
        skipped = sum(row.refused == _SKIPPED for row in self.rows)
        refusals = collections.Counter(row.refused for row in self.rows if row.refused not in ("", _SKIPPED))
        lines = [
            f"{len(self.rows)} candidates in {self.search_seconds:.1f} s, {len(good)} of them predicted,"
            f" {skipped} skipped (others of their kind are faster, or all are far slower than the best),"
            f" {len(self.rows) - len(good) - skipped} not feasible;"
            f" {self.cluster.note or 'rates: those of ' + self.cluster.kind.name}"
        ]
        lines += table(header, [_cells(row, measured) for row in good[:_MAX_ROWS]], range(1, 3 + measured))
        if len(good) > _MAX_ROWS:
            lines.append(f"  ... and {len(good) - _MAX_ROWS} more, up to {duration(good[-1].seconds)}")
        for reason, count in list(refusals.items())[:3]:
            lines.append(f"  not feasible ({count}): {clip(reason, 140)}")
        lines += [f"  {note}" for note in self.prediction.notes if note != self.cluster.note]
        return "\n".join([*lines, "", f"chosen: {self.reason}"])


def _size(row: Row) -> str:
    """The number of devices as text."""
    return f"{row.candidate.devices} device{'s' if row.candidate.devices != 1 else ''}"


def _cells(row: Row, has_measured: bool) -> tuple[str, ...]:
    """The cells of a row of `Choice.table`."""
    assert row.prediction is not None
    idle = max(row.prediction.idle.values(), default=0.0)
    times = [duration(row.prediction.seconds)]
    if has_measured:
        times.append("" if row.measured is None else duration(row.measured))
    candidate, part = row.candidate, row.prediction.largest_part_text
    return (str(candidate), str(candidate.devices), *times, f"{idle:.0%}", part, candidate.required_flag)


def feasible_rows(rows: Iterable[Row]) -> list[Any]:
    """The rows that are feasible and allowed."""
    return [row for row in rows if row.prediction is not None and not row.candidate.required_flag]


@infrequent_gc()
def choose(
    candidates: Sequence[Candidate],
    cluster: Cluster,
    graph_of: GraphOf,
    devices_of: DevicesOf = int,
    more_candidates: Callable[[Sequence[Row]], Sequence[Candidate]] | None = None,
) -> Choice:
    """Predicts the candidates on a cluster; takes the fastest feasible and allowed one (ties: `break_ties`).

    Of candidates with equal placements, only the first is predicted. `graph_of` maps changed fields to the
    algorithm and its graph; `devices_of` maps a number of devices to those for `place`. `more_candidates`
    maps the feasible rows to further candidates. Candidates that need a flag are reported, but never chosen.
    """
    start_time = time.perf_counter()

    def predict_row(candidate: Candidate) -> Row:
        try:
            _, graph = graph_of(candidate.variant)
            devices = devices_of(candidate.devices)
            plan = _cached_plan(graph, candidate.policy, devices)
            idle = None if isinstance(devices, int) else plan.idle_process(devices)
            if idle is not None:
                raise PlanError(f"{candidate.policy} leaves process {idle} without work")
            prediction = predict(plan, cluster)
            check_memory(plan, cluster)
            return Row(candidate, prediction)
        except FdgError as error:
            return Row(candidate, None, str(error))

    rows = sorted(_predict_rows(_distinct(candidates, cluster), predict_row), key=lambda row: row.seconds)
    if more_candidates is not None:
        rows += [predict_row(candidate) for candidate in more_candidates(feasible_rows(rows))]
        rows.sort(key=lambda row: row.seconds)
    feasible = feasible_rows(rows)
    if not feasible:
        reason = next((row.refused for row in rows if row.refused), "there is no candidate")
        raise PlanError(f"no policy is feasible: {reason}")
    reliable = [row for row in feasible if row.prediction.has_known_collectives] or feasible
    best = reliable[break_ties([row.rank for row in reliable])]  # estimated collectives lose to known ones
    rows = [best, *(row for row in rows if row is not best)]
    return Choice(*graph_of(best.candidate.variant), tuple(rows), time.perf_counter() - start_time, cluster)


def break_ties(candidates: Sequence[tuple[float, *tuple[int, ...]]]) -> int:
    """The index of the best candidate; each is a tuple of seconds, groups, devices and lag (`Row.rank`).

    Among the candidates within `TIE` of the fastest, the best has the fewest groups. If several have equally
    many groups, the best has the fewest devices, and then the smallest lag.
    """
    best = min(seconds for seconds, *_ in candidates)
    near = [i for i, (seconds, *_) in enumerate(candidates) if seconds <= TIE * best]
    return min(near, key=lambda i: (*candidates[i][1:], candidates[i][0]))


def _predict_rows(candidates: Iterable[Candidate], predict_row: Callable[[Candidate], Row]) -> list[Row]:
    """Predicts some candidates of each kind (policy, staleness, devices, variant), then others near the best.

    A kind is dropped if its first trials take more than `_FAR_RATIO` times the best. For other kinds, group
    sizes are predicted until both neighbours of the best size are slower. Lags of a kind are bisected.
    """
    kinds: dict[Any, _KindRows] = collections.defaultdict(lambda: _KindRows(predict_row))
    for candidate in sorted(candidates, key=lambda candidate: _staleness_and_lag(candidate.policy)[1]):
        policy = candidate.policy
        kind = type(policy), _staleness_and_lag(policy)[0], candidate.devices, candidate.variant
        kinds[kind].candidates.append(candidate)
    for rows in kinds.values():
        size = len(rows.candidates)
        for i in dict.fromkeys([0, size // 2, size - 1, *range(size)]):
            if sum(row.prediction is not None for row in rows.values()) < _FIRST_TRIALS:
                rows.predict(i)
    predicted = [row for rows in kinds.values() for row in rows.values()]
    best = min((row.seconds for row in feasible_rows(predicted)), default=float("inf"))
    for rows in kinds.values():
        if len({_staleness_and_lag(candidate.policy) for candidate in rows.candidates}) > 1:
            # Bisects for the smallest lag within `TIE` of the best (a longer lag is never slower), to predict
            # the lags on the way: `rows` keeps them, and the index is not needed.
            size = len(rows.candidates)
            limit = TIE * min(rows.predict(i).seconds for i in (0, size // 2, size - 1))
            bisect.bisect_left(range(size), True, key=lambda i: rows.predict(i).seconds <= limit)
        while min(row.seconds for row in rows.values()) <= _FAR_RATIO * best and _try_neighbours(rows):
            pass
        for i, candidate in enumerate(rows.candidates):
            rows.setdefault(i, Row(candidate, None, _SKIPPED))
    return [row for rows in kinds.values() for row in rows.values()]


class _KindRows(dict[int, Row]):
    """The rows of a kind's predicted candidates, by the position of the candidate in `candidates`."""

    def __init__(self, predict_row: Callable[[Candidate], Row]):
        self.candidates: list[Candidate] = []  # all candidates of the kind
        self._predict_row = predict_row

    def predict(self, i: int) -> Row:
        """The row of `candidates[i]`, predicted at the first call."""
        if i not in self:
            self[i] = self._predict_row(self.candidates[i])
        return self[i]


def _try_neighbours(rows: _KindRows) -> bool:
    """Predicts the next feasible candidate on each side of the best; returns whether any was new."""
    nearest = min(rows, key=lambda i: rows[i].seconds)
    count_before = len(rows)
    for side in (range(nearest - 1, -1, -1), range(nearest + 1, len(rows.candidates))):
        any(rows.predict(i).prediction is not None for i in side)  # up to the first feasible one
    return len(rows) > count_before


def lags(graph: FDG, policy: Any) -> list[Any]:
    """Copies of the policy, one with each lag that `choose` may select, in order."""
    trips = micro_batches(graph)
    if not trips:
        raise FdgError(
            "lag='auto': no scan calls the actors, so an iteration is one micro-batch: use staleness, or give"
            " two micro_batches or more"
        )
    return [dataclasses.replace(policy, lag=lag) for lag in range(_MAX_LAG * trips + 1)]


def _staleness_and_lag(policy: Any) -> tuple[int, int]:
    """A policy's staleness and lag; 0 for a field that it lacks."""
    return getattr(policy, "staleness", 0), getattr(policy, "lag", 0)


def _distinct(candidates: Iterable[Candidate], cluster: Cluster) -> list[Candidate]:
    """Drops candidates with the same placement as an earlier one."""
    seen: set[Any] = set()
    distinct = []
    for candidate in candidates:
        try:
            placement = candidate.policy.place(cluster.platforms(candidate.devices))
        except PlanError:
            distinct.append(candidate)
            continue
        groups = frozenset(
            (role, group.devices, group.model, group.parameters) for role, group in placement.items()
        )
        key = groups, candidate.variant, *_staleness_and_lag(candidate.policy)
        if key not in seen:
            seen.add(key)
            distinct.append(candidate)
    return distinct


_PLANS: IdentityCache[Plan] = IdentityCache(max_entries=512)


def _cached_plan(graph: FDG, policy: Any, devices: Sequence[Any] | int) -> Plan:
    """Places a graph. The plan is cached: `fdg plan --sensitivity` predicts it again with other rates."""
    if not isinstance(devices, int):
        return place(graph, policy, devices)
    return _PLANS(graph.jaxpr, (graph.agents, policy, devices), lambda: place(graph, policy, devices))


def check_memory(plan: Plan, cluster: Cluster) -> None:
    """Raises `PlanError` if a plan's estimated memory (`Plan.memory`) does not fit into its devices."""
    kinds = {group.name: cluster.part_of(group.devices).kind for group in plan.groups}
    for group, needed in plan.memory:
        kind = kinds[group]
        if needed > (capacity := kind.rate("memory_bytes")):
            raise PlanError(
                f"{plan.policy}: each device of its {group} needs about {quantity(needed, 'B')} of memory,"
                f" and {kind.name} has {quantity(capacity, 'B')}: use more devices, a smaller batch,"
                f" or --parameters fsdp"
            )
