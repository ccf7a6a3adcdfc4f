"""`rowwise`: declares that a function's rows are independent, so that each device calls it on its own rows.

Batch-axis propagation (`fdg.batch`) has a rule per operation. These rules cannot prove that rows are
independent in a while loop that runs until the last row is done, or in a queue of rows. A function declared
`rowwise` is traced again for the rows of one device; its loops then end independently on each device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from fdg import jaxprs
from fdg.arguments import checked
from fdg.errors import GraphError
from fdg.fragment import leaf_axes
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr

Axes = tuple[int | None, ...]  # one per array
Splits = tuple[tuple[Axes, Axes], ...]
"""Alternative splits: the split axes of operands (None: replicated), then of results. `vmap` adds a split."""

rowwise_p = core.Primitive("rowwise")
rowwise_p.multiple_results = True


def trace_rows(function: Callable[..., Any], operands: Any) -> ClosedJaxpr:
    """The jaxpr of a flat function for operands with these shapes, dtypes and weak types."""
    return jaxprs.lowered(jax.make_jaxpr(function)(*map(jaxprs.shape_to_trace, operands)))


_parts: IdentityCache[ClosedJaxpr] = IdentityCache(max_entries=256)


def rows_of_device(eqn: core.JaxprEqn, axes: Sequence[int | None], devices: int) -> ClosedJaxpr:
    """The jaxpr of a `rowwise` equation for the rows of one device, at least one row.

    `axes` are the split axes of the operands (None: replicated).
    """
    if devices == 1 or all(axis is None for axis in axes):
        return eqn.params["jaxpr"]

    def trace() -> ClosedJaxpr:
        operands = []
        for v, axis in zip(eqn.invars, axes, strict=True):
            aval: Any = v.aval
            if axis is not None:
                rows = max(1, aval.shape[axis] // devices)
                aval = aval.update(shape=(*aval.shape[:axis], rows, *aval.shape[axis + 1 :]))
            operands.append(aval)
        return trace_rows(eqn.params["function"], operands)

    return _parts(eqn, (tuple(axes), devices), trace)


def _run(*operands: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return jax.jit(core.jaxpr_as_fun(jaxpr))(*operands)


def _batched(operands: Any, dims: Any, *, jaxpr: Any, function: Any, splits: Splits) -> Any:
    """The batching rule: vmaps the function, and adds the split along the new axis."""

    def vmapped(*operands: Any) -> Any:
        return jax.vmap(function, in_axes=tuple(dims))(*operands)

    def shift_axes(axes: Axes) -> Axes:
        return tuple(
            axis if axis is None or dim is None or dim > axis else axis + 1
            for axis, dim in zip(axes, dims, strict=True)
        )

    shifted_splits = tuple(
        (shift_axes(inputs), tuple(None if axis is None else axis + 1 for axis in outputs))
        for inputs, outputs in splits
    )
    count = len(splits[0][1])
    all_splits = (*shifted_splits, (tuple(dims), (0,) * count))
    jaxpr = trace_rows(vmapped, [jax.typeof(x) for x in operands])  # operands may be Python numbers
    return rowwise_p.bind(*operands, jaxpr=jaxpr, function=vmapped, splits=all_splits), (0,) * count


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, function: Any, splits: Splits) -> Any:
    dense_tangents = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    return jax.jvp(function, tuple(primals), dense_tangents)  # respects custom derivatives within `function`


rowwise_p.def_impl(_run)
rowwise_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
batching.primitive_batchers[rowwise_p] = _batched
ad.primitive_jvps[rowwise_p] = _jvp
mlir.register_lowering(rowwise_p, mlir.lower_fun(_run, multiple_results=True))


@checked
def rowwise(function: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """Declares that a function's rows are independent, so that each device may call it on its own rows.

    The result for a row must depend only on that row of the arguments, not on the other rows or their number.
    This is not checked at run time. The function is traced for whole arrays and, on several devices, also for
    each device's part of them. It must not close over traced values.

    Args:
      function: a function of pytrees of arrays with any number of rows.
      in_axes, out_axes: the row axis of each argument and result, as in `jax.vmap`: pytree prefixes. None is
        for arguments that all rows share; each result has a row axis.

    Returns:
      The same function. It composes with `jit` and `vmap`.

    Raises:
      GraphError: (at a call) the axes do not match, or the function has a side effect.

    >>> def halve(x):  # until all are below 1
    ...     smaller = lambda x: jax.numpy.where(x < 1, x, x / 2)
    ...     return jax.lax.while_loop(lambda x: (x >= 1).any(), smaller, x)
    >>> rowwise(halve)(jax.numpy.array([3.0, 0.5, 8.0])).tolist()
    [0.75, 0.5, 0.5]
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        what = f"rowwise '{getattr(function, '__name__', 'function')}'"
        jaxprs.require_arrays(f"{what}: argument", arguments)
        operands, tree = jax.tree.flatten(arguments)
        operands = [jax.numpy.asarray(x) if not isinstance(x, jax.Array) else x for x in operands]
        out_tree: Any = None

        def flat(*operands: Any) -> list[Any]:
            nonlocal out_tree
            results = jaxprs.require_arrays(f"{what}: result", function(*jax.tree.unflatten(tree, operands)))
            results, out_tree = jax.tree.flatten(results)
            return results

        jaxpr = trace_rows(flat, operands)
        if jaxpr.effects:
            raise GraphError(
                f"{what} has an effect (a print, a call to the host), which every device would repeat:"
                " remove it"
            )
        axes = tuple(in_axes) if isinstance(in_axes, list | tuple) else (in_axes,) * len(arguments)
        operand_axes = leaf_axes(what, "in", axes, jax.tree.unflatten(tree, operands))
        result_axes = leaf_axes(what, "out", out_axes, jax.tree.unflatten(out_tree, jaxpr.out_avals))
        if None in result_axes.values():
            raise GraphError(f"{what}: out_axes={out_axes!r}: each result has a row axis: give an integer")
        splits = ((tuple(operand_axes.values()), tuple(result_axes.values())),)
        outputs = rowwise_p.bind(*operands, jaxpr=jaxpr, function=flat, splits=splits)
        return jax.tree.unflatten(out_tree, outputs)

    return call
