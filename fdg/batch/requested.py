"""The backward pass of batch-axis propagation: finds replicated values that each device needs only in part.

If all readers of a replicated value (such as random keys for a batch) split it along the same axis, each
device computes only its part. This changes no collective, but saves work. On 8 devices, with 1,024
environments and layers of 8 units, an iteration of PPO takes 9.8 MFLOP per device with this pass and 12.5
without it; an iteration of SAC takes 27 and 116 (counted by XLA). Without this pass, planning would take half
the time (PPO: 0.04 s instead of 0.10 s).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fdg import jaxprs
from fdg.batch.equation import apply_rule
from fdg.batch.flow import AxisAndLevel, EquationFlow, Flow
from fdg.batch.rules.random import can_create_split
from fdg.batch.rules.result import Axis, shape_of
from fdg.fragment import boundary_p

AS_COMPUTED = object()
"""In place of an output's axis: the output keeps the axis that it is computed with."""

FollowAgain = Callable[[Flow, tuple[Any, ...]], Flow]
"""Maps (the flow of a body, an axis or `AS_COMPUTED` for each output) to a flow with these output axes."""


def find_requested(
    flow: Flow,
    values: Mapping[Any, AxisAndLevel],
    output_axes: Sequence[Any],
    unit: int,
    follow_again: FollowAgain,
) -> tuple[dict[Any, int], tuple[Axis, ...]]:
    """Returns the replicated variables to compute split, with their axes, and `Flow.requested_axes`.

    `values` has the axis and level of each variable of the flow; `output_axes` has an axis or `AS_COMPUTED`
    for each output. `follow_again` is called for the bodies of calls.
    """
    requests = _Requests(values, unit, follow_again)
    for atom, axis in zip(flow.jaxpr.outvars, output_axes, strict=True):
        requests.add_reader(atom, None if axis is AS_COMPUTED else axis)
    for step in reversed(flow.equations):
        operand_axes = requests.operand_axes(step)
        for i, atom in enumerate(step.eqn.invars):
            requests.add_reader(atom, operand_axes.get(i))
    return requests.split, tuple(map(requests.requested_axis, flow.jaxpr.invars))


class _Requests:
    """The axes along which variables are read, collected from the last equation to the first."""

    def __init__(self, values: Mapping[Any, AxisAndLevel], unit: int, follow_again: FollowAgain):
        self.values, self.unit, self.follow_again = values, unit, follow_again
        # for each variable, the axes along which its readers split it; None for a reader that needs all of it
        self.readers: dict[Any, set[Axis]] = {}
        self.split: dict[Any, int] = {}  # the variables to compute split, with their axes

    def add_reader(self, atom: Any, axis: Axis) -> None:
        """Records that a reader splits a variable along an axis, or (None) needs all of it."""
        if not jaxprs.is_literal(atom):
            self.readers.setdefault(atom, set()).add(axis)

    def requested_axis(self, variable: Any) -> Axis:
        """The axis along which all readers split a replicated variable; None if there is none."""
        axes = self.readers.get(variable, set())
        is_replicated = self.values.get(variable, (None, 0))[0] is None
        return next(iter(axes)) if is_replicated and len(axes) == 1 else None

    def operand_axes(self, step: EquationFlow) -> dict[int, int]:
        """The axes along which an equation splits its replicated operands, by position."""
        if step.bodies:
            return _axes_in_bodies(self._split_call(step))
        if any(axis is not None for axis in step.results) or step.gathered or step.reduced:
            return dict(step.sliced)
        return self._split_operation(step.eqn)

    def _split_operation(self, eqn: Any) -> dict[int, int]:
        """Marks requested results of an operation on replicated values as split.

        Returns the axes along which the operation then splits its operands.
        """
        requested = tuple(map(self.requested_axis, eqn.outvars))
        if all(axis is None for axis in requested) or eqn.primitive is boundary_p or eqn.effects:
            return {}
        shapes = [shape_of(atom) for atom in eqn.invars]
        for operands in _candidate_axes(shapes, shape_of(eqn.outvars[0]), requested[0], self.unit):
            trial = apply_rule(eqn, [operands.get(i) for i in range(len(shapes))], self.unit)
            if not trial.gathered and not trial.reduced and trial.axes == requested:
                new_axes = zip(eqn.outvars, trial.axes, strict=True)
                self.split.update((v, a) for v, a in new_axes if a is not None)
                return operands
        if len(requested) == 1 and requested[0] is not None and can_create_split(eqn, requested[0]):
            self.split[eqn.outvars[0]] = requested[0]
        return {}

    def _split_call(self, step: EquationFlow) -> EquationFlow:
        """Marks requested results of a call as split if its body can compute parts; returns its new flow."""
        requested = {v: axis for v in step.eqn.outvars if (axis := self.requested_axis(v)) is not None}
        if not requested or step.trips is not None or step.eqn.primitive.name == "cond":
            return step
        (body,), (inner,) = jaxprs.bodies(step.eqn), step.bodies
        outputs: list[Any] = [AS_COMPUTED] * len(inner.outputs)
        for v, j in zip(step.eqn.outvars, body.results, strict=True):
            outputs[j] = requested.get(v, AS_COMPUTED)
        new_flow = self.follow_again(inner, tuple(outputs))
        if new_flow.sliced or new_flow.gathered:
            return step
        self.split.update(requested)
        return dataclasses.replace(step, bodies=(new_flow,))


def _candidate_axes(
    shapes: Sequence[tuple[int, ...]], result: tuple[int, ...], requested: Axis, unit: int
) -> Iterator[dict[int, int]]:
    """Yields axes of replicated operands, by position, that might give the result the requested axis."""
    if requested is not None:  # for elementwise operations, whose operands may be broadcast along other axes
        axes = {
            i: requested
            for i, shape in enumerate(shapes)
            if len(shape) == len(result) and shape[requested] == result[requested]
        }
        if axes:
            yield axes
    for shape in dict.fromkeys(shapes):
        for axis, size in enumerate(shape):
            if size % unit == 0:
                yield {i: axis for i, s in enumerate(shapes) if s == shape}


def _axes_in_bodies(step: EquationFlow) -> dict[int, int]:
    """The axes along which all bodies of an equation split its replicated operands."""
    axes_by_operand: dict[int, set[Axis]] = {}
    for body, inner in zip(jaxprs.bodies(step.eqn), step.bodies, strict=True):
        carried = {i for i, _ in body.carry}
        for i, operand in enumerate(body.operands):
            axis = inner.requested_axes[i]
            if axis is not None and i in body.sliced:
                axis += 1
            axes_by_operand.setdefault(operand, set()).add(None if i in carried else axis)
    axes_by_operand.update({i: {axis} for i, axis in step.sliced})
    common = {i: next(iter(axes)) for i, axes in axes_by_operand.items() if len(axes) == 1}
    return {i: axis for i, axis in common.items() if axis is not None}
