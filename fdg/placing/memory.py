"""How much memory an iteration needs at least: arrays that are alive together, between its operations.

inputs x, w: 8 + 4 B, kept alive
a = act(w, x)      12 + 8     a lives until `learn`
b = copy(a)        12 + 8 + 8
w' = learn(w, b)   12 + 8 + 4: a is gone; the peak was 28 B
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.batch.lengths import alike, lengths_of_equation
from fdg.placing.layout import Layout
from fdg.placing.scheduling.schedule import Call, Move, Schedule, Step, Value


def _share(variable: Any, axis: int | None, devices: int, layout: Layout | None = None) -> int:
    """Bytes of an array on one of the devices that it is split over."""
    layout = layout or Layout.of_batch(variable.aval.shape, axis, devices)
    return jaxprs.bytes_of(variable.aval) // layout.number


def peak_bytes(
    jaxpr: Any, axes: Sequence[int | None], devices: int, layouts: Mapping[int, Layout] | None = None
) -> int:
    """Of one device, for a closed jaxpr whose first inputs have these batch axes; inputs are kept alive.

    Operations count as a whole: what a fragment or a loop needs inside comes on top.

    Args:
      devices: that the batch is split over.
      layouts: of inputs, by position, that lie otherwise; the outputs at these positions lie like them.
    """
    body = jaxprs.open_jaxpr(jaxpr)
    variables = [*body.constvars, *body.invars]
    known = dict(zip(body.invars, axes, strict=False))
    placed: dict[Any, Layout] = {}
    for i, layout in (layouts or {}).items():
        both: list[Any] = [body.invars[i], body.outvars[i]]
        placed.update((v, layout) for v in both if not jaxprs.is_literal(v))
    return sum(_share(v, known.get(v), devices, placed.get(v)) for v in variables) + _peak_inside(
        body.eqns, known, devices, set(jaxprs.variables(body.outvars)), placed
    )


def _peak_inside(
    equations: Sequence[core.JaxprEqn],
    axes: dict[Any, int | None],
    devices: int,
    kept: set,
    layouts: Mapping[Any, Layout],
) -> int:
    """Peak of what the equations make; `kept` lives to the end, `layouts` are of what is split by rules."""
    last = {v: i for i, eqn in enumerate(equations) for v in eqn.invars if not jaxprs.is_literal(v)}
    unit = alike(devices, frozenset().union(*map(lengths_of_equation, equations)))
    alive: dict[Any, int] = {}
    peak = 0
    for i, eqn in enumerate(equations):
        operands = [None if jaxprs.is_literal(v) else axes.get(v) for v in eqn.invars]
        for v, axis in zip(eqn.outvars, batch_flow.equation_axes(eqn, operands, unit), strict=True):
            if not isinstance(v, core.DropVar):
                axes[v] = axis
                alive[v] = _share(v, axis, devices, layouts.get(v))
        peak = max(peak, sum(alive.values()))
        for v in list(alive):
            if v not in kept and last.get(v, i) <= i:
                del alive[v]
    return peak


def peak_by_group(
    schedule: Schedule, sizes: Mapping[str, int], together: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Of one device of each group, for a schedule.

    Args:
      sizes: over how many devices each group splits a batch.
      together: what groups are to be counted together, which are on the same devices: by their names, a name
        for all of them; None: each for itself.
    """
    names = together or {group: group for group in sizes}
    state: collections.Counter[str] = collections.Counter()
    for places in schedule.leaves:
        for value in places:
            state[names[value.group]] += _share_of(value, sizes)
    for _, value in schedule.constants:
        state[names[value.group]] += _share_of(value, sizes)
    peak = _peak_steps(schedule.steps, sizes, names)
    return {group: state[group] + peak[group] for group in dict.fromkeys(names.values())}


def _share_of(value: Value, sizes: Mapping[str, int]) -> int:
    return _share(value.variable, value.axis, sizes[value.group], value.layout)


def _peak_steps(
    steps: Sequence[Step], sizes: Mapping[str, int], names: Mapping[str, str]
) -> collections.Counter[str]:
    def reads(step: Step) -> list[Value]:
        if isinstance(step, Call):
            return list(step.inputs)
        return [a for a, _ in (step.pairs if isinstance(step, Move) else step.enter)]

    def makes(step: Step) -> list[Value]:
        if isinstance(step, Call):
            return list(step.outputs)
        return [b for _, b in (step.pairs if isinstance(step, Move) else step.leave)]

    last = {value: i for i, step in enumerate(steps) for value in reads(step)}
    alive: dict[Value, int] = {}
    lent: set[Value] = set()  # of what the group holds all the time: these count less than nothing
    peak: collections.Counter[str] = collections.Counter()
    for i, step in enumerate(steps):
        back = [value for value in makes(step) if value in lent]
        alive.update((value, _share_of(value, sizes)) for value in makes(step) if value not in lent)
        now: collections.Counter[str] = collections.Counter()
        for value, size in alive.items():
            now[names[value.group]] += size
        if isinstance(step, Call):
            axes = {v.variable: v.axis for v in step.inputs}
            outputs = {v.variable for v in step.outputs}
            layouts = {v.variable: v.layout for v in step.outputs if v.layout is not None}
            inside = _peak_inside(step.equations, axes, sizes[step.group], outputs, layouts)
            made = sum(alive[value] for value in step.outputs)
            now[names[step.group]] += max(0, inside - made)
        elif isinstance(step, Move):
            if step.lends:  # leaf by leaf: of one alone both layouts are there
                now[names[step.source]] += _lending(step, alive, lent, back, sizes)
        else:
            now.update(_peak_steps(step.steps, sizes, names))
        peak |= now
        for value in list(alive):
            if last.get(value, len(steps)) <= i and value not in lent:
                del alive[value]
        for value in back:
            del alive[value]
        lent.difference_update(back)
    return peak


def _lending(
    move: Move,
    alive: dict[Value, int],
    lent: set[Value],
    back: Sequence[Value],
    sizes: Mapping[str, int],
) -> int:
    """Marks what is lent away, and says how much is counted once too often or too rarely during the move."""
    owned = [a for a, _ in move.pairs if a not in alive]
    alive.update((value, -_share_of(value, sizes)) for value in owned)
    lent.update(owned)
    largest = max(_share_of(value, sizes) for value in owned or back)
    return largest - sum(_share_of(value, sizes) for value in owned)
