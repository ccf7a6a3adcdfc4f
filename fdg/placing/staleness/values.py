"""Finds the origins of each value of an iteration: the state's leaves and the fragments that it comes from.

    for x in xs:                  # a scan that carries w
        w, y = act(w, x)          # act returns w as it is
        ys.append(y)
    w = learn(w, ys)

The origin of `w` after the loop is the state's leaf `w`, that of `ys` is `act`, and that of the new `w` is
`learn`. A value that is computed between fragments has the origins of its operands.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark, fragments_in

# Positions of the state's leaves, and names of fragments; while a loop is analysed, also its carried values
# (`Versioned`).
Origins: TypeAlias = frozenset[Any]


@dataclasses.dataclass(eq=False)
class Versioned:
    """A value at one place of the program; fragments may read different versions of it."""

    aval: Any
    origins: Origins = frozenset()  # the leaves and fragments that it may come from
    equal: "Versioned | None" = None  # another value that always equals this value, if known
    literal: Any = None  # the literal, if the value is a literal
    constant: Any = None  # the array, if the value is a constant of the jaxpr


class Block:
    """A jaxpr at one place of the program; a jaxpr that is called twice has two blocks."""

    def __init__(self, closed: Any, inputs: Sequence[Versioned], fragment: str | None = None):
        self.jaxpr, self.inputs = jaxprs.open_jaxpr(closed), inputs
        self.fragment = fragment  # the innermost fragment around it; None between fragments
        constants = [
            Versioned(v.aval, constant=x)
            for v, x in zip(self.jaxpr.constvars, jaxprs.constants_of(closed), strict=True)
        ]
        self._values = dict(
            zip([*self.jaxpr.invars, *self.jaxpr.constvars], [*inputs, *constants], strict=True)
        )
        self.inner_blocks: list[list[Block]] = []  # for each equation, one block per body
        for eqn in self.jaxpr.eqns:
            results, blocks = _analyse_equation(eqn, self.of(eqn.invars), fragment)
            self._values.update(zip(eqn.outvars, results, strict=True))
            self.inner_blocks.append(blocks)
        self.outputs = self.of(self.jaxpr.outvars)

    def of(self, atoms: Iterable[Any]) -> list[Versioned]:
        """The values of variables and literals."""
        return [Versioned(v.aval, literal=v) if jaxprs.is_literal(v) else self._values[v] for v in atoms]


def kind_of_control(eqn: core.JaxprEqn) -> str | None:
    """The control flow of an equation: `scan`, `while`, `cond`, or `call` if it only runs its one body.

    None for any other equation; its bodies are not analysed.
    """
    name, bodies = eqn.primitive.name, jaxprs.bodies(eqn)
    if name in ("scan", "while", "cond"):
        return name
    exact = len(bodies) == 1 and bodies[0].exact and bodies[0].operands == tuple(range(len(eqn.invars)))
    return "call" if exact and name != "custom_linear_solve" else None


def _analyse_equation(
    eqn: core.JaxprEqn, operands: list[Versioned], inside: str | None
) -> tuple[list[Versioned], list[Block]]:
    """The values of an equation's results, and the blocks of its bodies."""
    kind, mark = kind_of_control(eqn), FragmentMark.of(eqn)
    if jaxprs.is_identity(eqn):
        return [Versioned(v.aval, v.origins, equal=v) for v in operands], []
    if kind is None:
        origins = (
            {inside}
            if inside is not None
            else _origins_of(operands).union(fragments_in([eqn], outermost=True))
        )
        return [Versioned(v.aval, frozenset(origins)) for v in eqn.outvars], []
    if mark is not None:
        inside = mark.name
    if kind in ("scan", "while"):
        return _analyse_loop(eqn, operands, inside)
    bodies = zip(jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn), strict=True)
    blocks = [Block(closed, [operands[i] for i in body.operands], inside) for body, closed in bodies]
    predicate_origins = operands[0].origins if kind == "cond" and inside is None else frozenset()
    results = []
    for results_of_bodies in zip(*(block.outputs for block in blocks), strict=True):
        first, *others = (_resolve(end, operands) for end in results_of_bodies)
        is_same = all(first is other for other in others) and (kind == "call" or first in operands)
        results.append(
            first if is_same else Versioned(first.aval, predicate_origins | _origins_of(results_of_bodies))
        )
    return results, blocks


