"""Evaluates a jaxpr on one part of its batch: a device's part, or a tile of it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.rules.result import Axis
from fdg.fragment import boundary_p
from fdg.rowwise import trace_rows

_GROUP_COUNTS = ("feature_group_count", "batch_group_count")  # of convolutions


class OnePart:
    """Evaluates operations on one of `count` equal parts of the batch.

    A reduction over the batch gives the result for this part only; the caller combines the parts' results.
    """

    def __init__(self, count: int, index: Callable[[], Any]):
        self.count = count
        self.index = index  # returns the index of the part (int32), for slicing replicated values

    def run_equation(self, step: EquationFlow, values: list[Any]) -> list[Any]:
        """The part of an equation's results; `values` are parts of its operands, or replicated operands."""
        if step.bodies:
            return list(self._run_bodies(step, values))
        eqn = step.eqn
        if eqn.primitive is boundary_p:
            return values
        if all(axis is None for axis in step.operands):  # compute replicated results, then slice them
            results = jaxprs.bind(eqn, values)
            return [self.part(x, axis) for x, axis in zip(results, step.results, strict=True)]
        results = jaxprs.bind(eqn, values, self._part_parameters(step))
        for x, v, axis in zip(results, eqn.outvars, step.results, strict=True):
            assert x.shape == self._part_shape(v.aval.shape, axis), (eqn, x.shape)
        return results

    def run_flow(self, flow: Flow, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The part of a jaxpr's outputs, from the part of its inputs; `flow` has the batch axes."""

        def run(step: EquationFlow, values: list[Any]) -> list[Any]:
            return self.run_equation(step, self._slice(values, step.sliced))

        results = jaxprs.evaluate_jaxpr(flow.jaxpr, consts, values, run, flow.equations)
        return self._slice(results, flow.sliced)

    def _run_bodies(self, step: EquationFlow, values: list[Any]) -> list[Any]:
        """The part of the results of a loop, branch or call."""
        constants = map(jaxprs.constants_of, jaxprs.closed_bodies(step.eqn))
        functions: list[Callable] = [
            functools.partial(self.run_flow, flow, consts)
            for flow, consts in zip(step.bodies, constants, strict=True)
        ]
        if step.eqn.primitive.name == "while":
            test, body = functions
            functions = _loop_until_all_finished(test, body, values, len(step.results))
        return jaxprs.run_bodies(step.eqn, functions, values)

    def _part_shape(self, shape: Sequence[int], axis: Axis) -> tuple[int, ...]:
        """The shape of one part of an array that is split along `axis`."""
        return tuple(n // self.count if i == axis else n for i, n in enumerate(shape))

    def _slice(self, values: Sequence[Any], sliced: Sequence[tuple[int, int]]) -> list[Any]:
        """The values, each replaced by its part if `sliced` names an axis for it."""
        axes = dict(sliced)
        return [self.part(x, axes.get(i)) for i, x in enumerate(values)]

    def part(self, x: Any, axis: Axis) -> Any:
        """This part of an array, split along an axis; the array itself for None."""
        if axis is None:
            return x
        size = x.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(x, self.index() * size, size, axis)

    def _part_parameters(self, step: EquationFlow) -> dict[str, Any]:
        """An operation's parameters, in which lengths of the batch axis are divided by `count`."""
        params, axis, result = step.eqn.params, step.operands[0], step.results[0]
        match step.eqn.primitive.name:
            case "broadcast_in_dim":
                return {**params, "shape": self._part_shape(params["shape"], result)}
            case "reshape":
                return {**params, "new_sizes": self._part_shape(params["new_sizes"], result)}
            case "slice":
                return {**params, "limit_indices": self._part_shape(params["limit_indices"], axis)}
            case "dynamic_slice":
                return {**params, "slice_sizes": self._part_shape(params["slice_sizes"], axis)}
            case "conv_general_dilated" if step.operands[1] is not None:  # the batch consists of groups
                return {**params, **{name: max(params[name] // self.count, 1) for name in _GROUP_COUNTS}}
            case "gather" if axis not in params["dimension_numbers"].operand_batching_dims:
                return {**params, "slice_sizes": self._part_shape(params["slice_sizes"], axis)}
            case "rowwise":
                part_avals = [
                    v.aval.update(shape=self._part_shape(v.aval.shape, axis))
                    for v, axis in zip(step.eqn.invars, step.operands, strict=True)
                ]
                return {**params, "jaxpr": trace_rows(params["function"], part_avals)}
        return params


def _loop_until_all_finished(
    condition: Callable, body: Callable, values: Sequence[Any], count: int
) -> list[Callable]:
    """The condition and the body of a while loop of `count` carried values, whose predicate may be per row.

    `values` are the loop's operands. The loop ends when all rows are finished; finished rows do not change.
    """

    def unfinished(operands: list[Any]) -> list[Any]:
        return [jnp.any(condition(operands)[0])]

    def step(operands: list[Any]) -> list[Any]:
        carried = operands[len(operands) - count :]
        constants = values[: len(values) - len(operands)]  # operands of the condition that are not carried
        (predicate,) = condition([*constants, *carried])
        results = body(operands)
        if not predicate.ndim:
            return results
        # A predicate per row comes from vmap.
        rows = [jax.lax.broadcast_in_dim(predicate, x.shape, tuple(range(predicate.ndim))) for x in results]
        return [jax.lax.select(*xs) for xs in zip(rows, results, carried, strict=True)]

    return [unfinished, step]
