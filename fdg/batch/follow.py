"""Propagates the batch axis through a jaxpr, and infers where devices need collectives.

For example, `tanh(x[:4] @ w), x.T @ y` with x [8, 4] and y [8, 2] split along axis 0, w [4, 2] replicated:

    a = slice x            x is gathered, because the slice cuts the batch axis     a [4, 4] replicated
    b = dot_general a w    both operands are replicated                             b [4, 2] replicated
    c = tanh b             the operand is replicated                                c [4, 2] replicated
    d = transpose x        moves the batch to axis 1                                d [4, 8] split along 1
    e = dot_general d y    contracts the batch of both: an all-reduce adds parts    e [4, 2] replicated

The border of a fragment declares which axis of each input is the batch. From there on, each operation does
one of three things with an axis that is split over devices (by its rule, in `rules/`):

- It keeps the axis, and every device works on its part.
- It reduces the axis (a sum over it, a matrix product that contracts it, a look-up of its rows). Each device
  computes a summand of the result, and an *all-reduce* adds them.
- It depends on positions along the axis (a slice, a flip, a sort), or has no rule. An *all-gather* first
  replicates the operand on every device.

Values without a batch axis (axis None) are replicated, so slicing them needs no communication. Thus the
collectives and their bytes are known without compiling (`exchanges`). `lowering.constraints` adds the axes to
the jaxpr as sharding constraints, so that XLA's partitioner has no other choice.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fdg import jaxprs
from fdg.batch.equation import divisible, follow_operation, slice_replicated_operands
from fdg.batch.flow import AxisAndLevel, EquationFlow, Flow, MeshFlows, is_independent
from fdg.batch.lengths import lengths_of, smallest_equivalent
from fdg.batch.requested import AS_COMPUTED, find_requested
from fdg.batch.rules import RULES
from fdg.batch.rules.result import Axis, first_axis, shape_of
from fdg.fragment import boundary_p
from fdg.identity_cache import IdentityCache
from fdg.rowwise import rows_of_device, rowwise_p


def follow(
    jaxpr: Any,
    input_axes: Sequence[Axis] = (),
    devices: int | None = None,
    output_axes: Sequence[Axis] | None = None,
    borders: bool = True,
) -> Flow:
    """Propagates the batch axes of a jaxpr's first inputs, and of the borders in it, to its outputs.

    `input_axes` are the batch axes of the first inputs. Outputs are resharded to the batch axes
    `output_axes`, or left as they are if it is None. `devices=None` stands for any number that divides all
    batches. An axis whose length is not divisible by the number of devices counts as None.

    With `borders=False`, borders and `rowwise` calls declare no batch axes, but pass on the axes of their
    inputs. So other axes can be followed, such as those of parameters that are split over `model`.
    """
    jaxpr = jaxprs.open_jaxpr(jaxpr)
    axes = [*input_axes, *[None] * (len(jaxpr.invars) - len(input_axes))]
    lengths = [shape_of(v)[axis] for v, axis in zip(jaxpr.invars, axes, strict=True) if axis is not None]
    unit = devices or math.gcd(*lengths, *_border_lengths(jaxpr.eqns)) or 1
    inputs = tuple((divisible(v, axis, unit), 0) for v, axis in zip(jaxpr.invars, axes, strict=True))
    outputs = None
    if output_axes is not None:
        outputs = tuple(divisible(v, axis, unit) for v, axis in zip(jaxpr.outvars, output_axes, strict=True))
    return _Follower(smallest_equivalent(unit, lengths_of(jaxpr)), borders).flow(jaxpr, inputs, 0, outputs)


def follow_mesh(
    jaxpr: Any, axes: Sequence[Axis], devices: int, model_axes: Sequence[Axis] = (), model: int = 1
) -> MeshFlows:
    """How a group's mesh splits the values of a jaxpr: over `devices` along `batch`, and along `model`.

    `axes` are the batch axes of the first inputs, `model_axes` their axes that are split over `model`.
    """
    return (
        follow(jaxpr, axes, devices) if devices > 1 else None,
        follow(jaxpr, model_axes, model, borders=False) if model > 1 else None,
    )


def follow_rows(
    eqn: Any, steps: Sequence[EquationFlow | None], devices: int, model: int
) -> tuple[Any, MeshFlows]:
    """The jaxpr of a `rowwise` call for the rows of one device, and its flows; `steps`: those of the call."""
    batch, along_model = steps
    part = jaxprs.open_jaxpr(
        rows_of_device(eqn, (None,) * len(eqn.invars) if batch is None else batch.operands, devices)
    )
    model_axes = [] if along_model is None else [axis for axis, _ in along_model.bodies[0].inputs]
    return part, follow_mesh(part, (), 1, model_axes, model)


def equation_axes(eqn: Any, operand_axes: Sequence[Axis], unit: int) -> list[Axis]:
    """The batch axes of one equation's results on `unit` devices, from the batch axes of its operands."""
    operands = zip(eqn.invars, operand_axes, strict=True)
    inputs = tuple((divisible(v, axis, unit), 0) for v, axis in operands)
    return list(_Follower(unit).equation(eqn, inputs, 0).results)


