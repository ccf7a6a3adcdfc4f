"""Choosing among plans: each is predicted, what does not fit is refused, and the quickest is taken.

Nothing runs and nothing is allocated. Which plans there are to choose from is not known here: `policies.auto`
lists policies and sizes of their groups.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fdg.costs.hardware import Cluster
from fdg.costs.prediction import Prediction, predict
from fdg.errors import FdgError, PlanError
from fdg.garbage import infrequent_gc
from fdg.placing.place import place
from fdg.placing.plans import Plan
from fdg.recall import Recall
from fdg.showing.words import clip, duration, quantity, table
from fdg.tracing.graph import FDG

_SHOWN = 12  # rows of a printed table
_TRIED, _FAR = 2, 1.5  # of each kind so many first; its others if one of these came so near to the best
TIE = 1.05  # predictions that lie nearer say nothing of which is quicker
_LEFT_OUT = "left out: other groups of its kind are quicker, or far off"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to carry out a job.

    Attributes:
      policy: with the sizes of its groups.
      devices: that it is given: the first so many.
      variant: fields of the algorithm that differ, by name; empty for the algorithm as it is.
      asks: the flag that allows it, where it changes the numbers and was not allowed; else "".
    """

    policy: Any
    devices: int
    variant: tuple[tuple[str, Any], ...] = ()
    asks: str = ""

    def __str__(self) -> str:
        changed = "".join(f", {name}={value}" for name, value in self.variant)
        return f"{self.policy}{changed}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate with what was predicted of it, or why it cannot be.

    Attributes:
      candidate: which.
      prediction: None for one that cannot be carried out.
      refused: why, in one line; "" for one that can.
      measured: seconds of an iteration, where it was measured.
    """

    candidate: Candidate
    prediction: Prediction | None
    refused: str = ""
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """Of an iteration: measured if it was, else predicted; infinite for one that cannot be."""
        if self.measured is not None:
            return self.measured
        return self.prediction.seconds if self.prediction is not None else float("inf")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, among what.

    Attributes:
      policy: to carry the job out with.
      devices: how many of those given.
      algorithm: as given, or with the fields changed that were allowed to.
      graph: its graph.
      prediction: of an iteration.
      rows: all that were looked at, the chosen one first, then the quickest, those refused last.
      took: seconds that choosing took.
      cluster: that it was chosen for.
    """

    policy: Any
    devices: int
    algorithm: Any
    graph: FDG
    prediction: Prediction
    rows: tuple[Row, ...]
    took: float
    cluster: Cluster

    @property
    def candidate(self) -> Candidate:
        """The one that was chosen."""
        return _takeable(self.rows)[0].candidate

    @property
    def seconds(self) -> float:
        """Of an iteration, predicted."""
        return self.prediction.seconds

    @property
    def reason(self) -> str:
        """Why, in one line."""
        taken = _takeable(self.rows)
        best, *others = taken
        quickest = min(others, key=lambda row: row.seconds, default=best)
        other = next((row for row in others if row.seconds > best.seconds), None)
        than = ""
        if quickest.seconds < best.seconds:
            than = (
                f", not told from {quickest.candidate} on {_on(quickest)} at {duration(quickest.seconds)},"
                f" which has more groups or devices"
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
        """Candidates, predicted time, what bounds each, and why the winner."""
        return "\n".join([*self._lines(_SHOWN), "", f"chosen: {self.reason}"])

    def _lines(self, most: int) -> list[str]:
        measured = any(row.measured is not None for row in self.rows)
        header = [
            "policy",
            "devices",
            "predicted",
            *(["measured"] if measured else []),
            "idle",
            "most of it is",
            "",
        ]
        good = [row for row in self.rows if row.prediction is not None]
        shown = good[:most]
        left = sum(row.refused == _LEFT_OUT for row in self.rows)
        lines = [
            f"{len(self.rows)} candidates in {self.took:.1f} s, {len(good)} of them predicted,"
            f" {left} left out for others of their kind are quicker, or all far off,"
            f" {len(self.rows) - len(good) - left} not feasible;"
            f" {self.cluster.note or 'rates: of ' + self.cluster.kind.name}"
        ]
        lines += table(
            header, [_cells(row, measured) for row in shown], numeric=(1, 2, *((3,) if measured else ()))
        )
        if len(good) > most:
            lines.append(f"  ... and {len(good) - most} more, up to {duration(good[-1].seconds)}")
        reasons: dict[str, int] = {}
        for row in self.rows:
            if row.refused and row.refused != _LEFT_OUT:
                reasons[row.refused] = reasons.get(row.refused, 0) + 1
        for reason, count in list(reasons.items())[:3]:
            lines.append(f"  not feasible ({count}): {clip(reason, 140)}")
        return lines


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
    """Those that can be carried out, and are allowed."""
    return [row for row in rows if row.prediction is not None and not row.candidate.asks]


@infrequent_gc()
def choose(
    candidates: Sequence[Candidate],
    cluster: Cluster,
    graph_of: Callable[[tuple[tuple[str, Any], ...]], tuple[Any, FDG]],
    platforms: Callable[[int], Sequence[Any] | int] = int,
    more: Callable[[Sequence[Row]], Sequence[Candidate]] | None = None,
) -> Choice:
    """Predicts all candidates, and takes the quickest that is feasible and allowed (`preferred`).

    Args:
      candidates: to look at; of those with the same placement the first counts.
      cluster: to run on.
      graph_of: the algorithm with fields changed, and its graph.
      platforms: the devices that `place` is given for a number of them.
      more: candidates to look at once the others are known, for information.

    Raises:
      PlanError: none is feasible; what the first one lacks.
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
    best = known[preferred([(row.seconds, len(row.prediction.busy), row.candidate.devices) for row in known])]
    rows = [best, *(row for row in rows if row is not best)]
    chosen, graph = graph_of(best.candidate.variant)
    took = time.perf_counter() - begun
    return Choice(
        best.candidate.policy,
        best.candidate.devices,
        chosen,
        graph,
        best.prediction,
        tuple(rows),
        took,
        cluster,
    )


def preferred(candidates: Sequence[tuple[float, int, int]]) -> int:
    """Which of some to take: of those that no prediction can tell from the quickest, that of fewest groups,
    then of fewest devices.

    Args:
      candidates: predicted seconds, number of groups and of devices of each.
    """
    best = min(seconds for seconds, *_ in candidates)
    near = [i for i, (seconds, *_) in enumerate(candidates) if seconds <= TIE * best]
    return min(near, key=lambda i: (*candidates[i][1:], candidates[i][0]))


def _search(candidates: Iterable[Candidate], look: Callable[[Candidate], Row]) -> list[Row]:
    """Looks at some of every kind (policy, staleness, devices), then around the best of those that came near.

    Of a kind whose smallest and middle groups take more than `_FAR` times the best of all no other size wins;
    of any other kind, sizes are looked at until both neighbours of its best one are slower.
    """
    kinds: dict[Any, list[Candidate]] = {}
    for one in candidates:
        kind = type(one.policy), *_delays(one.policy), one.devices, one.variant
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
        while min(row.seconds for row in rows.values()) <= _FAR * best and _look_beside(some, rows, look):
            pass
        rows.update((i, Row(one, None, _LEFT_OUT)) for i, one in enumerate(some) if i not in rows)
    return [row for rows in found for row in rows.values()]


def _look_beside(some: Sequence[Candidate], rows: dict[int, Row], look: Callable[[Candidate], Row]) -> bool:
    """Looks at the next feasible sizes on both sides of the best so far; whether any was new."""
    nearest = min(rows, key=lambda i: rows[i].seconds)
    before = len(rows)
    for side in (range(nearest - 1, -1, -1), range(nearest + 1, len(some))):
        for i in side:
            rows[i] = rows[i] if i in rows else look(some[i])
            if rows[i].prediction is not None:
                break
    return len(rows) > before


def _delays(policy: Any) -> tuple[int, int]:
    return getattr(policy, "staleness", 0), getattr(policy, "lag", 0)


def _different(candidates: Iterable[Candidate], cluster: Cluster) -> list[Candidate]:
    """Without those that place everything as an earlier one does."""
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


def _row(
    candidate: Candidate,
    cluster: Cluster,
    graph_of: Callable[[tuple[tuple[str, Any], ...]], tuple[Any, FDG]],
    platforms: Callable[[int], Sequence[Any] | int],
) -> Row:
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


_PLANS: Recall[Plan] = Recall(most=512)


def _planned(graph: FDG, policy: Any, devices: Sequence[Any] | int) -> Plan:
    """A plan; one that was made before serves again, for other rates (`sensitivity`)."""
    if not isinstance(devices, int):
        return place(graph, policy, devices)
    return _PLANS(graph.jaxpr, (graph.agents, policy, devices), lambda: place(graph, policy, devices))


def check_memory(plan: Plan, cluster: Cluster) -> None:
    """Refuses a plan that needs more memory than a device has, by an estimate (`Plan.memory`).

    Raises:
      PlanError: names group, bytes and fix.
    """
    there = cluster.kind.rate("memory_bytes")
    for group, needed in plan.memory:
        if needed > there:
            raise PlanError(
                f"{plan.policy}: each device of its {group} needs about {quantity(needed, 'B')} of memory,"
                f" and {cluster.kind.name} has {quantity(there, 'B')}: use more devices, a smaller batch,"
                f" or --parameters fsdp"
            )
