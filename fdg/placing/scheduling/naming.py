"""Names of programs, and the fragments that transferred values come from.

actors: act step fold_in     "act+step": its outermost fragments
learners: split reshape      "before learn": its group's next fragment, or "after" its last
"""

import collections
from collections.abc import Sequence

from jax.extend import core

from fdg.fragment import fragments_in
from fdg.placing.regions.region import Operation, Region
from fdg.placing.scheduling.drafts import CrossingDraft, Draft, ProgramDraft, StepDraft
from fdg.placing.scheduling.residents import Placement

Origins = dict[core.Var, tuple[str, ...]]


def program_names(draft: Draft, placement: Placement) -> dict[ProgramDraft, str]:
    """A unique name for each program, those in loops first."""
    names: dict[ProgramDraft, str] = {}
    _name(draft, placement, names, collections.Counter())
    return names


def _name(
    draft: Draft, placement: Placement, names: dict[ProgramDraft, str], used: collections.Counter[str]
) -> None:
    for loop in draft.loops:
        _name(loop.body, placement, names, used)
    for i, step in enumerate(draft.steps):
        if not isinstance(step, ProgramDraft):
            continue
        own = _fragments([step], step.group, placement)
        later = _fragments(draft.steps[i + 1 :], step.group, placement)
        earlier = _fragments(draft.steps[:i], step.group, placement)
        name = "+".join(own) or (
            f"before {later[0]}" if later else f"after {earlier[-1]}" if earlier else "between fragments"
        )
        used[name] += 1
        names[step] = name if used[name] == 1 else f"{name} ({used[name]})"


def _fragments(steps: Sequence[StepDraft], group: str, placement: Placement) -> list[str]:
    """The outermost fragments that a group runs in some steps."""
    found: list[str] = []
    for step in steps:
        if isinstance(step, CrossingDraft) or (isinstance(step, ProgramDraft) and step.group != group):
            continue
        inside = step.operations if isinstance(step, ProgramDraft) else step.loop.body.operations()
        mine = [op for op in inside if op.fragments and group in placement.groups[op]]
        found += dict.fromkeys(name for op in mine for name in fragments_in([op.eqn], outermost=True))
    return found


def find_origins(region: Region, num_carried: int) -> Origins:
    """The fragments that each variable comes from, through code between fragments."""
    origins: Origins = {}
    _find_origins(region, origins, region.inputs[:num_carried])
    return origins


def _find_origins(region: Region, origins: Origins, carried: Sequence[core.Var]) -> None:
    for _ in range(2):  # the second time round, what is carried has an origin too
        for item in region.items:
            if isinstance(item, Operation):
                through = dict.fromkeys(name for v in item.inputs for name in origins.get(v, ()))
                for v in item.outputs:
                    origins[v] = item.fragments or tuple(through)
                continue
            for inner, outer in item.entering:
                origins.setdefault(inner, origins.get(outer, ()))
            _find_origins(item.body, origins, item.carried)
            for result, end in zip(item.results, item.body.outputs, strict=True):
                origins[result] = origins.get(end, ())
        for v, end in zip(carried, region.outputs, strict=False):
            origins[v] = tuple(dict.fromkeys((*origins.get(end, ()), *origins.get(v, ()))))
