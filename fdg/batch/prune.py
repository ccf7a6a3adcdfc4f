"""Dropping from a flow what nothing reads, as XLA does. What has an effect stays."""

import dataclasses

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.recall import Recall


def prune(flow: Flow) -> Flow:
    """A flow without the equations, and the gathers, that no output needs."""
    return _Pruner().flow(flow, frozenset(range(len(flow.outputs))))[0]


class _Pruner:
    """A body that is called from many places for the same results is pruned once."""

    def __init__(self):
        self._known: Recall[tuple[Flow, frozenset[int]]] = Recall()

    def flow(self, flow: Flow, outputs: frozenset[int]) -> tuple[Flow, frozenset[int]]:
        """What some of a flow's outputs need of it: of its equations, and which of its inputs."""
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
        """An equation for the sake of some of its results, and the operands that it then needs."""
        if not each.bodies or each.eqn.effects:
            return each, set(range(len(each.eqn.invars)))
        operands = {0} if each.eqn.primitive.name == "cond" else set()
        while True:  # what a loop carries may need more of what it carries
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