def _border_lengths(equations: Sequence[Any]) -> set[int]:
    """The lengths of all batch axes that borders declare, at any depth."""
    borders = [eqn for eqn in jaxprs.walk(equations) if eqn.primitive is boundary_p]
    with_axis: list[Any] = [eqn for eqn in borders if eqn.params["axis"] is not None]
    return {shape_of(eqn.outvars[0])[eqn.params["axis"]] for eqn in with_axis}


_MAX_CACHED = 10_000  # the maximum number of cached flows for one number of devices


@functools.lru_cache(maxsize=32)
class _Follower:
    """Propagates axes for the number of devices `unit`.

    In all methods, `depth` is the number of loops around the jaxpr or the equation.

    `unit` may be a smaller number of devices that divides the same axis lengths, so that one cached object
    serves many numbers of devices.
    """

    def __init__(self, unit: int, borders: bool = True):
        self.unit, self.borders = unit, borders
        # Cached, because many places and plans call the same functions with the same axes.
        self._cache: IdentityCache[Flow] = IdentityCache(max_entries=_MAX_CACHED)

    def flow(
        self,
        jaxpr: Any,
        inputs: tuple[AxisAndLevel, ...],
        depth: int,
        output_axes: tuple[Any, ...] | None = None,
    ) -> Flow:
        """Propagates axes through one jaxpr; `inputs` are the axis and level of each input.

        Outputs are resharded to `output_axes`, except where it is `AS_COMPUTED`. None stands for
        `AS_COMPUTED` for all outputs.
        """
        output_axes = output_axes or (AS_COMPUTED,) * len(jaxpr.outvars)
        arguments = inputs, depth, output_axes
        return self._cache(jaxpr, arguments, lambda: self._follow(jaxpr, *arguments))

    def _follow(
        self, jaxpr: Any, inputs: tuple[AxisAndLevel, ...], depth: int, output_axes: tuple[Any, ...]
    ) -> Flow:
        """A forward and a backward pass; then another forward pass, if some values can be computed split."""
        flow, values = self._forward(jaxpr, inputs, depth, output_axes, {})
        split, requested = find_requested(
            flow,
            values,
            output_axes,
            self.unit,
            lambda inner, outputs: self.flow(inner.jaxpr, inner.inputs, depth, outputs),
        )
        if split:
            flow, _ = self._forward(jaxpr, inputs, depth, output_axes, split)
        return dataclasses.replace(flow, requested_axes=requested)

    def _forward(
        self,
        jaxpr: Any,
        inputs: tuple[AxisAndLevel, ...],
        depth: int,
        output_axes: tuple[Any, ...],
        split: Mapping[Any, int],
    ) -> tuple[Flow, dict[Any, AxisAndLevel]]:
        """One forward pass; `split` has the replicated variables to compute split, and their axes."""
        values: dict[Any, AxisAndLevel] = dict(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom: Any) -> AxisAndLevel:  # literals and constants of the jaxpr have no axis
            return (None, 0) if jaxprs.is_literal(atom) else values.get(atom, (None, 0))

        equations = []
        for eqn in jaxpr.eqns:
            operands = tuple(map(value_of, eqn.invars))
            step = self.equation(eqn, operands, depth, split)
            if not step.bodies and any(v in split for v in eqn.outvars):
                # The operands are replicated, or computed split for this equation, so they need no gather.
                results = tuple(split.get(v, axis) for v, axis in zip(eqn.outvars, step.results, strict=True))
                axes = tuple(axis for axis, _ in operands)
                step = dataclasses.replace(step, operands=axes, results=results, gathered=(), sliced=())
            if not step.bodies:
                step = slice_replicated_operands(step, self.unit)
            equations.append(step)
            level = max(step.levels, default=0)
            values.update((v, (axis, level)) for v, axis in zip(eqn.outvars, step.results, strict=True))
        outputs, gathered, sliced = [], [], []
        for i, (atom, requested) in enumerate(zip(jaxpr.outvars, output_axes, strict=True)):
            axis, _ = value_of(atom)
            if requested is not AS_COMPUTED and axis != requested:
                if axis is not None:
                    gathered.append(i)
                if requested is not None:
                    sliced.append((i, requested))
                axis = requested
            outputs.append(axis)
        levels = tuple(value_of(atom)[1] for atom in jaxpr.outvars)
        return Flow(
            jaxpr, inputs, tuple(equations), tuple(outputs), levels, (None,) * len(inputs),
            tuple(gathered), tuple(sliced),
        ), values  # fmt: skip

    def equation(
        self,
        eqn: Any,
        operands: tuple[AxisAndLevel, ...],
        depth: int,
        split: Mapping[Any, int] | None = None,
    ) -> EquationFlow:
        """Propagates axes through one equation."""
        is_open = eqn.primitive.name not in RULES or (eqn.primitive is rowwise_p and not self.borders)
        bodies = jaxprs.bodies(eqn) if is_open else ()
        if eqn.primitive.name == "dot_general" and not self.borders:
            operands = _with_split_results(eqn, operands)
        if not bodies:
            levels = tuple(level for _, level in operands)
            if eqn.primitive is boundary_p and not self.borders:
                axes = tuple(axis for axis, _ in operands)
                return EquationFlow(eqn, axes, axes, levels=levels)
            return follow_operation(eqn, [axis for axis, _ in operands], levels, self.unit)
        match eqn.primitive.name:
            case "cond":
                return self._branches(eqn, bodies, operands, depth)
            case "while":
                return _with_predicate(self._call_or_loop(eqn, bodies, operands, depth + 1, {}))
            case "scan":
                return self._call_or_loop(eqn, bodies, operands, depth + 1, {})
        return self._call_or_loop(eqn, bodies, operands, depth, split or {})

    def _call_or_loop(
        self,
        eqn: Any,
        bodies: tuple[jaxprs.Body, ...],
        operands: tuple[AxisAndLevel, ...],
        depth: int,
        split: Mapping[Any, int],
    ) -> EquationFlow:
        """Propagates axes through a call, a scan or a while loop."""
        gathered, current = _gather_rows(bodies, operands)  # axis and level of each operand in the bodies
        self._propagate_carry(bodies, current, depth)
        if eqn.primitive.name == "while":
            test, carried = bodies[0], [bodies[1].operands[i] for i, _ in bodies[1].carry]
            axis = self.flow(test.jaxpr, _body_inputs(test, bodies, current, depth), depth).outputs[0]
            if axis is None:  # a predicate per row, computed from replicated values: split it like the rows
                rows = range(len(shape_of(test.jaxpr.outvars[0])))
                axis = first_axis([current[operand][0] for operand in carried if current[operand][0] in rows])
            if axis is not None:
                for operand in carried:  # each carried value has one row per row of the predicate
                    if current[operand][0] is None:
                        current[operand] = axis, current[operand][1]
                self._propagate_carry(bodies, current, depth)
        flows: list[Flow] = []
        results: list[Axis] = [None] * len(eqn.outvars)
        for body in bodies:
            inputs = _body_inputs(body, bodies, current, depth)
            output_axes: list[Any] = [AS_COMPUTED] * len(body.jaxpr.outvars)
            for i, previous in body.carry:
                output_axes[previous] = inputs[i][0]
            for v, j in zip(eqn.outvars, body.results, strict=False):
                output_axes[j] = split.get(v, output_axes[j])  # results of a call that are computed split
            flow = self.flow(body.jaxpr, inputs, depth, tuple(output_axes))
            flows.append(flow)
            for k, j in enumerate(body.results):
                axis = flow.outputs[j]
                results[k] = axis + 1 if axis is not None and k in body.stacked else axis
        trips = bodies[0].trips if eqn.primitive.name in ("scan", "while") else None
        return _with_bodies(eqn, operands, current, results, gathered, flows, trips)

    def _propagate_carry(
        self, bodies: tuple[jaxprs.Body, ...], current: list[AxisAndLevel], depth: int
    ) -> None:
        """Propagates axes to loop-carried values until a fixed point; each round adds at least one axis."""
        changed = True
        while changed:
            changed = False
            for body in bodies:
                outputs = self.flow(body.jaxpr, _body_inputs(body, bodies, current, depth), depth).outputs
                for i, previous in body.carry:
                    operand = body.operands[i]
                    if current[operand][0] is None and outputs[previous] is not None:
                        current[operand], changed = (outputs[previous], current[operand][1]), True

    def _branches(
        self, eqn: Any, bodies: tuple[jaxprs.Body, ...], operands: tuple[AxisAndLevel, ...], depth: int
    ) -> EquationFlow:
        """Gives each result the same axis in all branches."""
        current = [(axis, depth) for axis, _ in operands]  # XLA moves no collective out of a branch
        inputs = [_body_inputs(body, bodies, current, depth) for body in bodies]
        outputs = [self.flow(b.jaxpr, i, depth).outputs for b, i in zip(bodies, inputs, strict=True)]
        results: list[Axis] = [first_axis(axes) for axes in zip(*outputs, strict=True)]
        flows = [self.flow(b.jaxpr, i, depth, tuple(results)) for b, i in zip(bodies, inputs, strict=True)]
        return _with_bodies(eqn, operands, current, results, set(), flows, None)


