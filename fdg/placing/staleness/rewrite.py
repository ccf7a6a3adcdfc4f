"""Writes an iteration anew in which every reader gets its version of each value; see `demand`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark
from fdg.placing.staleness.demand import ANY, Demand, Version
from fdg.placing.staleness.flow import Block, control_flow


@dataclasses.dataclass
class Rewritten:
    """A block's new equations, and the variable of each version of a value.

    Attributes:
      variables: by old variable and version.
      same: old variables that hold what another one holds: a result that was handed on unchanged.
    """

    block: Block
    variables: dict[tuple[Any, Version], Any] = dataclasses.field(default_factory=dict)
    same: dict[Any, Any] = dataclasses.field(default_factory=dict)
    equations: list[core.JaxprEqn] = dataclasses.field(default_factory=list)
    constants: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # variable and value


class Rewriter:
    """Goes through blocks forwards; `demand` has been through them backwards."""

    def __init__(self, demand: Demand):
        self.demand = demand

    def run(self, block: Block, inputs: dict[tuple[Any, Version], Any]) -> Rewritten:
        """A block's equations over the variables of its inputs' versions."""
        new = Rewritten(block, dict(inputs))
        new.variables.update({(v, None): v for v in block.jaxpr.constvars})
        for i, eqn in enumerate(block.jaxpr.eqns):
            if self.demand.is_live(block, eqn):
                self._equation(new, i, eqn)
        return new

    def look_up(self, new: Rewritten, atom: Any, version: Version) -> Any:
        """The variable that a reader of a version reads."""
        if jaxprs.is_literal(atom):
            return atom
        while atom in new.same:
            atom = new.same[atom]
        if version == ANY:
            return next(new.variables[atom, v] for v in (None, *sorted(self.demand.late(new.block, atom)))
                        if (atom, v) in new.variables)  # fmt: skip
        return new.variables[atom, self.demand.version(new.block, atom, version)]

    def _equation(self, new: Rewritten, position: int, eqn: core.JaxprEqn) -> None:
        block, demand = new.block, self.demand
        if demand.stays(block, eqn):
            new.equations.append(eqn.replace(invars=[self.look_up(new, v, None) for v in eqn.invars]))
            new.variables.update({(v, None): v for v in eqn.outvars})
        elif demand.flow.fragments(eqn) and control_flow(eqn) is not None:
            self._rewrite_bodies(new, position, eqn)
        elif demand.flow.fragments(eqn):
            self._copy(new, eqn, None, [None] * len(eqn.outvars))
        elif demand.is_between(block, eqn):
            versions = {version for v in eqn.outvars for version in demand.versions(block, v)}
            for version in sorted(versions or {None}, key=lambda version: version or ""):
                self._copy(new, eqn, version, [demand.version(block, v, version) for v in eqn.outvars])
        else:
            own = demand.reader(block)
            self._copy(new, eqn, own, [demand.version(block, v, own) for v in eqn.outvars])
            for k, i in enumerate(demand.handed_on(block, eqn)):
                if i is not None:
                    new.same[eqn.outvars[k]] = eqn.invars[i]

    def _copy(self, new: Rewritten, eqn: core.JaxprEqn, version: Version, made: Sequence[Version]) -> None:
        """The equation on a version of its operands; `made` is the version of each result."""
        depend = self.demand.flow.dependence(eqn)
        matters = set(range(len(eqn.invars))) if eqn.effects else set()
        for k, v in enumerate(eqn.outvars):
            if made[k] in {found for found, _ in new.block.need.get(v, ())}:
                matters |= depend[k]
        operands = [self.look_up(new, v, version if i in matters else ANY) for i, v in enumerate(eqn.invars)]
        results = []
        for v, found in zip(eqn.outvars, made, strict=True):
            # What no version changes is made by each copy, and read from the first.
            first = (v, found) not in new.variables and v not in new.same
            results.append(v if found is None and first else core.Var(v.aval))
            new.variables.setdefault((v, found), results[-1])
        new.equations.append(eqn.replace(invars=operands, outvars=results))

    # --- equations with fragments in them ---

    def _rewrite_bodies(self, new: Rewritten, position: int, eqn: core.JaxprEqn) -> None:
        block, demand, kind = new.block, self.demand, control_flow(eqn)
        inner, wiring = block.inner[position], jaxprs.bodies(eqn)
        handed_on = demand.handed_on(block, eqn)
        # Which results there will be: positions and versions.
        certain = {k for k, v in enumerate(eqn.outvars) if self._certain(block, v)}
        if kind in ("scan", "while"):
            carry = {k: inner[-1].jaxpr.invars[i] for i, k in wiring[-1].carry}
            made = [(k, version) for k, v in enumerate(eqn.outvars)
                    for version in (demand.kept(inner[-1], carry[k]) if k in carry
                                    else self._results(block, v, handed_on[k]))]  # fmt: skip
            certain |= {k for k, v in carry.items() if self._certain(inner[-1], v)}
        else:
            mark = FragmentMark.of(eqn)
            made = [(k, version) for k, v in enumerate(eqn.outvars)
                    for version in self._results(block, v, handed_on[k], mark)]  # fmt: skip
        if kind in ("call", "scan") and self._is_of_newest(inner[0], made):
            self._keep(new, eqn, inner[0], handed_on)
            return
        tests = len(inner) - 1 if kind == "while" else 0
        closed = []
        operands: list[list[list[Any]]] = []  # by body, and by its input: the operand's versions
        for i, (one, body) in enumerate(zip(inner, wiring, strict=True)):
            inputs = {(v, version): v if n == 0 else core.Var(v.aval) for v in one.jaxpr.invars
                      for n, version in enumerate(demand.kept(one, v))}  # fmt: skip
            operands.append([
                [self._operand(new, one, v, eqn.invars[at], version) for version in demand.kept(one, v)]
                for v, at in zip(one.jaxpr.invars, body.operands, strict=True)
            ])  # fmt: skip
            ends = ([(0, demand.reader(one))], {0}) if i < tests else (made, certain)
            closed.append(self._body(eqn, i, one, inputs, *ends))
        results = self._build(new, eqn, kind, closed, operands, made)
        for (k, version), result in zip(made, results, strict=True):
            if handed_on[k] is None:
                found = demand.version(block, eqn.outvars[k], version)
                new.variables.setdefault((eqn.outvars[k], found), result)
        for k, source in enumerate(handed_on):
            if source is not None:
                new.same[eqn.outvars[k]] = eqn.invars[source]

    def _is_of_newest(self, body: Block, made: Sequence[tuple[int, Version]]) -> bool:
        """Whether the newest version of everything goes in and comes out of a body, and nothing else."""
        goes_in = (self.demand.kept(body, v) == [None] for v in body.jaxpr.invars)
        return all(goes_in) and all(version is None for _, version in made) and _reads_newest(body)

    def _keep(self, new: Rewritten, eqn: core.JaxprEqn, body: Block, handed_on: Sequence[int | None]) -> None:
        """The equation with the body that it has: what is known of that holds for every staleness."""
        pairs = zip(body.jaxpr.invars, eqn.invars, strict=True)
        new.equations.append(
            eqn.replace(invars=[self._operand(new, body, v, atom, None) for v, atom in pairs])
        )
        for v, source in zip(eqn.outvars, handed_on, strict=True):
            if source is None:
                new.variables.setdefault((v, None), v)
            else:
                new.same[v] = eqn.invars[source]

    def _results(
        self, block: Block, result: Any, handed_on: int | None, mark: FragmentMark | None = None
    ) -> list[Version]:
        """Versions of a result that come out of a body; a fragment computes its own, whoever reads it."""
        if handed_on is not None:
            return []
        if mark is not None:
            return [self.demand.version(block, result, self.demand.version_of(mark.name))]
        return self.demand.kept(block, result)

    def _operand(self, new: Rewritten, one: Block, variable: Any, operand: Any, version: Version) -> Any:
        real = any(found != ANY for found, _ in one.need.get(variable, ())) or not one.need.get(variable)
        return self.look_up(new, operand, version if real else ANY)

    def _body(
        self,
        eqn: core.JaxprEqn,
        index: int,
        one: Block,
        inputs: dict[tuple[Any, Version], Any],
        made: Sequence[tuple[int, Version]],
        certain: set[int],
    ) -> core.ClosedJaxpr:
        """A body whose inputs are the versions of the old one's, and whose outputs are `made`.

        Of a result that is not `certain` nobody needs a certain version: there may be another one only, which
        a fragment in the body reads.
        """
        new = self.run(one, inputs)
        ends = [(one.jaxpr.outvars[k], k in certain, version) for k, version in made]
        outputs = [
            self.look_up(new, v, version if needed and self._certain(one, v) else ANY)
            for v, needed, version in ends
        ]
        constants = jaxprs.constants_of(jaxprs.closed_bodies(eqn)[index])
        variables = [*one.jaxpr.constvars, *(v for v, _ in new.constants)]
        values = [*constants, *(value for _, value in new.constants)]
        # Loops and calls are traced anew, which finds what a check would.
        checked = control_flow(eqn) == "cond"
        return jaxprs.build(list(inputs.values()), outputs, new.equations, variables, values, checked)

    def _certain(self, block: Block, atom: Any) -> bool:
        return jaxprs.is_literal(atom) or any(version != ANY for version, _ in block.need.get(atom, ()))

    def _build(
        self,
        new: Rewritten,
        eqn: core.JaxprEqn,
        kind: str | None,
        closed: Sequence[core.ClosedJaxpr],
        operands: Sequence[list[list[Any]]],
        made: Sequence[tuple[int, Version]],
    ) -> list[Any]:
        """Appends the equation with other bodies; returns its results."""
        functions = [core.jaxpr_as_fun(one) for one in closed]
        flat = [v for versions in operands[-1] for v in versions]
        if kind == "cond":
            results = [core.Var(v.aval) for v in jaxprs.open_jaxpr(closed[0]).outvars]
            index = self.look_up(new, eqn.invars[0], self.demand.reader(new.block))
            changed = eqn.replace(invars=[index, *flat], outvars=results)
            new.equations.append(jaxprs.with_bodies(changed, closed))
            return results
        if kind == "call":
            return self._trace(new, _call(eqn, functions[0]), flat)
        body = jaxprs.bodies(eqn)[-1]
        carried = [i for i, _ in body.carry]
        num_consts = sum(len(operands[-1][i]) for i in range(carried[0] if carried else
                         len(operands[-1]) - len(body.sliced)))  # fmt: skip
        num_carried = sum(len(operands[-1][i]) for i in carried)
        if kind == "scan":
            function = _scan(eqn, functions[0], num_consts, num_carried)
            return self._trace(new, function, flat)
        test = [v for versions in operands[0][: len(operands[0]) - len(carried)] for v in versions]
        return self._trace(new, _while(functions, len(test), num_consts), [*test, *flat])

    def _trace(self, new: Rewritten, function: Callable, operands: Sequence[Any]) -> list[Any]:
        """Appends the equations of a function; returns its results."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
        traced = jax.make_jaxpr(function)(*shapes)
        jaxpr = jaxprs.open_jaxpr(traced)
        names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        new.constants += zip(jaxpr.constvars, jaxprs.constants_of(traced), strict=True)
        for one in jaxpr.eqns:
            invars = [v if jaxprs.is_literal(v) else names.get(v, v) for v in one.invars]
            new.equations.append(one.replace(invars=invars))
        return [v if jaxprs.is_literal(v) else names.get(v, v) for v in jaxpr.outvars]


