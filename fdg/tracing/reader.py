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
    """One occurrence of a jaxpr in the iteration."""

    jaxpr: core.Jaxpr
    calls: int  # runs per iteration
    exact: bool = True  # whether `calls` is exact
    fragment_index: int | None = None  # of the innermost enclosing fragment, in `Reader.fragment_calls`
    parent: "Scope | None" = None
    eqn: Any = None  # the equation with this body; None at the top
    body: Any = None  # jaxprs.Body

    def __post_init__(self):
        self.producer = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}  # of each computed variable
        self.position = {v: i for i, v in enumerate(self.jaxpr.invars)}  # of each input
        self.inner: dict[int, list[Scope]] = {}  # the scopes of an equation's bodies, by the equation's id
        self.fragment_index_of: dict[int, int] = {}  # of a called fragment, by the equation's id


class FragmentCall(NamedTuple):
    """An equation that calls a fragment."""

    mark: FragmentMark
    eqn: core.JaxprEqn
    outside: Scope  # the scope of the equation
    inside: Scope  # the scope of the fragment's body


class EdgeRoute(NamedTuple):
    """How a value reaches a fragment."""

    crossings: int  # transfers per iteration
    delay: str  # "step" or "iteration" if the fragment reads the value of the previous one, else ""
    trips: int  # number of loop trips whose values are stacked into one transfer
    bytes: int  # bytes per transfer