def _with_split_results(eqn: Any, operands: tuple[AxisAndLevel, ...]) -> tuple[AxisAndLevel, ...]:
    """Gathers the operand of a product that is split where it is summed, if the other is split elsewhere.

    XLA's partitioner does so, too: activations are gathered, and the product has the split of the weights.
    """
    (contracting, _) = eqn.params["dimension_numbers"]
    is_summed = [axis in dims for (axis, _), dims in zip(operands, contracting, strict=True)]
    if None in (operands[0][0], operands[1][0]) or sum(is_summed) != 1:
        return operands
    return tuple((None if is_summed[i] else axis, level) for i, (axis, level) in enumerate(operands))


def _gather_rows(
    bodies: tuple[jaxprs.Body, ...], operands: tuple[AxisAndLevel, ...]
) -> tuple[set[int], list[AxisAndLevel]]:
    """The positions of scanned operands to gather, and the axes and levels of all operands afterwards.

    Operands split along the scanned axis are gathered, because every device needs the rows of all trips.
    """
    gathered = {
        operand
        for body in bodies
        for i, operand in enumerate(body.operands)
        if i in body.sliced and operands[operand][0] == 0
    }
    return gathered, [
        (None, level) if i in gathered else (axis, level) for i, (axis, level) in enumerate(operands)
    ]