def _analyse_loop(
    eqn: core.JaxprEqn, operands: list[Versioned], inside: str | None
) -> tuple[list[Versioned], list[Block]]:
    """The values of a loop's results, and the blocks of its test (of a while loop) and body."""
    *tests, body = jaxprs.bodies(eqn)
    closed, fragment = jaxprs.closed_bodies(eqn), None if inside is None else frozenset({inside})
    inputs = [Versioned(v.aval) for v in body.jaxpr.invars]
    carried = {k: inputs[i] for i, k in body.carry}
    for i, value in enumerate(inputs):
        operand = operands[body.operands[i]]
        if i in body.sliced:  # slicing computes a new value
            value.origins = fragment or operand.origins
        elif value in carried.values():
            value.origins = frozenset({value})
        else:
            inputs[i] = operand
    starts = {
        value: operands[body.operands[i]] for i, value in enumerate(inputs) if value in carried.values()
    }
    block = Block(closed[-1], inputs, inside)
    length = None if tests else eqn.params["length"]
    # The origins of carried values at the start of each trip, until they equal those of an earlier trip.
    trip_origins = [{value: start.origins for value, start in starts.items()}]
    first_equal_trip: int | None = None
    while first_equal_trip is None and (length is None or len(trip_origins) <= length):
        next_origins = {
            v: _resolve_origins(block.outputs[k].origins, trip_origins[-1]) for k, v in carried.items()
        }
        if next_origins in trip_origins:
            first_equal_trip = trip_origins.index(next_origins)
        else:
            trip_origins.append(next_origins)
    executed_trips = trip_origins if length is None else trip_origins[: max(length, 1)]
    all_origins = {value: frozenset().union(*(trip[value] for trip in executed_trips)) for value in starts}
    test_constants = [
        [operands[i] for i in test.operands[: len(test.operands) - len(carried)]] for test in tests
    ]
    test_blocks = [Block(closed[0], [*constants, *carried.values()], inside) for constants in test_constants]
    test_origins = frozenset().union(
        *(_resolve_origins(b.outputs[0].origins, all_origins) for b in test_blocks if fragment is None)
    )
    if length is None:
        final_origins = {value: origins | test_origins for value, origins in all_origins.items()}
    else:
        last_trip = (
            length
            if first_equal_trip is None
            else first_equal_trip + (length - first_equal_trip) % (len(trip_origins) - first_equal_trip)
        )
        final_origins = trip_origins[min(length, last_trip)]
    for k, value in carried.items():
        # `all_origins` lacks the origins after the last trip of a scan, which its result has.
        value.origins = all_origins[value] if tests else all_origins[value] | final_origins[value]
        value.equal = starts[value] if _resolve(block.outputs[k], [value]) is value else None
    results = []
    for k, v in enumerate(eqn.outvars):
        if k in body.stacked:
            results.append(
                Versioned(v.aval, fragment or _resolve_origins(block.outputs[k].origins, all_origins))
            )
            continue
        value = carried[k]
        same_value = (
            value.equal if tests else starts[value] if length == 0 else _resolve(block.outputs[k], operands)
        )
        results.append(same_value if same_value in operands else Versioned(v.aval, final_origins[value]))
    return results, [*test_blocks, block]


def _resolve(value: Versioned, among: Collection[Versioned]) -> Versioned:
    """The value in `among` that a value always equals; the value itself if there is none."""
    candidate: Versioned | None = value
    while candidate is not None and candidate not in among:
        candidate = candidate.equal
    return candidate or value


def _origins_of(values: Iterable[Versioned]) -> Origins:
    return frozenset().union(*(value.origins for value in values))


def _resolve_origins(origins: Origins, by: Mapping[Any, Origins]) -> Origins:
    """Replaces each carried value among `origins` by its origins in `by`."""
    return frozenset().union(*(by.get(x, {x}) for x in origins))
