"""Running a followed jaxpr on one part of its batch: that of a device, or a tile of it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.rules.result import Axis
from fdg.fragment import boundary_p
from fdg.jax_internals import ClosedJaxpr
from fdg.rowwise import trace_rows

_GROUPS = ("feature_group_count", "batch_group_count")  # of convolutions


class Local:
    """Runs what is independent along the batch on one of `count` parts of it; of sums, that part's share.

    Attributes:
      count: of parts.
      index: which one, `() -> int32`; asked for where a part of a whole value is taken.
    """

    def __init__(self, count: int, index: Callable[[], Any]):
        self.count, self.index = count, index

    def step(self, step: EquationFlow, values: list[Any]) -> list[Any]:
        """Parts of an equation's results, from the parts (or wholes) of its operands."""
        if step.bodies:
            return list(self._bodies(step, values))
        eqn = step.eqn
        if eqn.primitive is boundary_p:
            return values
        if all(axis is None for axis in step.operands):  # shared, or made here: the whole, then the part
            results = _bind(eqn, values, eqn.params)
            return [self._part(x, axis) for x, axis in zip(results, step.results, strict=True)]
        results = _bind(eqn, values, self._parameters(step))
        for x, v, axis in zip(results, eqn.outvars, step.results, strict=True):
            assert x.shape == self._shape(v.aval.shape, axis), (eqn, x.shape)
        return results

    def flow(self, flow: Flow, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Parts of a jaxpr's outputs, from those of its inputs."""
        jaxpr = flow.jaxpr
        known = dict(zip(jaxpr.invars, values, strict=True))
        known.update(zip(jaxpr.constvars, consts, strict=True))

        def take(atoms: Sequence[Any], sliced: Sequence[tuple[int, int]]) -> list[Any]:
            operands = [atom.val if hasattr(atom, "val") else known[atom] for atom in atoms]
            for i, axis in sliced:
                operands[i] = self._part(operands[i], axis)
            return operands

        for step in flow.equations:
            known.update(
                zip(step.eqn.outvars, self.step(step, take(step.eqn.invars, step.sliced)), strict=True)
            )
        return take(jaxpr.outvars, flow.sliced)

    def _bodies(self, step: EquationFlow, values: list[Any]) -> Sequence[Any]:
        eqn, bodies = step.eqn, jaxprs.bodies(step.eqn)
        consts = {id(jaxprs.open_jaxpr(closed)): closed.consts for closed in _closed(eqn.params)}
        runs = [functools.partial(self.flow, flow, consts.get(id(flow.jaxpr), ())) for flow in step.bodies]
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, bodies[0], runs[0], values)
            case "while":
                return self._while(bodies, runs, values)
            case "cond":
                branches = [lambda *operands, run=run: run(operands) for run in runs]
                return jax.lax.switch(values[0], branches, *values[1:])
        (body,) = bodies  # a call; of a linear solve, its solver, which takes some of the operands
        results = runs[0]([values[i] for i in body.operands])
        return [results[j] for j in body.results]

    def _scan(self, eqn: Any, body: jaxprs.Body, run: Callable, values: list[Any]) -> Sequence[Any]:
        count, first = len(body.carry), len(values) - len(body.sliced) - len(body.carry)
        consts, carried, sliced = values[:first], values[first : first + count], values[first + count :]

        def one(carried, rows):
            results = run([*consts, *carried, *rows])
            return results[:count], results[count:]

        carried, stacked = jax.lax.scan(
            one, carried, sliced, length=body.trips, reverse=eqn.params["reverse"]
        )
        return [*carried, *stacked]

    def _while(
        self, bodies: Sequence[jaxprs.Body], runs: Sequence[Callable], values: list[Any]
    ) -> Sequence[Any]:
        test, body = bodies
        count = len(body.carry)
        test_consts = values[: len(test.operands) - count]
        body_consts = values[len(test_consts) : -count]

        def unfinished(carried):
            return jnp.any(runs[0]([*test_consts, *carried])[0])

        def one(carried):
            (predicate,) = runs[0]([*test_consts, *carried])
            after = runs[1]([*body_consts, *carried])
            if not predicate.ndim:
                return after
            # Of a loop that vmap made, rows that are done stay as they are.
            rows = [
                jax.lax.broadcast_in_dim(predicate, new.shape, tuple(range(predicate.ndim))) for new in after
            ]
            return [jax.lax.select(*each) for each in zip(rows, after, carried, strict=True)]

        return jax.lax.while_loop(unfinished, one, values[-count:])

    def _shape(self, shape: Sequence[int], axis: Axis) -> tuple[int, ...]:
        return tuple(n // self.count if i == axis else n for i, n in enumerate(shape))

    def _part(self, x: Any, axis: Axis) -> Any:
        if axis is None:
            return x
        size = x.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(x, self.index() * size, size, axis)

    def _parameters(self, step: EquationFlow) -> dict[str, Any]:
        """An operation's parameters, with the lengths that it names cut to a part's."""
        params, axis, result = step.eqn.params, step.operands[0], step.results[0]
        match step.eqn.primitive.name:
            case "broadcast_in_dim":
                return {**params, "shape": self._shape(params["shape"], result)}
            case "reshape":
                return {**params, "new_sizes": self._shape(params["new_sizes"], result)}
            case "slice":
                return {**params, "limit_indices": self._shape(params["limit_indices"], axis)}
            case "dynamic_slice":
                return {**params, "slice_sizes": self._shape(params["slice_sizes"], axis)}
            case "conv_general_dilated" if step.operands[1] is not None:  # its groups are split
                return {**params, **{k: max(params[k] // self.count, 1) for k in _GROUPS}}
            case "gather" if axis not in params["dimension_numbers"].operand_batching_dims:
                return {**params, "slice_sizes": self._shape(params["slice_sizes"], axis)}
            case "rowwise":
                parts = [
                    v.aval.update(shape=self._shape(v.aval.shape, axis))
                    for v, axis in zip(step.eqn.invars, step.operands, strict=True)
                ]
                return {**params, "jaxpr": trace_rows(params["function"], parts)}
        return params


def _bind(eqn: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _closed(params: dict[str, Any]) -> list[Any]:
    values = [v for value in params.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [value for value in values if isinstance(value, ClosedJaxpr)]
