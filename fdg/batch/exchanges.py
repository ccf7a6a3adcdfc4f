"""Reads from a flow its collectives, and operations that every device repeats because they lack a rule."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fdg import jaxprs
from fdg.batch.collective import Collective
from fdg.batch.equation import must_be_whole
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.batch.rules import RULES
from fdg.batch.rules.result import Axis
from fdg.fragment import FragmentMark, boundary_p
from fdg.identity_cache import IdentityCache


def prune(flow: Flow) -> Flow:
    """A flow without unused equations and gathers; effects are kept."""
    return _Pruner().flow(flow, frozenset(range(len(flow.outputs))))[0]


class _Pruner:
    """Prunes bodies; one that is called from several places for the same results is pruned once."""

    def __init__(self):
        self._known: IdentityCache[tuple[Flow, frozenset[int]]] = IdentityCache()

    def flow(self, flow: Flow, outputs: frozenset[int]) -> tuple[Flow, frozenset[int]]:
        """The part of a flow that some of its outputs need, and the inputs that it reads."""
        return self._known(flow, outputs, lambda: self._prune(flow, outputs))

    def _prune(self, flow: Flow, outputs: frozenset[int]) -> tuple[Flow, frozenset[int]]:
        read = {flow.jaxpr.outvars[j] for j in outputs if not jaxprs.is_literal(flow.jaxpr.outvars[j])}
        equations = []
        for each in reversed(flow.equations):
            used = frozenset(k for k, v in enumerate(each.eqn.outvars) if v in read)
            if used or each.eqn.effects:
                kept, operands = self._equation(each, used)
                equations.append(kept)
                atoms = [each.eqn.invars[i] for i in operands]
                read.update(jaxprs.variables(atoms))
        inputs = frozenset(i for i, v in enumerate(flow.jaxpr.invars) if v in read)
        gathered = tuple(i for i in flow.gathered if i in outputs)
        return dataclasses.replace(flow, equations=tuple(reversed(equations)), gathered=gathered), inputs

    def _equation(self, each: EquationFlow, used: frozenset[int]) -> tuple[EquationFlow, set[int]]:
        """The part of an equation that some of its results need, and the operands that it reads."""
        if not each.bodies or each.eqn.effects:
            return each, set(range(len(each.eqn.invars)))
        operands = {0} if each.eqn.primitive.name == "cond" else set()
        while True:  # carried values may need further carried values
            before, kept = len(operands), []
            for body, inner in zip(jaxprs.bodies(each.eqn), each.bodies, strict=True):
                needed = {body.results[k] for k in used} if body.results else {0}  # a test: its predicate
                operands |= {body.operands[i] for i, j in body.carry if j in needed}
                needed |= {j for i, j in body.carry if body.operands[i] in operands}
                pruned, inputs = self.flow(inner, frozenset(needed))
                kept.append(pruned)
                operands |= {body.operands[i] for i in inputs}
            if len(operands) == before:
                gathered = tuple(i for i in each.gathered if i in operands)
                return dataclasses.replace(each, bodies=tuple(kept), gathered=gathered), operands


class WithoutRule(NamedTuple):
    """An operation without a rule on a split batch: operands are gathered, and every device runs all of it.

    >>> print(WithoutRule("ragged_dot_general", "learn", 384, 3))
    no rule for ragged_dot_general in fragment 'learn': gathered (384 B x 3), and run whole on every device
    """

    primitive: str  # the operation's name
    fragment: str | None  # the innermost enclosing fragment; None between fragments
    bytes: int  # gathered bytes of each run
    calls: int  # runs for each run of the program (loops of unknown length counted once)

    def __str__(self) -> str:
        where = f"in fragment '{self.fragment}'" if self.fragment else "between fragments"
        return (
            f"no rule for {self.primitive} {where}: gathered ({self.bytes} B x {self.calls}),"
            f" and run whole on every device"
        )


def predict_exchanges(
    jaxpr: Any,
    input_axes: Sequence[Axis] = (),
    devices: int | None = None,
    output_axes: Sequence[Axis] | None = None,
) -> tuple[tuple[Collective, ...], tuple[WithoutRule, ...]]:
    """The collectives in one run of a jaxpr, with the bodies of its fragments.

    The jaxpr is an iteration, a part of one, or a fragment's body. `input_axes` are the batch axes of its
    first inputs, and `output_axes` those to reshard its outputs to; None leaves them. `devices=None` is any
    number that divides all batches. Returns the collectives in program order, one for each place (the
    enclosing fragments), kind and number of calls; and the operations that all devices repeat because they
    lack a rule (not those with effects, or with a rule that requires it).
    """
    flow = prune(follow(jaxpr, input_axes, devices, output_axes))
    totals: dict[Collective | WithoutRule, int] = collections.defaultdict(int)
    for found, size in _exchanges(flow, (), ()):
        totals[found] += size
    return (
        tuple(
            dataclasses.replace(one, bytes=size)
            for one, size in totals.items()
            if isinstance(one, Collective) and size and one.calls
        ),
        tuple(one._replace(bytes=size) for one, size in totals.items() if isinstance(one, WithoutRule)),
    )


def _exchanges(
    flow: Flow, fragments: tuple[str, ...], trips: tuple[int, ...]
) -> Iterator[tuple[Collective | WithoutRule, int]]:
    """The collectives, and operations without a rule, of a jaxpr inside loops of `trips` trips; their bytes
    are separate."""
    gathered: set[Any] = set()  # replicated by an earlier gather

    def gather(atoms: Sequence[Any], positions: Sequence[int], levels: Sequence[int]):
        for i in positions:
            if atoms[i] not in gathered:
                gathered.add(atoms[i])
                yield exchange("all-gather", trips[: levels[i]]), _bytes([atoms[i]])

    def exchange(kind: str, around: tuple[int, ...]) -> Collective:
        return Collective(kind, 0, math.prod(around), fragments)

    for each in flow.equations:
        eqn, name = each.eqn, each.eqn.primitive.name
        yield from gather(eqn.invars, each.gathered, each.levels)
        if each.reduced:
            yield exchange("all-reduce", trips[: max(each.levels, default=0)]), _bytes(eqn.outvars)
        around = trips if each.trips is None else (*trips, each.trips)
        if each.agreed:
            yield exchange("all-reduce", around), 1
        simple = not each.bodies and eqn.primitive is not boundary_p
        if simple and each.gathered and name not in RULES and not must_be_whole(eqn):
            where = fragments[-1] if fragments else None
            operands = [eqn.invars[i] for i in each.gathered]
            yield WithoutRule(name, where, 0, math.prod(trips)), _bytes(operands)
        mark = FragmentMark.of(eqn)
        inside = fragments if mark is None else (*fragments, mark.name)
        for body in each.bodies:
            yield from _exchanges(body, inside, around)
    yield from gather(flow.jaxpr.outvars, flow.gathered, flow.levels)


def _bytes(atoms: Sequence[Any]) -> int:
    return sum(jaxprs.bytes_of(v.aval) for v in atoms)
