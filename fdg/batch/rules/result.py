"""The result of a batch rule, and helpers of rules."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Axis = int | None
"""The axis of a value that is split over devices; None if every device holds all of it."""


class RuleResult(NamedTuple):
    """What an operation does with its operands' batch axes."""

    axes: tuple[Axis, ...]  # the batch axes of its results
    gathered: tuple[int, ...] = ()  # positions of operands that are replicated first
    reduced: bool = False  # whether each device has a share of the results, which are all-reduced
    # run each device's part in a `shard_map`, because the partitioner would communicate needlessly
    local: bool = False
    divided: tuple[int, ...] = ()  # parameters that are divided by the number of devices


Rule = Callable[[Any, list[Axis]], RuleResult | None]
"""(equation, axes of its operands, at least one of them not None) to a result; None: all operands whole."""


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; () without one."""
    return tuple(getattr(atom.aval, "shape", ()))


def first(found: Sequence[Axis]) -> Axis:
    """The first axis that is not None.

    >>> first([None, 1, 0])
    1
    """
    return next((axis for axis in found if axis is not None), None)


def every_result(eqn: Any, axis: Axis, *gathered: int, reduced: bool = False) -> RuleResult:
    """All results have the same axis."""
    return RuleResult((axis,) * len(eqn.outvars), tuple(gathered), reduced)


def same(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Operands and results have the same shape (or none) and axis; operands split otherwise are gathered."""
    axis = first(operands)
    return every_result(eqn, axis, *[i for i, a in enumerate(operands) if a not in (None, axis)])


def except_axes(*names: str) -> Rule:
    """Operations whose axes `params[name]` (or the last) must be whole; others are carried along."""

    def rule(eqn: Any, operands: list[Axis]) -> RuleResult | None:
        special = next((eqn.params[name] for name in names if name in eqn.params), -1)
        rank = len(shape_of(eqn.invars[0]))
        gone = {a % rank for a in (special if isinstance(special, tuple | list) else (special,))}
        return None if any(axis in gone for axis in operands) else same(eqn, operands)

    return rule


def locally(rule: Rule) -> Rule:
    """Operations with independent parts that the partitioner does not recognise."""

    def local(eqn: Any, operands: list[Axis]) -> RuleResult | None:
        found = rule(eqn, operands)
        return found and found._replace(local=True)

    return local


def without(axis: int, gone: Sequence[int]) -> int:
    """The position of an axis after others were removed.

    >>> without(2, [0, 3])
    1
    """
    return axis - sum(a < axis for a in gone)


def merged_axis(shape: Sequence[int], axis: int, new_shape: Sequence[int]) -> Axis:
    """The position of an axis after a reshape, if it is the major one of those merged or split.

    >>> merged_axis((4, 3), 0, (12,)), merged_axis((3, 4), 1, (12,)), merged_axis((12, 2), 0, (4, 3, 2))
    (0, None, 0)
    """
    before, ahead = math.prod(shape[:axis]), 1
    for position, size in enumerate(new_shape):
        if ahead == before and size > 1:
            return position
        ahead *= size
    return None
