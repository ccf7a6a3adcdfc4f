"""Batch-axis propagation through one operation that has no bodies (inner jaxprs).

`unit` is the number of devices, or a smaller number that divides the same axis lengths (`batch.lengths`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fdg import keys
from fdg.batch.flow import EquationFlow
from fdg.batch.rules import RULES
from fdg.batch.rules.result import Axis, RuleResult, shape_of
from fdg.fragment import boundary_p


def divisible(atom: Any, axis: Axis, unit: int) -> Axis:
    """The axis if `unit` divides its length, else None."""
    return None if axis is None or shape_of(atom)[axis] % unit else axis


def apply_rule(eqn: Any, operands: Sequence[Axis], unit: int) -> RuleResult:
    """Applies an operation's rule to its operands' axes; if no rule applies, split operands are gathered."""
    if eqn.primitive is boundary_p:
        (axis,), declared = operands, eqn.params["axis"]
        return RuleResult((declared,), () if axis is None or axis == declared else (0,))
    split = tuple([i for i, axis in enumerate(operands) if axis is not None])
    gather_all = RuleResult((None,) * len(eqn.outvars), split)
    if not split or must_be_whole(eqn):
        return gather_all
    rule = RULES.get(eqn.primitive.name)
    result = rule(eqn, list(operands)) if rule else None
    if result is None or any(count % unit for count in result.multiples):
        return gather_all
    split_results = [(v, axis) for v, axis in zip(eqn.outvars, result.axes, strict=True) if axis is not None]
    if any(shape_of(v)[axis] % unit for v, axis in split_results):
        return gather_all  # the result's axis is not divisible
    return result._replace(axes=tuple(None if axis is None else int(axis) for axis in result.axes))


def must_be_whole(eqn: Any) -> bool:
    """Whether an operation must not be split, because of effects or draws that depend on the whole batch."""
    return bool(eqn.effects) or keys.draws_depend_on_batch(eqn)


def follow_operation(eqn: Any, operands: Sequence[Axis], levels: tuple[int, ...], unit: int) -> EquationFlow:
    """The flow of an operation without bodies, from the axes and levels of its operands (`AxisAndLevel`)."""
    result = apply_rule(eqn, operands, unit)
    operand_axes = tuple(None if i in result.gathered else axis for i, axis in enumerate(operands))
    return EquationFlow(
        eqn, operand_axes, result.axes, result.gathered, (), result.reduced, result.local, levels
    )


def slice_replicated_operands(step: EquationFlow, unit: int) -> EquationFlow:
    """Slices replicated operands on each device if the operation needs only parts of them there."""
    if all(axis is None for axis in (*step.operands, *step.results)):
        return step
    operands, sliced = list(step.operands), {}
    for i, atom in enumerate(step.eqn.invars):
        if operands[i] is None:
            axis = _axis_for_part(step, operands, i, shape_of(atom), unit)
            if axis is not None:
                operands[i] = sliced[i] = axis
    if not sliced:
        return step
    # With replicated operands split, each device may be able to run the operation locally.
    local = step.local or apply_rule(step.eqn, operands, unit).local
    return dataclasses.replace(step, operands=tuple(operands), sliced=tuple(sliced.items()), local=local)


def _axis_for_part(
    step: EquationFlow, operands: Sequence[Axis], position: int, shape: tuple[int, ...], unit: int
) -> Axis:
    """An axis along which the operand at `position` can be split without other changes; else None."""
    for axis, size in enumerate(shape):
        if size % unit == 0:
            trial_operands = [axis if i == position else other for i, other in enumerate(operands)]
            trial = apply_rule(step.eqn, trial_operands, unit)
            if not trial.gathered and trial.axes == step.results and trial.reduced == step.reduced:
                return axis
    return None
