"""Merging: a program whose results no other group waits for becomes part of its group's next program.

    level 0  actors: act                     level 0  actors: act
    level 1  actors: count      merged:      level 2  actors: count judge
    level 2  actors: judge

`act` defines what another group reads at level 1, so it stays; only actors read the result of `count`.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from fdg.placing.scheduling.drafts import Draft, ProgramDraft

_NEVER = 1 << 30


def merge(draft: Draft, groups: Sequence[str], newer: frozenset[str] = frozenset()) -> Draft:
    """The draft with as few programs as the dependencies between groups allow, also in its loops.

    Args:
      groups: in the policy's order.
      newer: fragments that wait for newer parameters; a program without any is not merged into one with some.
    """
    programs = {(program.group, program.level): program for program in draft.programs}
    maker = {(v, p.group): p for p in draft.programs for op in p.operations for v in op.outputs}
    moved = {arrival.target: arrival.source for arrival in draft.arrivals}
    while found := _mergeable(draft, programs, maker, moved, groups, newer):
        early, late = found
        both = ProgramDraft(late.group, late.level, early.operations + late.operations)
        del programs[early.group, early.level]
        programs[late.group, late.level] = both
        maker.update(((v, both.group), both) for op in both.operations for v in op.outputs)
    arrivals = []
    for arrival in draft.arrivals:
        made_by = maker.get((arrival.source.variable, arrival.source.group))
        after = arrival.after if made_by is None else made_by.level
        arrivals.append(dataclasses.replace(arrival, after=after))
    return dataclasses.replace(
        draft,
        programs=tuple(programs.values()),
        arrivals=tuple(arrivals),
        loops=tuple(dataclasses.replace(loop, body=merge(loop.body, groups)) for loop in draft.loops),
    )


def _mergeable(
    draft: Draft, programs: dict, maker: dict, moved: dict, groups: Sequence[str], newer: frozenset[str]
) -> tuple[ProgramDraft, ProgramDraft] | None:
    """Two consecutive programs of a group that can be merged."""
    limit: dict[ProgramDraft, int] = collections.defaultdict(lambda: _NEVER)  # it must run before this level
    for program in programs.values():
        for op in program.operations:
            for v in op.inputs:
                source = moved.get(draft.values(v, program.group))
                made_by = source and maker.get((v, source.group))
                if made_by:
                    limit[made_by] = min(limit[made_by], program.level)
    for loop in draft.loops:
        for outer, _ in loop.enter:
            made_by = maker.get((outer.variable, moved.get(outer, outer).group))
            if made_by:
                limit[made_by] = min(limit[made_by], loop.level)
    for group in groups:
        levels = sorted(level for g, level in programs if g == group)
        for early, late in itertools.pairwise(levels):
            waits = [not newer.isdisjoint(programs[group, level].fragments) for level in (early, late)]
            if late < limit[programs[group, early]] and waits != [False, True]:
                return programs[group, early], programs[group, late]
    return None
