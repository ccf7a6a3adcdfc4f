"""Two passes over the steps of a schedule: live ranges with donation, and names of programs.

The first pass goes backwards and tracks the set of values that later steps use:

    actors: act          reads w, x; no later step reads x, so x is freed; defines a
    actors -> learners: a            no later step reads a on the actors, so it is freed there
    learners: learn      reads a, w; defines w', which has the shape of w: w is freed and donated for w'
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence

from fdg.fragment import fragments_in
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Step, Value, all_steps, uses


def with_live_ranges(
    steps: Sequence[Step], live_out: Iterable[Value], constants: Collection[Value]
) -> tuple[Step, ...]:
    """Removes unused results, and sets the values that each step frees, donates or copies.

    In `steps`, programs return all results, and `copied` of a loop has all values that its body may donate.
    Of those values, only the ones that are used after the loop or enter it twice are copied. `live_out` are
    the values that are used after the steps; `constants` are never freed.
    """
    live = set(live_out)
    new_steps: list[Step] = []
    for step in reversed(steps):
        live_after, operands = live.union(constants), uses(step)
        freed = frozenset(i for i, value in enumerate(operands) if value not in live_after)
        if isinstance(step, Call):
            outputs = tuple(value for value in step.outputs if value in live)
            donated = donatable(operands, outputs, freed)
            new_steps.append(dataclasses.replace(step, outputs=outputs, freed=freed, donated=donated))
        elif isinstance(step, Move):
            new_steps.append(dataclasses.replace(step, freed=freed))
        else:
            entries = collections.Counter(operands)
            copied = {i for i in step.copied if entries[operands[i]] > 1 or operands[i] in live_after}
            new_steps.append(dataclasses.replace(step, copied=frozenset(copied)))
        live.update(operands)
    return tuple(reversed(new_steps))


def donatable(inputs: Sequence[Value], outputs: Sequence[Value], freed: Iterable[int]) -> frozenset[int]:
    """The freed inputs to donate: for each output, at most one of the same shape, dtype and layout."""

    def signature(value: Value) -> tuple:
        return value.shape, value.dtype, value.axis if value.layout is None else value.layout

    free_outputs = collections.Counter(map(signature, outputs))
    donated = set()
    for i in sorted(freed):
        if free_outputs[signature(inputs[i])]:
            free_outputs[signature(inputs[i])] -= 1
            donated.add(i)
    return frozenset(donated)


def with_names(steps: Sequence[Step], counts: collections.Counter[str] | None = None) -> tuple[Step, ...]:
    """Gives each program a unique name; programs in loops are named first.

    program                      its name
    actors: act step fold_in     "act+step": its outermost fragments
    learners: split reshape      "before learn": its group's next fragment; "after learn" if the group has
                                 only an earlier fragment

    A name that occurs again gets a number, as in "learn (2)". `counts` has the names so far; it is changed.
    """
    counts = collections.Counter() if counts is None else counts
    new_steps = [
        dataclasses.replace(step, steps=with_names(step.steps, counts)) if isinstance(step, Repeat) else step
        for step in steps
    ]
    for i, step in enumerate(new_steps):
        if isinstance(step, Call):
            parts = [step], new_steps[i + 1 :], new_steps[:i]
            fragments, later, earlier = (_fragments(part, step.group) for part in parts)
            name = "+".join(fragments) or (
                f"before {later[0]}" if later else f"after {earlier[-1]}" if earlier else "between fragments"
            )
            counts[name] += 1
            new_steps[i] = dataclasses.replace(
                step, name=name if counts[name] == 1 else f"{name} ({counts[name]})"
            )
    return tuple(new_steps)


def _fragments(steps: Sequence[Step], group: str) -> list[str]:
    """The outermost fragments that a group runs in these steps."""
    calls = [step for step, _ in all_steps(steps) if isinstance(step, Call) and step.group == group]
    return [name for call in calls if call.fragments for name in fragments_in(call.equations, outermost=True)]
