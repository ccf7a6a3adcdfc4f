"""The result of a batch rule, and helpers of rules."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Axis = int | None
"""The axis along which a value is split over devices; None if the value is replicated."""


class RuleResult(NamedTuple):
    """The effect of an operation on batch axes."""

    axes: tuple[Axis, ...]  # the batch axes of its results
    gathered: tuple[int, ...] = ()  # positions of operands that are replicated before the operation runs
    reduced: bool = False  # True if each device has a summand of the results, which are all-reduced
    # True to run each device's part in a `shard_map`, because XLA's partitioner would communicate needlessly
    local: bool = False
    # numbers of the equation that must be multiples of the number of devices, such as `feature_group_count`
    multiples: tuple[int, ...] = ()


Rule = Callable[[Any, list[Axis]], RuleResult | None]
"""Maps (equation, axes of operands, at least one not None) to a result; None to gather all operands."""


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; () if it has no shape."""
    return tuple(getattr(atom.aval, "shape", ()))


def first_axis(axes: Sequence[Axis]) -> Axis:
    """The first axis that is not None.

    >>> first_axis([None, 1, 0])
    1
    """
    return next((axis for axis in axes if axis is not None), None)


def every_result(eqn: Any, axis: Axis, *gathered: int, reduced: bool = False) -> RuleResult:
    """The rule result in which all results have the same axis."""
    return RuleResult((axis,) * len(eqn.outvars), tuple(gathered), reduced)


def same(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Rule: operands and results have the same axis; operands that are split otherwise are gathered.

    All shapes are equal, or ().
    """
    axis = first_axis(operands)
    return every_result(eqn, axis, *[i for i, other in enumerate(operands) if other not in (None, axis)])


def except_axes(*names: str) -> Rule:
    """Rule for operations that cannot be split along some axes, and keep the others.

    These axes are `params[name]` for the first of `names` that the equation has; without one, the last axis.
    """

    def rule(eqn: Any, operands: list[Axis]) -> RuleResult | None:
        axes = next((eqn.params[name] for name in names if name in eqn.params), -1)
        rank = len(shape_of(eqn.invars[0]))
        whole_axes = {axis % rank for axis in (axes if isinstance(axes, tuple | list) else (axes,))}
        return None if any(axis in whole_axes for axis in operands) else same(eqn, operands)

    return rule


def removing(name: str) -> Rule:
    """Rule for operations that remove the axes `params[name]` of their operand, which cannot be split."""

    def rule(eqn: Any, operands: list[Axis]) -> RuleResult | None:
        (axis,), removed = operands, eqn.params[name]
        removed = removed if isinstance(removed, tuple) else (removed,)
        return None if axis is None or axis in removed else every_result(eqn, position_without(axis, removed))

    return rule


def locally(rule: Rule) -> Rule:
    """Marks a rule's results `local`: parts are independent, which XLA's partitioner does not recognise."""

    def mark_local(eqn: Any, operands: list[Axis]) -> RuleResult | None:
        result = rule(eqn, operands)
        return result and result._replace(local=True)

    return mark_local


def position_without(axis: int, removed: Sequence[int]) -> int:
    """The position of an axis after the axes `removed` are removed.

    >>> position_without(2, [0, 3])
    1
    """
    return axis - sum(other < axis for other in removed)


def merged_axis(shape: Sequence[int], axis: int, new_shape: Sequence[int]) -> Axis:
    """The position of an axis after a reshape, if it is the major axis among the merged or split axes.

    >>> merged_axis((4, 3), 0, (12,)), merged_axis((3, 4), 1, (12,)), merged_axis((12, 2), 0, (4, 3, 2))
    (0, None, 0)
    """
    elements_before, elements = math.prod(shape[:axis]), 1
    for position, size in enumerate(new_shape):
        if elements == elements_before and size > 1:
            return position
        elements *= size
    return None
