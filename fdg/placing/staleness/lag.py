"""Lag in micro-batches: cuts the scan over micro-batches where the age of the actors' parameters changes.

    scan 8 trips: act(w)        lag 3:  scan 3 trips: act(w of the previous iteration);  scan 5 trips: act(w)

Micro-batches are the trips of the scan that calls the actors; an iteration has `M`. With lag `d`, micro-batch
`n` of the run reads the parameters after `(n - d) // M` updates, or the initial parameters. So the first
`d mod M` trips read parameters of `ceil(d / M)` iterations ago, the other trips of `d // M` iterations ago.
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
    micro_batches: int = 0  # `M`, trips of the scan that calls the actors; 0 for a staleness in iterations
    # The names of the fragments in the second scan. They read newer parameters than the fragments in the
    # first scan, so no program has fragments of both.
    newer: frozenset[str] = frozenset()

    @property
    def oldest(self) -> int:
        """The largest age."""
        return -(-self.lag // self.micro_batches) if self.lag else max(self.by_fragment.values(), default=0)

    def __str__(self) -> str:
        """The setting, written as a policy's field."""
        return f"lag={self.lag}" if self.lag else f"staleness={self.oldest}"

    @property
    def unit(self) -> str:
        """The unit of the setting."""
        return "micro-batches" if self.lag else "iterations"

    @property
    def without(self) -> str:
        """The setting that turns the delay off."""
        return "lag=0" if self.lag else "staleness=0"


def micro_batches(graph: FDG) -> int | None:
    """`M`, the trips of the scan that is outside all fragments and calls actors; None without one."""
    actors = {f.name for f in graph.fragments if f.role == "actor"}
    scans = list(_scans(jaxprs.open_jaxpr(graph.jaxpr).eqns, actors))
    if len(scans) > 1:
        trips = listed([eqn.params["length"] for eqn in scans], "and")
        raise PlanError(
            f"lag: {graph.name} calls actors in {len(scans)} scans (of {trips} trips), but micro-batches are"
            " the trips of one scan: use staleness, in iterations"
        )
    return scans[0].params["length"] if scans else None


def with_lag(graph: FDG, lag: int, where: str) -> tuple[FDG, Ages]:
    """Cuts the scan over micro-batches at trip `lag mod M`; returns the graph and the ages.

    Code before the scan reads the parameters of its first micro-batch, code after it those of its last one.
    If `M` divides the lag, the scan is not cut.
    """
    trips = micro_batches(graph)
    if not trips:
        actors = [f.name for f in graph.fragments if f.role == "actor" and f.parent is None]
        reason = f"no scan calls '{actors[0]}'" if actors else f"{graph.name} has no actor"
        raise PlanError(
            f"{where}: lag={lag} counts micro-batches, but {reason}: use staleness={lag}, which counts"
            " iterations, or set micro_batches to 2 or more"
        )
    older, first = divmod(lag, trips)
    if not first:
        return graph, Ages({f.name: older for f in graph.fragments}, lag, trips)
    cut, before, count = _CUT_GRAPHS(graph.jaxpr, first, lambda: _cut_graph(graph, first))
    cut = with_declarations(cut, graph)
    names = [fragment.name for fragment in cut.fragments]
    ages = {name: older + (i < before) for i, name in enumerate(names)}
    return cut, Ages(ages, lag, trips, frozenset(names[before : before + count]))


_CUT_GRAPHS: IdentityCache[tuple[FDG, int, int]] = IdentityCache(max_entries=32)


def _scans(equations: Iterable[core.JaxprEqn], actors: set[str]) -> Iterator[core.JaxprEqn]:
    """The outermost scans that are outside all fragments and call an actor."""
    for eqn in equations:
        if FragmentMark.of(eqn) is not None or actors.isdisjoint(fragments_in([eqn])):
            continue
        if eqn.primitive.name == "scan":
            yield eqn
        elif kind_of_control(eqn) == "call":
            yield from _scans(jaxprs.bodies(eqn)[0].jaxpr.eqns, actors)


def _cut_graph(graph: FDG, first: int) -> tuple[FDG, int, int]:
    """Cuts the scan at trip `first`; returns the graph, and how many fragments are before and in the rest."""
    actors = {f.name for f in graph.fragments if f.role == "actor"}
    (scan,) = _scans(jaxprs.open_jaxpr(graph.jaxpr).eqns, actors)
    num_inside = len(fragments_in([scan]))
    count, before = 0, 0

    def rule(block: core.Jaxpr, context: Any, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
        nonlocal count, before
        for eqn in block.eqns:
            if eqn is scan:
                before = count + num_inside
                yield from _split_scan(eqn, first)
            elif list(_scans([eqn], actors)):
                yield inside(eqn, context=object())
            else:
                yield eqn
                count += len(fragments_in([eqn]))

    jaxpr = jaxprs.rewrite_blocks(graph.jaxpr, rule)
    return read_graph(graph.name, jaxpr, graph.state, graph.metrics), before, num_inside


def _split_scan(eqn: core.JaxprEqn, first: int) -> list[core.JaxprEqn]:
    """Splits a scan into two, the first with `first` trips; concatenates their stacked results."""
    constants, carried = jaxprs.scan_sizes(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def run_both(*operands: Any) -> list[Any]:
        carry, rows = operands[constants : constants + carried], operands[constants + carried :]
        stacked = []
        for begin, end in ((0, first), (first, length)):
            rows_range = (length - end, length - begin) if reverse else (begin, end)
            part = [jax.lax.slice_in_dim(x, *rows_range) for x in rows]
            params = {**eqn.params, "length": end - begin}
            ends = jaxprs.bind(eqn, [*operands[:constants], *carry, *part], params)
            carry = tuple(ends[:carried])
            stacked.append(ends[carried:])
        parts = zip(*(stacked[::-1] if reverse else stacked), strict=True)
        return [*carry, *(jax.lax.concatenate(part, 0) for part in parts)]

    return jaxprs.traced(run_both, eqn.invars, eqn.outvars)[0]
