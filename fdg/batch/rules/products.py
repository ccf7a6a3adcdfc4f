"""Batch rules (`result.Rule`) of matrix products, convolutions and batched linear algebra."""

from typing import Any

from fdg import jaxprs
from fdg.batch.rules.result import Axis, Rule, RuleResult, except_axes, locally, same, shape_of
from fdg.jaxprs.classes import CLASSES

Role = tuple[str, int]
"""The role of an operand's axis: ("sum", index among the contracted axes) or ("out", axis of the result)."""


def _dot_general(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Batch axes and free axes are kept; contracted axes are reduced over devices."""
    contracting, batch = eqn.params["dimension_numbers"]
    ranks = [len(shape_of(v)) for v in eqn.invars]

    def role(side: int) -> Role | None:
        axis = operands[side]
        if axis is None:
            return None
        if axis in contracting[side]:
            return "sum", tuple(contracting[side]).index(axis)
        if axis in batch[side]:
            return "out", tuple(batch[side]).index(axis)
        free = [a for a in range(ranks[side]) if a not in contracting[side] and a not in batch[side]]
        num_left = ranks[0] - len(contracting[0]) - len(batch[0]) if side else 0
        return "out", len(batch[side]) + num_left + free.index(axis)

    return _product(eqn, role(0), role(1))


def _product(eqn: Any, left: Role | None, right: Role | None) -> RuleResult | None:
    """The batch axis is kept or contracted; if the operands' axes differ, the smaller operand is gathered."""
    gathered: tuple[int, ...] = ()
    if left and right and left != right:
        larger = jaxprs.bytes_of(eqn.invars[1].aval) > jaxprs.bytes_of(eqn.invars[0].aval)
        gathered, left, right = ((0,), None, right) if larger else ((1,), left, None)
    role = left or right
    if role is None:
        return None
    kind, axis = role
    return RuleResult((None,), gathered, True) if kind == "sum" else RuleResult((axis,), gathered)


def _convolution(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Batches and output features are kept, and input features are contracted, as in a matrix product."""
    # The first two positions are of batch and features; for the kernel, of output and input features.
    lhs, rhs, out = eqn.params["dimension_numbers"]
    features, batches = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    groups = max(features, batches)
    if groups == 1:
        left, right = (
            {lhs[0]: ("out", out[0]), lhs[1]: ("sum", 0)},
            {rhs[0]: ("out", out[1]), rhs[1]: ("sum", 0)},
        )
        roles = [None if a is None else side.get(a) for a, side in zip(operands, (left, right), strict=True)]
        has_unknown = any(a is not None and role is None for a, role in zip(operands, roles, strict=True))
        return None if has_unknown else _product(eqn, *roles)
    # `vmap` turns kernels that differ by row into groups: their axis is split, and so are the groups.
    if operands == [lhs[1] if features > 1 else lhs[0], rhs[0]]:
        return RuleResult((out[1],), local=True, multiples=(groups,))
    return RuleResult((out[0],)) if batches == 1 and operands == [lhs[0], None] else None


def _matrices(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Linear algebra on the last two axes of matrices, or the last axis of vectors; other axes are kept."""
    num_leading = max(len(shape_of(v)) for v in eqn.invars) - 2
    return None if any(axis is not None and axis >= num_leading for axis in operands) else same(eqn, operands)


def _triangular_solve(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Right-hand sides are independent, so their axis can be split."""
    rank = len(shape_of(eqn.invars[1]))
    free = rank - 1 if eqn.params["left_side"] else rank - 2
    return RuleResult((free,)) if operands == [None, free] else _matrices(eqn, operands)


RULES: dict[str, Rule] = {  # by the name of the primitive
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(CLASSES["linear algebra"] - {"fft"}, locally(_matrices)),
    "triangular_solve": locally(_triangular_solve),
    "lu_pivots_to_permutation": locally(except_axes()),
}
