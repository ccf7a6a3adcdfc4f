"""Finds the batch axis of each variable in an opened iteration (`regions.region`).

region x, w:  (x [B, 3] split along 0, w [3] replicated)
  a = act(w, x)            a: 0, as its border declares
  rows[t] = a              rows: 1, since rows are stacked in front
  m = mean(a)              m: None
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.placing.regions.region import Crossing, Operation, Region, connected_sets
from fdg.placing.scheduling.placement import Placement

Axes = dict[Any, int | None]  # the batch axis of each variable; None if it is replicated

# For each set of groups, the smallest number of devices that divides the same axis lengths as the least
# common multiple of the groups' `num_batch_parts` (`batch.lengths`).
EquivalentDevices = Mapping[frozenset[str], int]


def batch_axes(placement: Placement, leaves: Sequence[int | None], devices: EquivalentDevices) -> Axes:
    """The batch axis of every variable.

    If one variable becomes another, at the start or end of a loop or from trip to trip, both have the same
    axis. `leaves` are the axes of the state's leaves.
    """
    region, declared_axes = placement.region, placement.opened.declared_axes
    axes: Axes = {}

    def set_axes(new_axes: Iterable[tuple[Any, int | None]]) -> None:
        """Sets axes; those that are unknown become the ones that borders declare."""
        axes.update((v, declared_axes.get(v) if axis is None else axis) for v, axis in new_axes)

    set_axes(zip(region.inputs, leaves, strict=False))
    before: Axes | None = None
    while axes != before:  # in each round, an axis may reach another carried value
        before = dict(axes)
        for step in region.walk():
            if isinstance(step, Operation):
                results = _result_axes(step, axes, devices[placement.groups[step]])
                set_axes(zip(step.eqn.outvars, results, strict=True))
            else:
                set_axes((after, axes.get(v)) for v, after in step.pairs if axes.get(after) is None)
    _unify(region, axes)
    return axes


def _result_axes(operation: Operation, axes: Axes, count: int) -> list[int | None]:
    """The batch axes of an operation's results. A stacked result of a loop has one more axis in front."""
    row = None if operation.row is None else axes.get(operation.row)
    if row is not None:
        return [row + 1]
    operands = [None if jaxprs.is_literal(v) else axes.get(v) for v in operation.eqn.invars]
    return batch_flow.equation_axes(operation.eqn, operands, count)


def _unify(region: Region, axes: Axes) -> None:
    """Gives variables that become each other the same axis, or None if they have different axes."""
    crossings = (step for step in region.walk() if isinstance(step, Crossing))
    pairs = [*region.carry, *(pair for crossing in crossings for pair in crossing.pairs)]
    for variables in connected_sets(pairs).values():  # a set occurs once for each of its variables
        known_axes = {axis for v in variables if (axis := axes.get(v)) is not None}
        axes.update(dict.fromkeys(variables, known_axes.pop() if len(known_axes) == 1 else None))