def _reads_newest(block: Block) -> bool:
    """Whether nothing in a block, or in the blocks within, reads an older version of anything."""
    here = all(not version for reads in block.need.values() for version, _ in reads)
    return here and all(_reads_newest(one) for inner in block.inner.values() for one in inner)


def _call(eqn: core.JaxprEqn, function: Callable) -> Callable:
    def call(*operands):
        return function(*operands)

    call.__name__ = call.__qualname__ = str(eqn.params.get("name", eqn.primitive.name))
    return jax.jit(call)


def _scan(eqn: core.JaxprEqn, function: Callable, num_consts: int, num_carried: int) -> Callable:
    def scan(*operands):
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carried]

        def step(carry, rows):
            ends = function(*consts, *carry, *rows)
            return tuple(ends[:num_carried]), tuple(ends[num_carried:])

        rows, params = operands[num_consts + num_carried :], eqn.params
        last, stacked = jax.lax.scan(
            step, carry, rows, params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        return *last, *stacked

    return scan


def _while(functions: Sequence[Callable], num_test: int, num_consts: int) -> Callable:
    test, body = functions

    def loop(*operands):
        of_test, of_body = operands[:num_test], operands[num_test : num_test + num_consts]
        return jax.lax.while_loop(
            lambda carry: test(*of_test, *carry)[0],
            lambda carry: tuple(body(*of_body, *carry)),
            tuple(operands[num_test + num_consts :]),
        )

    return loop