class Reader:
    """Reads fragments and the dataflow between them.

    For i < `num_state`, output i of the jaxpr is the next iteration's value of input i. Fragments have unique
    names (`name_fragments`).
    """

    def __init__(self, jaxpr: core.Jaxpr, num_state: int):
        self.top = Scope(jaxpr, 1)
        self.num_state = num_state
        self.fragment_calls: list[FragmentCall] = []
        self.value_numbers: dict[tuple[int, core.Var], int] = {}  # by the id of the scope, and the variable
        self._find_fragments(self.top)

    def read(self) -> tuple[tuple[Fragment, ...], tuple[Edge, ...]]:
        """The fragments in program order, and the edges between them."""
        names = [call.mark.name for call in self.fragment_calls]
        return tuple(self._fragment(call, names) for call in self.fragment_calls), tuple(self._edges(names))

    def _find_fragments(self, scope: Scope) -> None:
        """Adds the scopes inside a scope, and the fragments that are called in them, in program order."""
        for eqn in scope.jaxpr.eqns:
            mark = FragmentMark.of(eqn)
            index = scope.fragment_index
            if mark is not None:
                index = scope.fragment_index_of[id(eqn)] = len(self.fragment_calls)
            for body in jaxprs.bodies(eqn):
                exact = scope.exact and body.exact
                inner = Scope(body.jaxpr, scope.calls * body.trips, exact, index, scope, eqn, body)
                scope.inner.setdefault(id(eqn), []).append(inner)
                if mark is not None:  # a fragment is a jit, which has one body
                    self.fragment_calls.append(FragmentCall(mark, eqn, scope, inner))
                self._find_fragments(inner)

    # --- nodes ---

    def value_number(self, scope: Scope, var: core.Var) -> int:
        """The number of a fragment's input or output in `scope`, as in `Array.value`."""
        return self.value_numbers.setdefault((id(scope), var), len(self.value_numbers))

    def _fragment(self, call: FragmentCall, names: list[str]) -> Fragment:
        mark, eqn, outside, inside = call
        borders = [e for e in inside.jaxpr.eqns if e.primitive is boundary_p]
        axes_in = {
            e.invars[0]: e.params["axis"] for e in borders if not isinstance(e.invars[0], core.Literal)
        }
        axes_out = {e.outvars[0]: e.params["axis"] for e in borders}

        def make_array(outer, inner, axes):
            aval = inner.aval
            axis = None if isinstance(inner, core.Literal) else axes.get(inner)
            number = -1 if isinstance(outer, core.Literal) else self.value_number(outside, outer)
            return Array(number, tuple(aval.shape), str(aval.dtype), jaxprs.bytes_of(aval), axis)

        inputs = [make_array(o, i, axes_in) for o, i in zip(eqn.invars, inside.jaxpr.invars, strict=True)]
        outputs = [make_array(o, i, axes_out) for o, i in zip(eqn.outvars, inside.jaxpr.outvars, strict=True)]
        parent = outside.fragment_index
        return Fragment(
            name=mark.name,
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
        """Yields the edges; one edge has all values of equal source, target, crossings, delay and trips."""
        values_of_edge: dict[tuple, list[tuple[int, int]]] = {}
        for target, call in enumerate(self.fragment_calls):
            routes: dict[tuple[int, int], EdgeRoute] = {}
            for source, value, route in self.sources(call.outside, call.eqn.invars):
                key = (source, value)
                # A value may have several routes: in each step, and from the last iteration to the first
                # step. The route with the most crossings counts; among equals, the least delayed.
                if key not in routes or _precedence(route) > _precedence(routes[key]):
                    routes[key] = route
            for (source, value), route in routes.items():
                edge_key = (source, target, route.crossings, route.delay, route.trips)
                values_of_edge.setdefault(edge_key, []).append((value, route.bytes))
        for (source, target, crossings, delay, _), values in sorted(values_of_edge.items()):
            numbers, sizes = zip(*sorted(values), strict=True)
            yield Edge(names[source], names[target], numbers, sum(sizes), crossings, delay)

    def sources(self, scope: Scope, operands: Sequence[Any], nested: bool = False):
        """Yields (source, value number, route) for each fragment output that the operands depend on.

        The operands are variables of `scope`. The search follows code between fragments, and ends at outputs
        of fragments. Code between fragments runs where its consumer runs, so what is transferred is the
        source's output. The number of transfers is the number of runs of the outermost jaxpr on the route.
        One transfer has the values of all trips of a loop. `nested`: also follow values through the borders
        of the fragments that enclose `scope`.
        """
        # In these scopes, a carry comes from an earlier trip.
        enclosing = {id(s) for s in _scopes_around(scope)}
        enclosing_fragments = {s.fragment_index for s in _scopes_around(scope)} if nested else set()
        # `trips`: the stacked trips at each level of nested loops, innermost last
        work: list[tuple[Scope, Any, int, tuple[int, ...], str]]
        work = [(scope, v, scope.calls, (1,), "") for v in operands]
        visited = set()
        while work:
            current, v, crossings, trips, delay = item = work.pop()
            if isinstance(v, core.Literal) or (id(current), *item[1:]) in visited:
                continue
            visited.add((id(current), *item[1:]))
            if v in current.producer:
                eqn = current.producer[v]
                index = eqn.outvars.index(v)
                if current.fragment_index_of.get(id(eqn)) not in {None, *enclosing_fragments}:
                    route = EdgeRoute(crossings, delay, trips[-1], jaxprs.bytes_of(v.aval) * trips[-1])
                    yield current.fragment_index_of[id(eqn)], self.value_number(current, v), route
                elif id(eqn) in current.inner:
                    for inner in current.inner[id(eqn)]:
                        if inner.body.results:
                            result = inner.jaxpr.outvars[inner.body.results[index]]
                            times = inner.body.trips if index in inner.body.stacked else 1
                            work.append((inner, result, crossings, (*trips, trips[-1] * times), delay))
                else:
                    work += [(current, operand, crossings, trips, delay) for operand in eqn.invars]
            elif v in current.position:
                position = current.position[v]
                if current.parent is None:
                    if position < self.num_state:
                        work.append((current, current.jaxpr.outvars[position], crossings, trips, "iteration"))
                    continue
                if current.fragment_index != current.parent.fragment_index and not nested:
                    continue  # an input of the enclosing fragment, whose edges show the source
                for carried, previous in current.body.carry:
                    if carried == position:
                        new_delay = delay or ("step" if id(current) in enclosing else "")
                        work.append((current, current.jaxpr.outvars[previous], crossings, trips, new_delay))
                outer = current.eqn.invars[current.body.operands[position]]
                outer_trips = trips[:-1] if len(trips) > 1 else trips
                work.append((current.parent, outer, min(crossings, current.parent.calls), outer_trips, delay))


def _scopes_around(scope: Scope | None) -> list[Scope]:
    """The scope and all scopes around it, from the inside out."""
    return [] if scope is None else [scope, *_scopes_around(scope.parent)]


def _precedence(route: EdgeRoute) -> tuple[int, int, int]:
    """The rank of a route: more crossings first, then a smaller delay, then more bytes."""
    return route.crossings, -["", "step", "iteration"].index(route.delay), route.bytes
