"""Gathers sharded parameters over the batch's mesh axis where they meet the batch.

    x [B, d] split over batch,  w [d, f] split over (batch, model)
    x @ w    gathers w over batch first (fully sharded data parallelism); f stays split over model

Left alone, XLA may reshard x instead, which moves more bytes. So the shardings of leaves are propagated
through the jaxpr as far as operations keep their shape. These are hints: XLA decides the rest, and no
constraint can change the results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from fdg import jaxprs
from fdg.batch.flow import EquationFlow
from fdg.fragment import boundary_p
from fdg.placing.layout import BATCH, Spec
from fdg.rowwise import rowwise_p

Specs = Mapping[Any, Spec | None]  # by variable; None or absent: unknown


def gathered_operands(step: EquationFlow) -> list[int]:
    """The replicated operands of an operation that also has operands with a batch axis."""
    alone = step.local and step.eqn.primitive is not rowwise_p
    if step.bodies or alone or step.eqn.primitive is boundary_p:
        return []
    if all(axis is None for axis in step.operands):
        return []
    return [
        i
        for i, (atom, axis) in enumerate(zip(step.eqn.invars, step.operands, strict=True))
        if axis is None and not jaxprs.is_literal(atom) and atom.aval.shape and i not in step.gathered
    ]


def without_batch(spec: Spec, rank: int) -> PartitionSpec:
    """A leaf's spec without the batch's mesh axis."""
    entries: list[Any] = [tuple(axis for axis in axes if axis != BATCH) or None for axes in spec]
    return PartitionSpec(*entries, *[None] * (rank - len(entries)))


def result_specs(
    step: EquationFlow, known: Specs, outputs: Sequence[Sequence[Spec | None]]
) -> list[Spec | None]:
    """The specs of an equation's results."""
    eqn = step.eqn
    found: list[Spec | None] = [None] * len(eqn.outvars)
    if step.bodies:
        for body, specs in zip(jaxprs.bodies(eqn), outputs, strict=True):
            for k, j in enumerate(body.results):
                if k not in body.stacked:
                    found[k] = found[k] or specs[j]
        return found
    operands = [(v, known.get(v)) for v in eqn.invars if not jaxprs.is_literal(v)]
    if eqn.primitive.name == "transpose":
        spec = operands[0][1] if operands else None
        if spec is not None:
            full = (*spec, *[()] * (len(eqn.params["permutation"]) - len(spec)))
            return [tuple(full[i] for i in eqn.params["permutation"])]
        return found
    if any(axis is not None for axis in (*step.operands, *step.results)):
        return found
    shapes = {v.aval.shape: spec for v, spec in operands if spec is not None}
    return [shapes.get(getattr(v.aval, "shape", None)) for v in eqn.outvars]


def inputs(body: jaxprs.Body, eqn: Any, known: Specs) -> tuple[Spec | None, ...]:
    """The specs of the inputs of an equation's body."""
    found = []
    for i, operand in enumerate(body.operands):
        atom = eqn.invars[operand]
        spec = None if jaxprs.is_literal(atom) else known.get(atom)
        if spec is not None and i in body.sliced:
            spec = None if spec[0] else spec[1:]
        found.append(spec)
    return tuple(found)