def _with_bodies(
    eqn: Any,
    operands: tuple[AxisAndLevel, ...],
    current: Sequence[AxisAndLevel],
    results: Sequence[Axis],
    gathered: set[int],
    flows: Sequence[Flow],
    trips: int | None,
) -> EquationFlow:
    """The flow of an equation with bodies.

    `operands` and `current` are the operands' axes and levels outside and inside the bodies. Replicated
    operands that are split inside, such as carried values, are sliced at the start.
    """
    pairs = enumerate(zip(current, operands, strict=True))
    sliced = tuple((i, inner[0]) for i, (inner, outer) in pairs if outer[0] is None and inner[0] is not None)
    return EquationFlow(
        eqn, tuple(axis for axis, _ in current), tuple(results), tuple(sorted(gathered)), sliced,
        levels=tuple(level for _, level in operands), bodies=tuple(flows), trips=trips,
    )  # fmt: skip


def _with_predicate(loop: EquationFlow) -> EquationFlow:
    """The flow of a while loop, which has a predicate per row if it comes from `vmap`.

    Finished rows do not change. If rows are independent, a device may stop when its rows are finished;
    otherwise all devices decide together before each trip.
    """
    test, body = loop.bodies
    axis = test.outputs[0]
    carried = body.inputs[len(body.inputs) - len(loop.results) :]
    if axis is None:
        return loop
    if all(a == axis for a, _ in carried) and is_independent(test) and is_independent(body):
        return dataclasses.replace(loop, local=True)
    return dataclasses.replace(loop, agrees_on_predicate=True)


def _body_inputs(
    body: jaxprs.Body, bodies: Sequence[jaxprs.Body], current: Sequence[AxisAndLevel], depth: int
) -> tuple[AxisAndLevel, ...]:
    """Axis and level of a body's inputs. Inputs that a loop slices or changes have the loop's level."""
    changing = {
        other.operands[i]
        for other in bodies
        for i, j in other.carry
        if other.jaxpr.outvars[j] is not other.jaxpr.invars[i]
    }
    inputs = []
    for i, operand in enumerate(body.operands):
        axis, level = current[operand]
        if i in body.sliced and axis is not None:
            axis -= 1
        inputs.append((axis, depth if operand in changing or i in body.sliced else level))
    return tuple(inputs)
