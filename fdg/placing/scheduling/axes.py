"""Finds the batch axis of each variable in an opened iteration (`regions.region`).

region x, w:  (x [B, 3] split along 0, w [3] replicated)
  a = act(w, x)            a: 0, as its border declares
  rows[t] = a              rows: 1, since rows are stacked in front
  m = mean(a)              m: None
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.placing.regions.region import Operation, Region, connected_sets
from fdg.placing.scheduling.placement import Placement

Axes = dict[Any, int | None]  # the batch axis of each variable; None if it is replicated

# For each set of groups, the smallest number of devices that divides the same axis lengths as the least
# common multiple of the groups' numbers of devices (`batch.lengths`).
EquivalentDevices = Mapping[frozenset[str], int]


def batch_axes(placement: Placement, leaves: Sequence[int | None], devices: EquivalentDevices) -> Axes:
    """The batch axis of every variable.

    If one variable becomes another, at the start or end of a loop or from trip to trip, both have the same
    axis. `leaves` are the axes of the state's leaves.
    """
    region = placement.region
    axes: Axes = dict(zip(region.inputs, leaves, strict=False))
    _follow(region, axes, placement, devices)
    _unify(region, axes)
    return axes


def _follow(region: Region, axes: Axes, placement: Placement, devices: EquivalentDevices) -> None:
    """Propagates batch axes from a region's inputs."""
    declared_axes = placement.opened.declared_axes

    def set_axes(variables: Iterable[core.Var], new_axes: Iterable[int | None]) -> None:
        pairs = zip(variables, new_axes, strict=True)
        axes.update((v, declared_axes.get(v) if axis is None else axis) for v, axis in pairs)

    # Each call to `set_axes` below replaces unknown axes by those that borders declare.
    set_axes(region.inputs, map(axes.get, region.inputs))
    for item in region.items:
        if isinstance(item, Operation):
            operands = [None if jaxprs.is_literal(v) else axes.get(v) for v in item.eqn.invars]
            row = None if item.row is None else axes.get(item.row)
            count = devices[placement.groups[item]]
            results = [row + 1] if row is not None else batch_flow.equation_axes(item.eqn, operands, count)
            set_axes(item.eqn.outvars, results)
            continue
        set_axes(item.body.inputs, map(axes.get, item.starts))
        for _ in range(len(item.body.inputs) + 1):  # in each round, an axis may reach another carried value
            _follow(item.body, axes, placement, devices)
            next_axes = [
                (v, axes.get(end)) for v, end in zip(item.body.inputs, item.body.outputs, strict=True)
            ]
            new_axes = [(v, axis) for v, axis in next_axes if axes.get(v) is None and axis is not None]
            if not new_axes:
                break
            axes.update(new_axes)
        set_axes(item.outputs, map(axes.get, item.body.inputs))


def _unify(region: Region, axes: Axes) -> None:
    """Gives variables that become each other the same axis, or None if they have different axes."""
    pairs = list(zip(region.inputs, region.outputs, strict=False))
    for loop in region.loops():
        pairs += zip(loop.body.inputs, loop.starts, strict=True)
        pairs += zip(loop.outputs, loop.body.outputs, strict=True)
        pairs += zip(loop.body.inputs, loop.body.outputs, strict=True)
    for variables in {
        id(variable_set): variable_set for variable_set in connected_sets(pairs).values()
    }.values():
        known_axes = {axis for v in variables if (axis := axes.get(v)) is not None}
        axes.update(dict.fromkeys(variables, known_axes.pop() if len(known_axes) == 1 else None))
