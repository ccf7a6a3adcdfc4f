"""The origins of each value of an iteration, independent of versions.

    w, x -> scan(carry w, x: w, y = act(w, x)) -> w', ys -> learn(w', ys) -> w''

`act` returns `w` unchanged, so `w'` is `w`; `ys` come from `act`, `w''` from `learn`. Values computed between
fragments have the origins of their operands.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark, fragments_in

Origins: TypeAlias = frozenset[Any]  # leaves of the state by position, fragments by name, values in loops


@dataclasses.dataclass(eq=False)
class Versioned:
    """A value at one place of the program."""

    aval: Any
    origins: Origins = frozenset()  # the leaves and fragments that it may come from
    same: "Versioned | None" = None  # the value that it certainly equals, or None
    literal: Any = None  # its number, if it is a literal
    constant: Any = None  # its array, if it is a constant of the jaxpr


class Block:
    """A jaxpr at one place of the program; one that is called twice has two blocks."""

    def __init__(self, closed: Any, inputs: Sequence[Versioned], inside: str | None = None):
        self.jaxpr, self.inputs = jaxprs.open_jaxpr(closed), inputs
        self.inside = inside  # the innermost fragment around it; None between fragments
        constants = [
            Versioned(v.aval, constant=x)
            for v, x in zip(self.jaxpr.constvars, jaxprs.constants_of(closed), strict=True)
        ]
        self._values = dict(
            zip([*self.jaxpr.invars, *self.jaxpr.constvars], [*inputs, *constants], strict=True)
        )
        self.inner: list[list[Block]] = []  # for each equation, a block for each of its bodies
        for eqn in self.jaxpr.eqns:
            results, blocks = _through(eqn, self.of(eqn.invars), inside)
            self._values.update(zip(eqn.outvars, results, strict=True))
            self.inner.append(blocks)
        self.ends = self.of(self.jaxpr.outvars)

    def of(self, atoms: Iterable[Any]) -> list[Versioned]:
        """The values of variables and literals."""
        return [Versioned(v.aval, literal=v) if jaxprs.is_literal(v) else self._values[v] for v in atoms]


def kind_of_control(eqn: core.JaxprEqn) -> str | None:
    """`scan`, `while`, `cond` or `call`, if the equation's bodies determine its results; else None."""
    name, bodies = eqn.primitive.name, jaxprs.bodies(eqn)
    if name in ("scan", "while", "cond"):
        return name
    exact = len(bodies) == 1 and bodies[0].exact and bodies[0].operands == tuple(range(len(eqn.invars)))
    return "call" if exact and name != "custom_linear_solve" else None


def _through(
    eqn: core.JaxprEqn, operands: list[Versioned], inside: str | None
) -> tuple[list[Versioned], list[Block]]:
    """An equation's results and its bodies' blocks."""
    kind, mark = kind_of_control(eqn), FragmentMark.of(eqn)
    if jaxprs.is_identity(eqn):
        return [Versioned(v.aval, v.origins, same=v) for v in operands], []
    if kind is None:
        made = (
            {inside} if inside is not None else _joined(operands).union(fragments_in([eqn], outermost=True))
        )
        return [Versioned(v.aval, frozenset(made)) for v in eqn.outvars], []
    if mark is not None:
        inside = mark.name
    if kind in ("scan", "while"):
        return _loop(eqn, operands, inside)
    bodies = zip(jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn), strict=True)
    blocks = [Block(closed, [operands[i] for i in body.operands], inside) for body, closed in bodies]
    choice = operands[0].origins if kind == "cond" and inside is None else frozenset()
    results = []
    for ends in zip(*(block.ends for block in blocks), strict=True):
        first, *others = (_certain(end, operands) for end in ends)
        is_one = all(first is other for other in others) and (kind == "call" or first in operands)
        results.append(first if is_one else Versioned(first.aval, choice | _joined(ends)))
    return results, blocks


def _loop(
    eqn: core.JaxprEqn, operands: list[Versioned], inside: str | None
) -> tuple[list[Versioned], list[Block]]:
    *tests, body = jaxprs.bodies(eqn)
    closed, own = jaxprs.closed_bodies(eqn), None if inside is None else frozenset({inside})
    inputs = [Versioned(v.aval) for v in body.jaxpr.invars]
    carried = {k: inputs[i] for i, k in body.carry}
    for i, value in enumerate(inputs):
        operand = operands[body.operands[i]]
        if i in body.sliced:  # slicing a row is code
            value.origins = own or operand.origins
        elif value in carried.values():
            value.origins = frozenset({value})
        else:
            inputs[i] = operand
    starts = {
        value: operands[body.operands[i]] for i, value in enumerate(inputs) if value in carried.values()
    }
    last = Block(closed[-1], inputs, inside)
    length = None if tests else eqn.params["length"]
    # values at the start of each trip, until they repeat
    trips = [{value: start.origins for value, start in starts.items()}]
    again: int | None = None
    while again is None and (length is None or len(trips) <= length):
        following = {v: _replaced(last.ends[k].origins, trips[-1]) for k, v in carried.items()}
        if following in trips:
            again = trips.index(following)
        else:
            trips.append(following)
    taken = trips if length is None else trips[: max(length, 1)]
    every = {value: frozenset().union(*(trip[value] for trip in taken)) for value in starts}
    firsts = [[operands[i] for i in test.operands[: len(test.operands) - len(carried)]] for test in tests]
    blocks = [Block(closed[0], [*first, *carried.values()], inside) for first in firsts]
    choice = frozenset().union(*(_replaced(block.ends[0].origins, every) for block in blocks if own is None))
    for k, value in carried.items():
        value.origins = every[value]
        value.same = starts[value] if _certain(last.ends[k], [value]) is value else None
    if length is None:
        after = {value: origins | choice for value, origins in every.items()}
    else:
        repeats = length if again is None else again + (length - again) % (len(trips) - again)
        after = trips[min(length, repeats)]
    results = []
    for k, v in enumerate(eqn.outvars):
        if k in body.stacked:
            results.append(Versioned(v.aval, own or _replaced(last.ends[k].origins, every)))
            continue
        value = carried[k]
        same = value.same if tests else starts[value] if length == 0 else _certain(last.ends[k], operands)
        results.append(same if same in operands else Versioned(v.aval, after[value]))
    return results, [*blocks, last]


def _certain(value: Versioned, among: Collection[Versioned]) -> Versioned:
    """The value that another one certainly equals, or itself."""
    found: Versioned | None = value
    while found is not None and found not in among:
        found = found.same
    return found or value


def _joined(values: Iterable[Versioned]) -> Origins:
    return frozenset().union(*(value.origins for value in values))


def _replaced(origins: Origins, by: Mapping[Any, Origins]) -> Origins:
    """Replaces carried values by their origins."""
    return frozenset().union(*(by.get(x, {x}) for x in origins))
