"""Batch rules (`result.Rule`) of operations that move elements: reshapes, slices, concatenation."""

from typing import Any

from fdg.batch.rules.result import (
    Axis,
    Rule,
    RuleResult,
    every_result,
    except_axes,
    first_axis,
    merged_axis,
    removing,
    same,
    shape_of,
)


def _broadcast_in_dim(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    return every_result(eqn, eqn.params["broadcast_dimensions"][operands[0]])


def _transpose(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    return every_result(eqn, tuple(eqn.params["permutation"]).index(operands[0]))


def _stack(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """The new axis moves the axes at and behind its position."""
    result, new_axis = same(eqn, operands), eqn.params["axis"]
    return result and result._replace(axes=tuple(a + (new_axis <= a) for a in result.axes if a is not None))


def _reshape(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """The batch axis is kept if it is the major axis among the merged or split axes."""
    shape, axis = shape_of(eqn.invars[0]), operands[0]
    if axis is None:
        return None
    order = eqn.params.get("dimensions")
    if order is not None:  # the operand is transposed first
        shape, axis = tuple(shape[d] for d in order), tuple(order).index(axis)
    position = merged_axis(shape, axis, shape_of(eqn.outvars[0]))
    return None if position is None else every_result(eqn, position)


def _tile(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    return same(eqn, operands) if eqn.params["reps"][operands[0]] == 1 else None


def _unless_cut(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Slices, updates of slices and padding keep axes whose length they do not change."""
    axis = first_axis(operands)
    arrays = [v for v in (*eqn.invars, *eqn.outvars) if len(shape_of(v)) == len(shape_of(eqn.invars[0]))]
    if axis is None or len({shape_of(v)[axis] for v in arrays if shape_of(v)}) != 1:
        return None
    if eqn.primitive.name == "pad" and tuple(eqn.params["padding_config"][axis]) != (0, 0, 0):
        return None
    return same(eqn, operands)


RULES: dict[str, Rule] = {  # by the name of the primitive
    **dict.fromkeys("slice dynamic_slice dynamic_update_slice pad".split(), _unless_cut),
    "split": except_axes("axis"),
    "concatenate": except_axes("dimension"),
    "rev": except_axes("dimensions"),
    "tile": _tile,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": removing("dimensions"),
    "reshape": _reshape,
    "stack": _stack,
    "unstack": removing("axis"),
}
