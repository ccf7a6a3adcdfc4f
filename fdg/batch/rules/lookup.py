"""Batch rules (`result.Rule`) of `gather` and `scatter`."""

from typing import Any

from fdg.batch.rules.result import Axis, Rule, RuleResult, every_result, shape_of


def _gather(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """A look-up of rows in a split table is reduced over devices; other batch axes are kept.

    Operand 0 is the table, operand 1 the indices. None if no rule fits.
    """
    (axis, index), dims = operands, eqn.params["dimension_numbers"]  # axes of the table, of the indices
    rank, sizes = len(shape_of(eqn.outvars[0])), eqn.params["slice_sizes"]
    index_axes = [d for d in range(rank) if d not in dims.offset_dims]  # the indices' axes in the result
    if axis is None:
        return every_result(eqn, index_axes[index]) if index is not None and index < len(index_axes) else None
    if axis in dims.operand_batching_dims:
        position = dims.start_indices_batching_dims[dims.operand_batching_dims.index(axis)]
        return every_result(eqn, index_axes[position], *([1] if index not in (None, position) else []))
    removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    if axis not in removed and sizes[axis] == shape_of(eqn.invars[0])[axis]:
        window_axes = [d for d in range(len(sizes)) if d not in removed]
        return every_result(
            eqn, dims.offset_dims[window_axes.index(axis)], *([1] if index is not None else [])
        )
    if index is not None and index < len(index_axes):  # both are split: the table is gathered
        return every_result(eqn, index_axes[index], 0)
    if axis in dims.start_index_map and sizes[axis] == 1:
        return every_result(eqn, None, reduced=True)
    return None


def _scatter(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Rows of a split batch that are added to a replicated table are reduced over devices.

    Operand 0 is the table, operand 1 the indices, operand 2 the updates. None if no rule fits.
    """
    dims = eqn.params["dimension_numbers"]
    shape, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    index_axes = [d for d in range(len(updates)) if d not in dims.update_window_dims]
    removed = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window_axes = [d for d in range(len(shape)) if d not in removed]

    def matches(*expected: Axis) -> bool:
        return all(a is None or a == e for a, e in zip(operands, expected, strict=True))

    for d in range(len(shape)):
        if d in dims.operand_batching_dims:
            position = dims.scatter_indices_batching_dims[dims.operand_batching_dims.index(d)]
            if matches(d, position, index_axes[position]):
                return every_result(eqn, d)
        elif d in window_axes:
            position = dims.update_window_dims[window_axes.index(d)]
            if updates[position] == shape[d] and matches(d, None, position):
                return every_result(eqn, d)
    is_reduction = eqn.primitive.name in ("scatter-add", "scatter-min", "scatter-max")
    for position, d in enumerate(index_axes):
        if is_reduction and matches(None, position, d):
            return every_result(eqn, None, reduced=True)
    return None


RULES: dict[str, Rule] = {  # by the name of the primitive
    "gather": _gather,
    **dict.fromkeys("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split(), _scatter),
}
