"""The backward pass of a flow: replicated values that all readers would take split are computed split.

If all readers of a replicated value (such as random keys made for a batch) take it split along one axis, each
device computes only its part. This changes no collective, only work. Without this pass the plans of the ten
algorithms have the same collectives, in half the time (PPO 0.04 s instead of 0.10 s). But on 8 devices, with
1,024 environments and layers of 8, an iteration of PPO takes 12.5 MFLOP on each device instead of 9.8, and
one of SAC 116 instead of 27 (XLA's own count).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fdg import jaxprs
from fdg.batch.equation import apply_rule
from fdg.batch.flow import AxisAndLevel, EquationFlow, Flow
from fdg.batch.rules.random import creates
from fdg.batch.rules.result import Axis, shape_of
from fdg.fragment import boundary_p

AS_MADE = object()
"""Of an output of a jaxpr, instead of an axis: whatever it has."""

FollowAgain = Callable[[Flow, tuple[Any, ...]], Flow]
"""(the flow of a body, axes its outputs are to have or `AS_MADE`) to its flow with such outputs."""


def find_requested(
    flow: Flow,
    values: Mapping[Any, AxisAndLevel],
    output_axes: Sequence[Any],
    unit: int,
    follow_again: FollowAgain,
) -> tuple[dict[Any, int], tuple[Axis, ...]]:
    """The replicated variables of a flow to compute split, and the axes requested of its inputs."""
    requests = _Requests(values, unit, follow_again)
    for atom, axis in zip(flow.jaxpr.outvars, output_axes, strict=True):
        requests.read(atom, None if axis is AS_MADE else axis)
    for each in reversed(flow.equations):
        operand_axes = requests.operands_of(each)
        for i, atom in enumerate(each.eqn.invars):
            requests.read(atom, operand_axes.get(i))
    return requests.split, tuple(map(requests.requested_axis, flow.jaxpr.invars))


class _Requests:
    """The axes along which variables are read, collected from the last equation to the first."""

    def __init__(self, values: Mapping[Any, AxisAndLevel], unit: int, follow_again: FollowAgain):
        self.values, self.unit, self.follow_again = values, unit, follow_again
        self.readers: dict[Any, set[Axis]] = {}  # None: one that needs all of it
        self.split: dict[Any, int] = {}  # variables that are to be made split

    def read(self, atom: Any, axis: Axis) -> None:
        if not jaxprs.is_literal(atom):
            self.readers.setdefault(atom, set()).add(axis)

    def requested_axis(self, variable: Any) -> Axis:
        """The one axis along which all readers take a replicated variable split, or None."""
        found = self.readers.get(variable, set())
        shared = self.values.get(variable, (None, 0))[0] is None
        return next(iter(found)) if shared and len(found) == 1 else None

    def operands_of(self, each: EquationFlow) -> dict[int, int]:
        """The axes along which an equation takes its replicated operands."""
        if each.bodies:
            return _of_bodies(self._call(each))
        if any(axis is not None for axis in each.results) or each.gathered or each.reduced:
            return dict(each.sliced)
        return self._shared_operation(each.eqn)

    def _shared_operation(self, eqn: Any) -> dict[int, int]:
        """Computes the results of an operation on replicated values split, if that is requested."""
        requested = tuple(map(self.requested_axis, eqn.outvars))
        if all(axis is None for axis in requested) or eqn.primitive is boundary_p or eqn.effects:
            return {}
        shapes = [shape_of(atom) for atom in eqn.invars]
        for operands in _operands_to_try(shapes, shape_of(eqn.outvars[0]), requested[0], self.unit):
            trial = apply_rule(eqn, [operands.get(i) for i in range(len(shapes))], self.unit)
            if not trial.gathered and not trial.reduced and trial.axes == requested:
                made = zip(eqn.outvars, trial.axes, strict=True)
                self.split.update((v, a) for v, a in made if a is not None)
                return operands
        if len(requested) == 1 and requested[0] is not None and creates(eqn, requested[0]):
            self.split[eqn.outvars[0]] = requested[0]
        return {}

    def _call(self, each: EquationFlow) -> EquationFlow:
        """Computes results of a call split, if that is requested and its body allows it."""
        requested = {v: axis for v in each.eqn.outvars if (axis := self.requested_axis(v)) is not None}
        if not requested or each.trips is not None or each.eqn.primitive.name == "cond":
            return each
        (body,), (inner,) = jaxprs.bodies(each.eqn), each.bodies
        outputs: list[Any] = [AS_MADE] * len(inner.outputs)
        for v, j in zip(each.eqn.outvars, body.results, strict=True):
            outputs[j] = requested.get(v, AS_MADE)
        made = self.follow_again(inner, tuple(outputs))
        if made.sliced or made.gathered:
            return each
        self.split.update(requested)
        return dataclasses.replace(each, bodies=(made,))


def _operands_to_try(
    shapes: Sequence[tuple[int, ...]], result: tuple[int, ...], requested: Axis, unit: int
) -> Iterator[dict[int, int]]:
    """Axes of replicated operands, by position, that could give the requested axis of the result."""
    if requested is not None:  # elementwise, perhaps with operands that are repeated along other axes
        alike = {
            i: requested
            for i, shape in enumerate(shapes)
            if len(shape) == len(result) and shape[requested] == result[requested]
        }
        if alike:
            yield alike
    for shape in dict.fromkeys(shapes):
        for axis, size in enumerate(shape):
            if size % unit == 0:
                yield {i: axis for i, s in enumerate(shapes) if s == shape}


def _of_bodies(each: EquationFlow) -> dict[int, int]:
    """The axes along which an equation's bodies take its replicated operands, if they agree."""
    found: dict[int, set[Axis]] = {}
    for body, inner in zip(jaxprs.bodies(each.eqn), each.bodies, strict=True):
        carried = {i for i, _ in body.carry}
        for i, operand in enumerate(body.operands):
            axis = inner.requested_axes[i]
            if axis is not None and i in body.sliced:
                axis += 1
            found.setdefault(operand, set()).add(None if i in carried else axis)
    found.update({i: {axis} for i, axis in each.sliced})
    agreed = {i: next(iter(axes)) for i, axes in found.items() if len(axes) == 1}
    return {i: axis for i, axis in agreed.items() if axis is not None}
