"""Where the values of an iteration come from: which leaves of the state, and which fragments' products.

    w, x -> scan(carry w, x: w, y = act(w, x)) -> w', ys -> learn(w', ys) -> w''

`act` hands `w` on unchanged, so `w'` comes from the leaf `w` and from no fragment; `ys` come from `act`,
`w''` from `learn`. Code between fragments makes no product: what it makes comes from whatever its operands
come from.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark
from fdg.recall import Recall

Origins: TypeAlias = frozenset[Any]  # leaves of the state by position, fragments by name

_SAME_VALUE = frozenset(
    "fragment_boundary copy copy_p optimization_barrier stop_gradient sharding_constraint name".split()
)


def is_identity(eqn: core.JaxprEqn) -> bool:
    """Whether each result is the operand at its position, unchanged."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype  # type: ignore[attr-defined]
    return name in _SAME_VALUE and len(eqn.invars) == len(eqn.outvars)


def control_flow(eqn: core.JaxprEqn) -> str | None:
    """`scan`, `while`, `cond` or `call`, where the equation's bodies say all; None where they do not."""
    name = eqn.primitive.name
    if name in ("scan", "while", "cond"):
        return name
    found = jaxprs.bodies(eqn)
    if len(found) == 1 and found[0].exact and found[0].operands == tuple(range(len(eqn.invars))):
        return None if name == "custom_linear_solve" else "call"
    return None


@dataclasses.dataclass(eq=False)
class Block:
    """A jaxpr at one place of the program; one that is called twice has two.

    Attributes:
      inside: the innermost fragment around it, None between fragments.
      origins: where each variable comes from.
      inner: for each equation, by position, a block for each of its bodies.
      need: filled by `Demand`: who reads which versions of a variable.
    """

    jaxpr: core.Jaxpr
    inside: str | None
    origins: dict[Any, Origins]
    inner: dict[int, list["Block"]] = dataclasses.field(default_factory=dict)
    need: dict[Any, set] = dataclasses.field(default_factory=dict)

    def origins_of(self, atom: Any) -> Origins:
        """Where an operand comes from; a number that is written into the jaxpr, from nowhere."""
        return frozenset() if jaxprs.is_literal(atom) else self.origins.get(atom, frozenset())


