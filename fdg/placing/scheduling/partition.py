"""From an opened iteration to a schedule with as few programs as the dependencies between groups allow.

opened     a region of operations and loops
placed     ... with the groups of each operation                     (placement)
schedule   a group's operations as programs, merged, and transfers   (programs)
           with live ranges, donations and names                     (liveness)
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from jax.extend import core

from fdg.batch.lengths import smallest_equivalent
from fdg.identity_cache import IdentityCache
from fdg.placing.regions.region import Opened
from fdg.placing.scheduling.axes import batch_axes
from fdg.placing.scheduling.grouping import make_schedule
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

    `axes` are those of the state's leaves. `sizes` are the numbers of devices of the groups, in the policy's
    order; the first group runs what no rule assigns. Without `platforms`, all are the same. `newer` fragments
    wait for newer parameters than those before them (`staleness.lag`): such an operation starts a program.
    """
    order, where = tuple(sizes), tuple((platforms or {}).items())
    placed = _PLACED(opened, (order, where), lambda: Placement(opened, order, platforms))
    # For each set of groups that run operations together, the smallest number of devices that is equivalent
    # to theirs in all later passes (see `batch.lengths`).
    units = {
        together: smallest_equivalent(math.lcm(*(sizes[group] for group in together)), opened.lengths)
        for together in dict.fromkeys(placed.groups[op] for op in placed.region.operations())
    }

    def schedule() -> Schedule:
        of = batch_axes(placed, axes, units)

        @functools.cache
        def value_of(variable: core.Var, group: str) -> Value:
            return Value(variable, group, of.get(variable))

        made = make_schedule(placed, value_of, len(axes), newer)
        return dataclasses.replace(made, steps=with_names(made.steps))

    return _SCHEDULES(placed, (tuple(axes), tuple(units.items()), newer), schedule)


_PLACED: IdentityCache[Placement] = IdentityCache(max_entries=16)
_SCHEDULES: IdentityCache[Schedule] = IdentityCache(max_entries=64)
