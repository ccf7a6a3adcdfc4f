"""From an opened iteration to a schedule with as few programs as the dependencies between groups allow.

Passes over plain values, each of which can be printed:

    opened     region of operations and loops
    placed     ... with the groups of each operation           (residents)
    levelled   a group's operations as programs, and transfers     (levels)
    merged     programs that no other group waits for are merged   (merging)
    ordered    level by level                                  (drafts)
    schedule   with names, live ranges and donations           (naming, lifetimes)
"""

import math
from collections.abc import Mapping, Sequence

from fdg.batch.lengths import smallest_equivalent
from fdg.identity_cache import IdentityCache
from fdg.placing.regions.region import Opened
from fdg.placing.scheduling.axes import batch_axes
from fdg.placing.scheduling.drafts import Values, in_order
from fdg.placing.scheduling.levels import assign_levels
from fdg.placing.scheduling.lifetimes import Lifetimes
from fdg.placing.scheduling.merging import merge
from fdg.placing.scheduling.naming import find_origins, program_names
from fdg.placing.scheduling.residents import Placement, place_operations
from fdg.placing.scheduling.schedule import Schedule


def partition(
    opened: Opened,
    axes: Sequence[int | None],
    sizes: Mapping[str, int],
    platforms: Mapping[str, str] | None = None,
    newer: frozenset[str] = frozenset(),
) -> Schedule:
    """Places every operation of an opened iteration and groups them into programs.

    Args:
      axes: the batch axis of each leaf of the state.
      sizes: the number of devices of each group, in the policy's order. The first group runs what no rule
        assigns.
      platforms: the platform of each group's devices; None if all are the same.
      newer: fragments that wait for newer parameters than those before them (`staleness.lag`): such an
        operation starts a program.
    """
    order, where = tuple(sizes), tuple((platforms or {}).items())
    num_carried = len(axes) + opened.has_token
    placed = _PLACED(
        opened,
        (num_carried, order, where),
        lambda: place_operations(opened, num_carried, order, platforms),
    )
    units = _units(placed, sizes)
    return _SCHEDULES(
        placed,
        (tuple(axes), tuple(units.items()), newer),
        lambda: _schedule(opened, placed, axes, units, order, newer),
    )


_PLACED: IdentityCache[Placement] = IdentityCache(most=16)
_SCHEDULES: IdentityCache[Schedule] = IdentityCache(most=64)


def _units(placed: Placement, sizes: Mapping[str, int]) -> dict[frozenset[str], int]:
    """For each set of groups that run operations together, the smallest number of devices that is equivalent
    to theirs in all later passes (see `batch.lengths`).
    """
    known = placed.opened.lengths
    return {
        together: smallest_equivalent(math.lcm(*(sizes[group] for group in together)), known)
        for together in dict.fromkeys(placed.groups[op] for op in placed.region.operations())
    }


def _schedule(
    opened: Opened,
    placed: Placement,
    axes: Sequence[int | None],
    units: Mapping[frozenset[str], int],
    order: Sequence[str],
    newer: frozenset[str],
) -> Schedule:
    carried = [*axes, *[None] * opened.has_token]
    values = Values(batch_axes(placed, carried, units))
    levelled = assign_levels(placed, values, len(axes), newer)
    ordered = in_order(merge(levelled.draft, order, newer), order)
    names, origins = program_names(ordered, placed), find_origins(placed.region, len(carried))
    steps = Lifetimes(names, origins).steps(ordered, "iteration")
    return Schedule(steps, levelled.starts, levelled.constants, levelled.carry, levelled.metrics)