class Flow:
    """Follows values through an iteration; `groups` is the group of each fragment."""

    def __init__(self, groups: Mapping[str, str]):
        self.groups = groups
        self._unchanged: Recall[list[int | None]] = Recall()
        self._dependence: Recall[list[frozenset[int]]] = Recall()
        self._fragments: Recall[tuple[str, ...]] = Recall()

    def block(self, jaxpr: core.Jaxpr, inputs: Sequence[Origins], inside: str | None = None) -> Block:
        """Follows the inputs of a jaxpr to its end."""
        found = Block(jaxpr, inside, dict(zip(jaxpr.invars, inputs, strict=True)))
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [found.origins_of(v) for v in eqn.invars]
            results, inner = self._through(eqn, operands, inside)
            found.origins.update(zip(eqn.outvars, results, strict=True))
            if inner:
                found.inner[i] = inner
        return found

    def fragments(self, eqn: core.JaxprEqn) -> tuple[str, ...]:
        """Names of the fragments that run when an equation does, outermost first."""
        return self._fragments(eqn, None, lambda: self._find_fragments(eqn))

    def unchanged(self, eqn: core.JaxprEqn) -> list[int | None]:
        """For each result, the operand that it certainly is; None where it is another value, or may be."""
        return self._unchanged(eqn, None, lambda: self._find_unchanged(eqn))

    def dependence(self, eqn: core.JaxprEqn) -> list[frozenset[int]]:
        """For each result, the operands that it depends on."""
        return self._dependence(eqn, None, lambda: self._find_dependence(eqn))

    # --- through an equation ---

    def _through(
        self, eqn: core.JaxprEqn, operands: Sequence[Origins], inside: str | None
    ) -> tuple[list[Origins], list[Block]]:
        """Origins of an equation's results, and its bodies' blocks."""
        kind = control_flow(eqn)
        if is_identity(eqn):
            return list(operands), []
        if kind is None:
            own = {inside} if inside is not None else frozenset().union(*operands, self.fragments(eqn))
            return [frozenset(own)] * len(eqn.outvars), []
        mark = FragmentMark.of(eqn)
        if mark is not None:
            inside = mark.name
        if kind in ("scan", "while"):
            results, inner = self._through_loop(eqn, kind, operands, inside)
        else:
            inner = [
                self.block(body.jaxpr, [operands[i] for i in body.operands], inside)
                for body in jaxprs.bodies(eqn)
            ]
            ends = [[block.origins_of(v) for v in block.jaxpr.outvars] for block in inner]
            choice = operands[0] if kind == "cond" and inside is None else frozenset()
            results = [choice.union(*ways) for ways in zip(*ends, strict=True)]
        for k, i in enumerate(self.unchanged(eqn)):
            if i is not None:
                results[k] = operands[i]
        return [self._products_of(mark, result) for result in results], inner

    def _products_of(self, mark: FragmentMark | None, origins: Origins) -> Origins:
        """What fragments within a fragment made on its own group, is its product."""
        if mark is None:
            return origins
        return frozenset(
            mark.name if isinstance(x, str) and self.groups.get(x) == self.groups.get(mark.name) else x
            for x in origins
        )

    def _through_loop(
        self, eqn: core.JaxprEqn, kind: str, operands: Sequence[Origins], inside: str | None
    ) -> tuple[list[Origins], list[Block]]:
        *tests, body = jaxprs.bodies(eqn)
        values = [operands[i] for i in body.operands]
        trips = [values]  # what goes into each, until it repeats
        while True:
            ends = self._ends_of(self.block(body.jaxpr, values, inside))
            following = list(values)
            for i, k in body.carry:
                following[i] = ends[k] if kind == "scan" else values[i] | ends[k]
            if following in trips or (len(trips) == body.trips and kind == "scan"):
                break
            values = following
            trips.append(values)
        block = self.block(
            body.jaxpr, [frozenset().union(*ways) for ways in zip(*trips, strict=True)], inside
        )
        if kind == "while":
            results = self._ends_of(block)
        else:
            results = self._after(eqn.params["length"], body, trips, inside)
            stacked = self._ends_of(block)
            results = [stacked[k] if k in body.stacked else result for k, result in enumerate(results)]
        inner = [block]
        for test in tests:
            joined = [block.origins_of(v) for v in block.jaxpr.invars]
            carried = joined[len(joined) - len(body.carry) :]
            consts = [operands[i] for i in test.operands[: len(test.operands) - len(carried)]]
            inner.insert(0, self.block(test.jaxpr, [*consts, *carried], inside))
            (end,) = (inner[0].origins_of(v) for v in test.jaxpr.outvars)
            starts = {k: operands[body.operands[i]] for i, k in body.carry}  # there may be no trip
            choice = end if inside is None else frozenset()
            results = [result | starts[k] | choice for k, result in enumerate(results)]
        return results, inner

    def _after(
        self, length: int, body: jaxprs.Body, trips: list[list[Origins]], inside: str | None
    ) -> list[Origins]:
        """Origins at the end of the last of `length` trips, given what goes into trips until it repeats.

        Of no trip at all they do not matter: what such a loop starts from is what it hands on (`unchanged`).
        """
        last = length - 1
        if last >= len(trips):
            ends = self._ends_of(self.block(body.jaxpr, trips[-1], inside))
            following = list(trips[-1])
            for i, k in body.carry:
                following[i] = ends[k]
            first = trips.index(following)
            last = first + (last - first) % (len(trips) - first)
        return self._ends_of(self.block(body.jaxpr, trips[last], inside))

    def _ends_of(self, block: Block) -> list[Origins]:
        return [block.origins_of(v) for v in block.jaxpr.outvars]

    # --- what is handed on unchanged ---

    def _find_fragments(self, eqn: core.JaxprEqn) -> tuple[str, ...]:
        mark = FragmentMark.of(eqn)
        found = [] if mark is None else [mark.name]
        for body in jaxprs.bodies(eqn):
            for inner in body.jaxpr.eqns:
                found += self.fragments(inner)
        return tuple(found)

    def _find_dependence(self, eqn: core.JaxprEqn) -> list[frozenset[int]]:
        operands = [frozenset({i}) for i in range(len(eqn.invars))]
        found, _ = self._through(eqn, operands, None)
        return [frozenset(x for x in result if isinstance(x, int)) for result in found]

    def _find_unchanged(self, eqn: core.JaxprEqn) -> list[int | None]:
        kind = control_flow(eqn)
        if is_identity(eqn):
            return list(range(len(eqn.outvars)))
        if kind is None:
            return [None] * len(eqn.outvars)
        if kind in ("call", "cond"):
            inner = jaxprs.bodies(eqn)
            ways = [self._ends(body.jaxpr) for body in inner]
            same = [set(way) for way in zip(*ways, strict=True)]
            first = [way.pop() if len(way) == 1 else None for way in same]
            return [None if i is None else inner[0].operands[i] for i in first]
        *_, body = jaxprs.bodies(eqn)
        own = {k: i for i, k in body.carry}
        found: list[int | None] = []
        for k, i in enumerate(self._ends(body.jaxpr)):
            if kind == "scan" and eqn.params["length"] == 0:
                i = own.get(k)
            elif k in body.stacked or (kind == "while" and i != own[k]):
                i = None
            elif i is not None and i != own[k] and (i in dict(body.carry) or i in body.sliced):
                i = None  # of another trip
            found.append(None if i is None else body.operands[i])
        return found

    def _ends(self, jaxpr: core.Jaxpr) -> list[int | None]:
        """For each output of a jaxpr, the input that it certainly is."""
        position = {v: i for i, v in enumerate(jaxpr.invars)}
        producer = {v: (eqn, k) for eqn in jaxpr.eqns for k, v in enumerate(eqn.outvars)}

        def end(v: Any) -> int | None:
            while not jaxprs.is_literal(v) and v in producer:
                eqn, k = producer[v]
                i = self.unchanged(eqn)[k]
                if i is None:
                    return None
                v = eqn.invars[i]
            return None if jaxprs.is_literal(v) else position.get(v)

        return [end(v) for v in jaxpr.outvars]
