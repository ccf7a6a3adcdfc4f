"""Finds sharded parameters to gather over the mesh axis `batch` before they are combined with a split batch.

    x [B, d] split over batch,  w [d, f] split over (batch, model)
    x @ w    gathers w over batch first (fully sharded data parallelism); f stays split over model

Otherwise XLA may reshard x instead, which moves more bytes. To know how w is split, the specs of leaves are
propagated through transposes, and from operands to results of the same shape. Where a spec is
unknown, XLA decides, which cannot change the results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from fdg import jaxprs
from fdg.batch.flow import EquationFlow
from fdg.fragment import boundary_p
from fdg.lowering.mesh import partition_spec
from fdg.placing.layout import BATCH, Spec
from fdg.rowwise import rowwise_p

Specs = Mapping[Any, Spec | None]  # the spec of each variable; None or absent if unknown


def gathered_operands(step: EquationFlow) -> list[int]:
    """The positions of operands that may be sharded parameters and are combined with a split batch.

    These are the operands without a batch axis of an operation that also has operands with a batch axis.
    """
    # A rowwise call becomes a `shard_map` too, but its operands are gathered before it.
    in_shard_map = step.local and step.eqn.primitive is not rowwise_p
    has_batch = any(axis is not None for axis in step.operands)
    if step.bodies or in_shard_map or step.eqn.primitive is boundary_p or not has_batch:
        return []
    return [
        i
        for i, (atom, axis) in enumerate(zip(step.eqn.invars, step.operands, strict=True))
        if axis is None and not jaxprs.is_literal(atom) and atom.aval.shape and i not in step.gathered
    ]


def without_batch(spec: Spec) -> PartitionSpec:
    """A leaf's spec without the batch's mesh axis."""
    return partition_spec(tuple(tuple(axis for axis in axes if axis != BATCH) for axes in spec))


def result_specs(
    step: EquationFlow, specs: Specs, body_output_specs: Sequence[Sequence[Spec | None]]
) -> list[Spec | None]:
    """The specs of an equation's results; `body_output_specs` are the specs of its bodies' outputs.

    A result has the spec of an operand of the same shape; a transpose permutes the spec of its operand.
    """
    eqn = step.eqn
    results: list[Spec | None] = [None] * len(eqn.outvars)
    if step.bodies:
        for body, output_specs in zip(jaxprs.bodies(eqn), body_output_specs, strict=True):
            for result, output in enumerate(body.results):
                if result not in body.stacked:
                    results[result] = results[result] or output_specs[output]
        return results
    operands = [(v, specs.get(v)) for v in eqn.invars if not jaxprs.is_literal(v)]
    if eqn.primitive.name == "transpose":
        spec = operands[0][1] if operands else None
        if spec is not None:
            padded = (*spec, *[()] * (len(eqn.params["permutation"]) - len(spec)))
            return [tuple(padded[i] for i in eqn.params["permutation"])]
        return results
    if any(axis is not None for axis in (*step.operands, *step.results)):
        return results
    shapes = {v.aval.shape: spec for v, spec in operands if spec is not None}
    return [shapes.get(getattr(v.aval, "shape", None)) for v in eqn.outvars]


def body_input_specs(body: jaxprs.Body, eqn: Any, specs: Specs) -> tuple[Spec | None, ...]:
    """The specs of the inputs of an equation's body, from the specs of its operands."""

    def spec_of(i: int, atom: Any) -> Spec | None:
        spec = None if jaxprs.is_literal(atom) else specs.get(atom)
        if spec is None or i not in body.sliced:
            return spec
        return None if any(spec[:1]) else spec[1:]  # one row lacks axis 0; unknown if that axis is split

    return tuple(spec_of(i, eqn.invars[operand]) for i, operand in enumerate(body.operands))
