"""Reads the graph from the jaxpr of an iteration: its fragments and the arrays between them.

    scan(x -> act(w, x) -> step(x, a)), T trips -> learn(w, xs)

gives the nodes `act` and `step` (T calls each) and `learn`; edges `act -> step` (each trip), `step -> act`
(to the next trip), `step -> learn` (once, T rows stacked), and `learn -> act` (to the next iteration).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark, boundary_p
from fdg.tracing.graph import Array, Edge, Fragment


@dataclasses.dataclass
class Scope:
    """A jaxpr at one place of the program.

    `calls` is its number of runs per iteration; `node` is the number of the innermost enclosing fragment.
    """

    jaxpr: core.Jaxpr
    calls: int
    exact: bool = True
    node: int | None = None
    parent: "Scope | None" = None
    eqn: Any = None  # core.JaxprEqn; None at the top
    body: Any = None  # jaxprs.Body

    def __post_init__(self):
        self.producer = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        self.position = {v: i for i, v in enumerate(self.jaxpr.invars)}
        self.inner: dict[int, list[Scope]] = {}  # the scopes of an equation's bodies, by the equation's id
        self.nodes: dict[int, int] = {}  # the number of the fragment that an equation calls, by its id


class Way(NamedTuple):
    """How a value reaches a fragment."""

    crossings: int  # transfers per iteration
    delay: str  # "", or "step" or "iteration" if the value is of the previous one
    copies: int  # values that are stacked in one transfer, one per trip of a loop
    bytes: int  # per transfer


class Reader:
    """Reads fragments and the dataflow between them.

    For i < `num_state`, output i of the jaxpr is the next iteration's value of input i. Fragments have unique
    names (`name_fragments`).
    """

    def __init__(self, jaxpr: core.Jaxpr, num_state: int):
        self.top = Scope(jaxpr, 1)
        self.num_state = num_state
        self.sites: list[tuple[FragmentMark, core.JaxprEqn, Scope, Scope]] = []
        self.value_numbers: dict[tuple[int, core.Var], int] = {}
        self._find_fragments(self.top)

    def read(self) -> tuple[tuple[Fragment, ...], tuple[Edge, ...]]:
        """The fragments in program order, and the edges between them."""
        names = [mark.name for mark, *_ in self.sites]
        return tuple(self._fragment(i, names) for i in range(len(self.sites))), tuple(self._edges(names))

    def _find_fragments(self, scope: Scope) -> None:
        for eqn in scope.jaxpr.eqns:
            mark = FragmentMark.of(eqn)
            node = scope.node
            if mark is not None:
                node = scope.nodes[id(eqn)] = len(self.sites)
                self.sites.append((mark, eqn, scope, scope))  # the loop below replaces the second scope
            for body in jaxprs.bodies(eqn):
                exact = scope.exact and body.exact
                inner = Scope(body.jaxpr, scope.calls * body.trips, exact, node, scope, eqn, body)
                scope.inner.setdefault(id(eqn), []).append(inner)
                if mark is not None and node is not None:
                    self.sites[node] = (mark, eqn, scope, inner)
                self._find_fragments(inner)

    # --- nodes ---

    def number(self, scope: Scope, var: core.Var) -> int:
        """The number of a fragment's input or output in `scope`, as in `Array.value`."""
        return self.value_numbers.setdefault((id(scope), var), len(self.value_numbers))

    def _fragment(self, index: int, names: list[str]) -> Fragment:
        mark, eqn, outside, inside = self.sites[index]
        borders = [e for e in inside.jaxpr.eqns if e.primitive is boundary_p]
        marks_in = {
            e.invars[0]: e.params["axis"] for e in borders if not isinstance(e.invars[0], core.Literal)
        }
        marks_out = {e.outvars[0]: e.params["axis"] for e in borders}

        def array(outer, inner, marks):
            aval = inner.aval
            axis = None if isinstance(inner, core.Literal) else marks.get(inner)
            number = -1 if isinstance(outer, core.Literal) else self.number(outside, outer)
            return Array(number, tuple(aval.shape), str(aval.dtype), jaxprs.bytes_of(aval), axis)

        inputs = [array(o, i, marks_in) for o, i in zip(eqn.invars, inside.jaxpr.invars, strict=True)]
        outputs = [array(o, i, marks_out) for o, i in zip(eqn.outvars, inside.jaxpr.outvars, strict=True)]
        parent = outside.node
        return Fragment(
            name=names[index],
            role=mark.role,
            parent=None if parent is None else names[parent],
            calls_per_iteration=outside.calls,
            calls_exact=outside.exact,
            flops_per_call=jaxprs.flops_of(inside.jaxpr),
            bytes_per_call=sum(a.bytes for a in (*inputs, *outputs)),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )

    # --- edges ---

    def _edges(self, names: list[str]):
        # Values that cross together have the same number of stacked trips.
        grouped: dict[tuple, list[tuple[int, int]]] = {}
        for target, (_, eqn, scope, _) in enumerate(self.sites):
            arrivals: dict[tuple[int, int], Way] = {}
            for source, value, way in self.sources(scope, eqn.invars):
                key = (source, value)
                # A value may arrive in several ways (in each step, and from the last iteration in the first
                # step): the most frequent way counts; among equals, the least delayed.
                if key not in arrivals or _precedence(way) > _precedence(arrivals[key]):
                    arrivals[key] = way
            for (source, value), way in arrivals.items():
                group = (source, target, way.crossings, way.delay, way.copies)
                grouped.setdefault(group, []).append((value, way.bytes))
        for (source, target, crossings, delay, _), values in sorted(grouped.items()):
            numbers, sizes = zip(*sorted(values), strict=True)
            yield Edge(names[source], names[target], numbers, sum(sizes), crossings, delay)

    def sources(self, scope: Scope, operands: Sequence[Any], nested: bool = False):
        """The fragments whose outputs reach these operands in `scope` through code between fragments.

        Yields (source, value number, way). Code between fragments runs where its consumer runs, so the output
        of the source is what is transferred: once per run of the outermost jaxpr that it passes through.
        Values of a loop's trips are stacked first. With `nested`, also follows values through the borders of
        the fragments that enclose `scope`.
        """
        enclosing = {id(s) for s in _enclosing(scope)}  # in these scopes, a carry comes from an earlier trip
        open_nodes = {s.node for s in _enclosing(scope)} if nested else set()
        work: list[tuple[Scope, Any, int, tuple[int, ...], str]]
        work = [(scope, v, scope.calls, (1,), "") for v in operands]
        visited = set()
        while work:
            current, v, crossings, copies, delay = item = work.pop()
            if isinstance(v, core.Literal) or (id(current), *item[1:]) in visited:
                continue
            visited.add((id(current), *item[1:]))
            if v in current.producer:
                eqn = current.producer[v]
                index = eqn.outvars.index(v)
                if current.nodes.get(id(eqn)) not in {None, *open_nodes}:
                    size = jaxprs.bytes_of(v.aval) * copies[-1]
                    way = Way(crossings, delay, copies[-1], size)
                    yield current.nodes[id(eqn)], self.number(current, v), way
                elif id(eqn) in current.inner:
                    for inner in current.inner[id(eqn)]:
                        if inner.body.results:
                            result = inner.jaxpr.outvars[inner.body.results[index]]
                            times = inner.body.trips if index in inner.body.stacked else 1
                            work.append((inner, result, crossings, (*copies, copies[-1] * times), delay))
                else:
                    work += [(current, operand, crossings, copies, delay) for operand in eqn.invars]
            elif v in current.position:
                position = current.position[v]
                if current.parent is None:
                    if position < self.num_state:
                        work.append(
                            (current, current.jaxpr.outvars[position], crossings, copies, "iteration")
                        )
                    continue
                if current.node != current.parent.node and not nested:
                    continue  # an input of the enclosing fragment: its own edges show the source
                for carried, previous in current.body.carry:
                    if carried == position:
                        new_delay = delay or ("step" if id(current) in enclosing else "")
                        work.append((current, current.jaxpr.outvars[previous], crossings, copies, new_delay))
                outer = current.eqn.invars[current.body.operands[position]]
                outer_copies = copies[:-1] if len(copies) > 1 else copies
                work.append(
                    (current.parent, outer, min(crossings, current.parent.calls), outer_copies, delay)
                )


def _enclosing(scope: Scope | None) -> list[Scope]:
    """The scope and all scopes around it, from the inside out."""
    return [] if scope is None else [scope, *_enclosing(scope.parent)]


def _precedence(way: Way) -> tuple[int, int, int]:
    """The rank of a way: more crossings first, then a smaller delay, then more bytes."""
    return way.crossings, -["", "step", "iteration"].index(way.delay), way.bytes
