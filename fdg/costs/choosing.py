"""Chooses among plans: predicts each, refuses those that do not fit, and takes the fastest.

Runs and allocates nothing. `policies.auto` lists the policies and the sizes of their groups.
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

_SHOWN = 12  # rows of a printed table
_TRIED = 2  # candidates of each kind that are tried first
_FAR = 1.5  # the others of a kind are tried if one of these is within this factor of the best
_MOST_LAG = 2  # iterations: groups in a row (generating, judging, training) overlap wholly by then
TIE = 1.05  # predictions within this ratio are a tie
GraphOf = Callable[[tuple[tuple[str, Any], ...]], tuple[Any, FDG]]  # of an algorithm with changed fields
DevicesOf = Callable[[int], Sequence[Any] | int]  # a number of devices -> what `place` takes
_LEFT_OUT = "left out: other groups of its kind are quicker, or far off"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate: a policy on a number of devices."""

    policy: Any  # the policy with the sizes of its groups
    devices: int  # the number of devices, the first ones
    variant: tuple[tuple[str, Any], ...] = ()  # changed fields of the algorithm by name
    asks: str = ""  # the flag that would allow it, if it changes results and is not allowed; else ""

    def __str__(self) -> str:
        changed = "".join(f", {name}={value}" for name, value in self.variant)
        return f"{self.policy}{changed}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate with its prediction, or why it cannot be carried out."""

    candidate: Candidate
    prediction: Prediction | None  # None if it cannot be carried out
    refused: str = ""  # why, in one line; "" if it can
    measured: float | None = None  # measured seconds of an iteration, or None

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, measured or else predicted; infinite if it cannot be carried out."""
        if self.measured is not None:
            return self.measured
        return self.prediction.seconds if self.prediction is not None else float("inf")

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Seconds, groups, devices and lag, for `preferred`."""
        groups = 0 if self.prediction is None else len(self.prediction.busy)
        return self.seconds, groups, self.candidate.devices, _delays(self.candidate.policy)[1]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen candidate and the others."""

    algorithm: Any  # the algorithm, with the allowed changes
    graph: FDG
    rows: tuple[Row, ...]  # all candidates: the chosen one, then by time, refused ones last
    took: float  # seconds that choosing took
    cluster: Cluster

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
        """Predicted seconds of an iteration."""
        return self.prediction.seconds

    @property
    def reason(self) -> str:
        """The reason in one line."""
        taken = _takeable(self.rows)
        best, *others = taken
        fastest = min(others, key=lambda row: row.seconds, default=best)
        other = next((row for row in others if row.seconds > best.seconds), None)
        than = ""
        if fastest.seconds < best.seconds:
            than = (
                f", within {TIE - 1:.0%} of {fastest.candidate} on {_on(fastest)} at"
                f" {duration(fastest.seconds)}, which has more groups, devices or lag"
            )
        elif other is not None:
            than = f", {other.seconds / best.seconds:.2f} times as quick as {other.candidate} on {_on(other)}"
        how = "measured" if best.measured is not None else "predicted"
        return (
            f"{best.candidate} on {_on(best)}: {duration(best.seconds)} an iteration {how}{than};"
            f" most of it is {self.prediction.bound}"
        )

    @property
    def table(self) -> str:
        """A table of candidates with predicted times and what bounds each, and the reason."""
        measured = any(row.measured is not None for row in self.rows)
        header = ("policy", "devices", "predicted", *["measured"] * measured, "idle", "most of it is", "")
        good = [row for row in self.rows if row.prediction is not None]
        left = sum(row.refused == _LEFT_OUT for row in self.rows)
        reasons = collections.Counter(row.refused for row in self.rows if row.refused not in ("", _LEFT_OUT))
        lines = [
            f"{len(self.rows)} candidates in {self.took:.1f} s, {len(good)} of them predicted,"
            f" {left} left out for others of their kind are quicker, or all far off,"
            f" {len(self.rows) - len(good) - left} not feasible;"
            f" {self.cluster.note or 'rates: of ' + self.cluster.kind.name}"
        ]
        lines += table(header, [_cells(row, measured) for row in good[:_SHOWN]], range(1, 3 + measured))
        if len(good) > _SHOWN:
            lines.append(f"  ... and {len(good) - _SHOWN} more, up to {duration(good[-1].seconds)}")
        for reason, count in list(reasons.items())[:3]:
            lines.append(f"  not feasible ({count}): {clip(reason, 140)}")
        return "\n".join([*lines, "", f"chosen: {self.reason}"])


def _on(row: Row) -> str:
    return f"{row.candidate.devices} device{'s' if row.candidate.devices != 1 else ''}"


def _cells(row: Row, measured: bool) -> tuple[str, ...]:
    assert row.prediction is not None
    idle = max(row.prediction.idle.values(), default=0.0)
    times = [duration(row.prediction.seconds)]
    if measured:
        times.append("" if row.measured is None else duration(row.measured))
    whole = row.prediction.seconds or 1.0
    bound = f"{row.prediction.bound} ({row.prediction.shares.get(row.prediction.bound, 0.0) / whole:.0%})"
    return (str(row.candidate), str(row.candidate.devices), *times, f"{idle:.0%}", bound, row.candidate.asks)


def _takeable(rows: Iterable[Row]) -> list[Any]:
    """Rows that can be carried out and are allowed."""
    return [row for row in rows if row.prediction is not None and not row.candidate.asks]


@infrequent_gc()
def choose(
    candidates: Sequence[Candidate],
    cluster: Cluster,
    graph_of: GraphOf,
    platforms: DevicesOf = int,
    more: Callable[[Sequence[Row]], Sequence[Candidate]] | None = None,
) -> Choice:
    """Predicts all candidates and takes the fastest feasible and allowed one (`preferred`).

    Of candidates with equal placements, the first counts; `more` are only reported. `graph_of` maps changed
    fields to the algorithm and its graph, and `platforms` a number of devices to the devices for `place`.
    """
    begun = time.perf_counter()

    def look(one: Candidate) -> Row:
        return _row(one, cluster, graph_of, platforms)

    rows = _search(_different(candidates, cluster), look)
    rows.sort(key=lambda row: row.seconds)
    if more is not None:
        rows += [look(one) for one in more(_takeable(rows))]
    rows.sort(key=lambda row: row.seconds)
    taken = _takeable(rows)
    if not taken:
        why = next((row.refused for row in rows if row.refused), "there is no candidate")
        raise PlanError(f"no policy can be carried out: {why}")
    known = [row for row in taken if row.prediction.complete] or taken
    best = known[break_ties([row.rank for row in known])]
    rows = [best, *(row for row in rows if row is not best)]
    return Choice(*graph_of(best.candidate.variant), tuple(rows), time.perf_counter() - begun, cluster)


def break_ties(candidates: Sequence[tuple[float, *tuple[int, ...]]]) -> int:
    """Of candidates that predictions cannot distinguish from the fastest, the one with the fewest groups,
    then the fewest devices, then the smallest lag.

    Each has its predicted seconds and these numbers.
    """
    best = min(seconds for seconds, *_ in candidates)
    near = [i for i, (seconds, *_) in enumerate(candidates) if seconds <= TIE * best]
    return min(near, key=lambda i: (*candidates[i][1:], candidates[i][0]))


def _search(candidates: Iterable[Candidate], look: Callable[[Candidate], Row]) -> list[Row]:
    """Predicts some candidates of every kind (policy, staleness, devices), then the neighbours of the best.

    A kind whose smallest and middle sizes take more than `_FAR` times the best is dropped; for other kinds,
    sizes are tried until both neighbours of the best one are slower. Lags of a kind are bisected.
    """
    kinds: dict[Any, list[Candidate]] = {}
    for one in sorted(candidates, key=lambda one: _delays(one.policy)[1]):
        kind = type(one.policy), _delays(one.policy)[0], one.devices, one.variant
        kinds.setdefault(kind, []).append(one)
    found: list[dict[int, Row]] = []
    for some in kinds.values():
        rows: dict[int, Row] = {}
        for position in dict.fromkeys([0, len(some) // 2, len(some) - 1, *range(len(some))]):
            if sum(row.prediction is not None for row in rows.values()) < _TRIED:
                rows[position] = look(some[position])
        found.append(rows)
    every = [row for rows in found for row in rows.values()]
    best = min((row.seconds for row in _takeable(every)), default=float("inf"))
    for some, rows in zip(kinds.values(), found, strict=True):
        if len({_delays(one.policy) for one in some}) > 1:
            _bisect_lags(some, rows, look)
        while min(row.seconds for row in rows.values()) <= _FAR * best and _look_around(some, rows, look):
            pass
        rows.update((i, Row(one, None, _LEFT_OUT)) for i, one in enumerate(some) if i not in rows)
    return [row for rows in found for row in rows.values()]


def _look_around(some: Sequence[Candidate], rows: dict[int, Row], look: Callable[[Candidate], Row]) -> bool:
    """Predicts the next feasible sizes on both sides of the best so far; returns whether any was new."""
    nearest = min(rows, key=lambda i: rows[i].seconds)
    before = len(rows)
    for side in (range(nearest - 1, -1, -1), range(nearest + 1, len(some))):
        for i in side:
            rows[i] = rows[i] if i in rows else look(some[i])
            if rows[i].prediction is not None:
                break
    return len(rows) > before


def _bisect_lags(some: Sequence[Candidate], rows: dict[int, Row], look: Callable[[Candidate], Row]) -> None:
    """Predicts until the smallest lag within `TIE` of the best is known: a longer one never takes longer."""

    def seconds(i: int) -> float:
        rows[i] = rows[i] if i in rows else look(some[i])
        return rows[i].seconds

    enough = TIE * min(map(seconds, (0, len(some) // 2, len(some) - 1)))
    bisect.bisect_left(range(len(some)), True, key=lambda i: seconds(i) <= enough)


def lags(graph: FDG, policy: Any) -> list[Any]:
    """A policy with each lag to choose from, in order; for `choose`."""
    trips = micro_batches(graph)
    if not trips:
        raise FdgError(
            "lag='auto': no scan calls the actors, so an iteration is one micro-batch: use staleness, or two"
            " micro_batches or more"
        )
    return [dataclasses.replace(policy, lag=lag) for lag in range(_MOST_LAG * trips + 1)]


def _delays(policy: Any) -> tuple[int, int]:
    return getattr(policy, "staleness", 0), getattr(policy, "lag", 0)


def _different(candidates: Iterable[Candidate], cluster: Cluster) -> list[Candidate]:
    """Drops candidates with the same placement as an earlier one."""
    seen: set[Any] = set()
    found = []
    for one in candidates:
        try:
            placed = one.policy.place(cluster.platforms(one.devices))
        except PlanError:
            found.append(one)
            continue
        groups = frozenset(
            (role, group.devices, group.model, group.parameters) for role, group in placed.items()
        )
        key = groups, one.variant, *_delays(one.policy)
        if key not in seen:
            seen.add(key)
            found.append(one)
    return found


def _row(candidate: Candidate, cluster: Cluster, graph_of: GraphOf, platforms: DevicesOf) -> Row:
    try:
        _, graph = graph_of(candidate.variant)
        devices = platforms(candidate.devices)
        plan = _planned(graph, candidate.policy, devices)
        idle = None if isinstance(devices, int) else plan.idle_process(devices)
        if idle is not None:
            raise PlanError(f"{candidate.policy} leaves process {idle} without work")
        prediction = predict(plan, cluster)
        check_memory(plan, cluster)
        return Row(candidate, prediction)
    except FdgError as error:
        return Row(candidate, None, str(error))


_PLANS: IdentityCache[Plan] = IdentityCache(max_entries=512)


def _planned(graph: FDG, policy: Any, devices: Sequence[Any] | int) -> Plan:
    """A plan, cached for other rates (`sensitivity`)."""
    if not isinstance(devices, int):
        return place(graph, policy, devices)
    return _PLANS(graph.jaxpr, (graph.agents, policy, devices), lambda: place(graph, policy, devices))


def check_memory(plan: Plan, cluster: Cluster) -> None:
    """Checks that a plan fits into the devices' memory, by an estimate (`Plan.memory`)."""
    there = cluster.kind.rate("memory_bytes")
    for group, needed in plan.memory:
        if needed > there:
            raise PlanError(
                f"{plan.policy}: each device of its {group} needs about {quantity(needed, 'B')} of memory,"
                f" and {cluster.kind.name} has {quantity(there, 'B')}: use more devices, a smaller batch,"
                f" or --parameters fsdp"
            )
