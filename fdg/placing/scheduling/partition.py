"""Turns an opened iteration into a schedule with as few programs as dependencies between groups allow.

value                                                      made by
a region of operations and loops                           regions.opening
the groups of each operation                               placement
the batch axis of each variable                            axes
each group's operations as programs, and transfers         grouping
the schedule, with live ranges, donations and names        liveness
transfers where they are first needed                      late_moves
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from jax.extend import core

from fdg.batch.lengths import smallest_equivalent
from fdg.placing.regions.region import Opened
from fdg.placing.scheduling.axes import batch_axes
from fdg.placing.scheduling.grouping import make_schedule
from fdg.placing.scheduling.late_moves import with_late_moves
from fdg.placing.scheduling.liveness import with_names
from fdg.placing.scheduling.placement import Placement
from fdg.placing.scheduling.schedule import Schedule, Value


def partition(
    opened: Opened,
    axes: Sequence[int | None],
    sizes: Mapping[str, int],
    platforms: Mapping[str, str] | None = None,
    newer: frozenset[str] = frozenset(),
) -> Schedule:
    """Places every operation of an opened iteration and groups them into programs.

    `axes` are the batch axes of the state's leaves. `sizes` are the groups' `num_batch_parts`, in the
    policy's order; the first group runs operations that no rule assigns. Without `platforms`, all groups are
    on the same platform. The fragments `newer` read newer parameters than earlier fragments
    (`staleness.lag`), so no program has fragments of both kinds.
    """
    placement = _place(opened, tuple(sizes), tuple((platforms or {}).items()))
    # For each set of groups that run an operation, the smallest number of devices that is equivalent to
    # theirs in all later passes (see `batch.lengths`).
    equivalent_devices = {
        groups: smallest_equivalent(math.lcm(*(sizes[group] for group in groups)), opened.lengths)
        for groups in dict.fromkeys(placement.groups[op] for op in placement.region.operations())
    }
    return _schedule(placement, tuple(axes), tuple(equivalent_devices.items()), newer)


@functools.lru_cache(maxsize=16)
def _place(opened: Opened, order: tuple[str, ...], platforms: tuple[tuple[str, str], ...]) -> Placement:
    return Placement(opened, order, dict(platforms))


@functools.lru_cache(maxsize=64)
def _schedule(
    placement: Placement,
    axes: tuple[int | None, ...],
    equivalent_devices: tuple[tuple[frozenset[str], int], ...],
    newer: frozenset[str],
) -> Schedule:
    axis_of = batch_axes(placement, axes, dict(equivalent_devices))

    @functools.cache
    def value_of(variable: core.Var, group: str) -> Value:
        return Value(variable, group, axis_of.get(variable))

    schedule = with_late_moves(make_schedule(placement, value_of, len(axes), newer))
    return dataclasses.replace(schedule, steps=with_names(schedule.steps))
