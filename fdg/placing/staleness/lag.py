"""Lag in micro-batches: cuts the scan over micro-batches where the age of the actors' parameters changes.

    scan 8 trips: act(w)        lag 3:  scan 3 trips: act(w of the previous iteration);  scan 5 trips: act(w)

Micro-batches are the trips of the scan that calls the actors; an iteration has `M` trips. With lag `d`,
micro-batch `n` of the run reads the parameters after `(n - d) // M` updates (before the first update, the
initial parameters). So in each iteration, the first `d mod M` trips read the parameters of `ceil(d / M)`
iterations ago, and the other trips read those of `d // M` iterations ago.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.errors import PlanError, listed
from fdg.fragment import FragmentMark, fragments_in
from fdg.identity_cache import IdentityCache
from fdg.placing.staleness.values import kind_of_control
from fdg.tracing.graph import FDG
from fdg.tracing.trace import read_graph, with_declarations


class Ages(NamedTuple):
    """The age of the parameters that each fragment reads."""

    by_fragment: dict[str, int]  # the age in iterations, by fragment
    lag: int = 0  # the lag in micro-batches; 0 for a staleness in iterations
    micro_batches: int = 0  # `M`, the number of micro-batches per iteration; 0 for a staleness in iterations
    # The names of the fragments in the second of the two scans. They read newer parameters than the fragments
    # in the first scan, so no program has fragments of both.
    newer: frozenset[str] = frozenset()

    @property
    def oldest(self) -> int:
        """The largest age in iterations."""
        return -(-self.lag // self.micro_batches) if self.lag else max(self.by_fragment.values(), default=0)

    def __str__(self) -> str:
        """The setting as the policy's field: "lag=3"."""
        return f"lag={self.lag}" if self.lag else f"staleness={self.oldest}"

    @property
    def unit(self) -> str:
        """The unit of the setting."""
        return "micro-batches" if self.lag else "iterations"

    @property
    def off_setting(self) -> str:
        """The setting that turns the delay off."""
        return "lag=0" if self.lag else "staleness=0"


def micro_batches(graph: FDG) -> int | None:
    """`M`, the number of trips of the scan that calls actors, outside all fragments; None without a scan."""
    actors = {f.name for f in graph.fragments if f.role == "actor"}
    scans = list(_actor_scans(jaxprs.open_jaxpr(graph.jaxpr).eqns, actors))
    if len(scans) > 1:
        trips = listed([eqn.params["length"] for eqn in scans], "and")
        raise PlanError(
            f"lag: {graph.name} calls actors in {len(scans)} scans (of {trips} trips), but micro-batches are"
            " the trips of one scan: use staleness, in iterations"
        )
    return scans[0].params["length"] if scans else None


def with_lag(graph: FDG, lag: int, where: str) -> tuple[FDG, Ages]:
    """Cuts the scan over micro-batches before trip `lag mod M`; returns the graph and the ages.

    Fragments before the scan have the age of its first micro-batch; fragments after it, the age of its last.
    If `M` divides the lag, the scan is not cut. `where` names the policy in errors.
    """
    trips = micro_batches(graph)
    if not trips:
        actors = [f.name for f in graph.fragments if f.role == "actor" and f.parent is None]
        reason = f"no scan calls '{actors[0]}'" if actors else f"{graph.name} has no actor"
        raise PlanError(
            f"{where}: lag={lag} counts micro-batches, but {reason}: use staleness={lag}, which counts"
            " iterations (or micro_batches of 2 or more, where the algorithm has them)"
        )
    smallest_age, num_older = divmod(lag, trips)
    if not num_older:
        return graph, Ages({f.name: smallest_age for f in graph.fragments}, lag, trips)
    cut, num_before, num_inside = _CUT_GRAPHS(graph.jaxpr, num_older, lambda: _cut_graph(graph, num_older))
    cut = with_declarations(cut, graph)
    names = [fragment.name for fragment in cut.fragments]
    ages = {name: smallest_age + (i < num_before) for i, name in enumerate(names)}
    return cut, Ages(ages, lag, trips, frozenset(names[num_before : num_before + num_inside]))


_CUT_GRAPHS: IdentityCache[tuple[FDG, int, int]] = IdentityCache(max_entries=32)  # of `_cut_graph`


def _actor_scans(equations: Iterable[core.JaxprEqn], actors: set[str]) -> Iterator[core.JaxprEqn]:
    """The outermost scans that call an actor, outside all fragments."""
    for eqn in equations:
        if FragmentMark.of(eqn) is not None or actors.isdisjoint(fragments_in([eqn])):
            continue
        if eqn.primitive.name == "scan":
            yield eqn
        elif kind_of_control(eqn) == "call":
            yield from _actor_scans(jaxprs.bodies(eqn)[0].jaxpr.eqns, actors)


def _cut_graph(graph: FDG, num_older: int) -> tuple[FDG, int, int]:
    """Cuts the scan over micro-batches after `num_older` trips.

    Returns the graph, and the numbers of fragments before the second scan and in it.
    """
    actors = {f.name for f in graph.fragments if f.role == "actor"}
    (scan,) = _actor_scans(jaxprs.open_jaxpr(graph.jaxpr).eqns, actors)
    num_inside = len(fragments_in([scan]))
    num_seen, num_before = 0, 0

    def rule(block: core.Jaxpr, context: Any, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
        nonlocal num_seen, num_before
        for eqn in block.eqns:
            if eqn is scan:
                num_before = num_seen + num_inside
                yield from _split_scan(eqn, num_older)
            elif list(_actor_scans([eqn], actors)):
                yield inside(eqn, context=object())  # a context of its own: rewritten for this call only
            else:
                yield eqn
                num_seen += len(fragments_in([eqn]))

    jaxpr = jaxprs.rewrite_blocks(graph.jaxpr, rule)
    return read_graph(graph.name, jaxpr, graph.state, graph.metrics), num_before, num_inside


def _split_scan(eqn: core.JaxprEqn, first_trips: int) -> list[core.JaxprEqn]:
    """Splits a scan into two, the first with `first_trips` trips; concatenates their stacked results."""
    constants, carried = jaxprs.scan_sizes(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def run_both(*operands: Any) -> list[Any]:
        carry, rows = operands[constants : constants + carried], operands[constants + carried :]
        stacked = []
        for begin, end in ((0, first_trips), (first_trips, length)):
            rows_range = (length - end, length - begin) if reverse else (begin, end)
            rows_of_scan = [jax.lax.slice_in_dim(x, *rows_range) for x in rows]
            params = {**eqn.params, "length": end - begin}
            ends = jaxprs.bind(eqn, [*operands[:constants], *carry, *rows_of_scan], params)
            carry = tuple(ends[:carried])
            stacked.append(ends[carried:])
        halves = zip(*(stacked[::-1] if reverse else stacked), strict=True)
        return [*carry, *(jax.lax.concatenate(pair, 0) for pair in halves)]

    return jaxprs.traced(run_both, eqn.invars, eqn.outvars)[0]
