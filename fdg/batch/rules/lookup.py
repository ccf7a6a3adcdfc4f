"""Rules of `gather` and `scatter`."""

from typing import Any

from fdg.batch.rules.result import Axis, Rule, RuleResult, every_result, shape_of


def _gather(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """A look-up of rows of a split batch is reduced over devices; another batch axis is carried along."""
    (axis, index), numbers = operands, eqn.params["dimension_numbers"]
    rank, sizes = len(shape_of(eqn.outvars[0])), eqn.params["slice_sizes"]
    of_index = [d for d in range(rank) if d not in numbers.offset_dims]  # axes of the indices, in the result
    if axis is None:
        return every_result(eqn, of_index[index]) if index is not None and index < len(of_index) else None
    if axis in numbers.operand_batching_dims:
        at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return every_result(eqn, of_index[at], *([1] if index not in (None, at) else []))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if axis not in gone and sizes[axis] == shape_of(eqn.invars[0])[axis]:
        kept = [d for d in range(len(sizes)) if d not in gone]
        return every_result(eqn, numbers.offset_dims[kept.index(axis)], *([1] if index is not None else []))
    if index is not None and index < len(of_index):  # split indices into a split table
        return every_result(eqn, of_index[index], 0)
    if axis in numbers.start_index_map and sizes[axis] == 1:
        return every_result(eqn, None, reduced=True)
    return None


def _scatter(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Rows of a split batch that are added to a replicated table are reduced over devices."""
    numbers = eqn.params["dimension_numbers"]
    shape, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    of_index = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(shape)) if d not in gone]

    def fits(*expected: Axis) -> bool:
        return all(a is None or a == e for a, e in zip(operands, expected, strict=True))

    for d in range(len(shape)):
        if d in numbers.operand_batching_dims:
            at = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(d)]
            if fits(d, at, of_index[at]):
                return every_result(eqn, d)
        elif d in window:
            at = numbers.update_window_dims[window.index(d)]
            if updates[at] == shape[d] and fits(d, None, at):
                return every_result(eqn, d)
    adds = eqn.primitive.name in ("scatter-add", "scatter-min", "scatter-max")
    for at, d in enumerate(of_index):
        if adds and fits(None, at, d):
            return every_result(eqn, None, reduced=True)
    return None


RULES: dict[str, Rule] = {
    "gather": _gather,
    **dict.fromkeys("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split(), _scatter),
}
