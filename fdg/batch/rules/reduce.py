"""Batch rules (`result.Rule`) of reductions, sorts, cumulative operations, windows and FFTs."""

from typing import Any

import jax.numpy as jnp

from fdg.batch.rules.result import (
    Axis,
    Rule,
    RuleResult,
    every_result,
    except_axes,
    first_axis,
    locally,
    position_without,
    removing,
    same,
    shape_of,
)


def has_all_reduce(eqn: Any) -> bool:
    """Whether XLA has an all-reduce for a reduction.

    It has none for max and min of complex numbers. Of the bitwise reductions, it has only `and` and `or` of
    booleans.
    """
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    if name in _BITWISE:
        return name != "reduce_xor" and jnp.issubdtype(dtype, jnp.bool_)
    return name not in _EXTREMES or not jnp.issubdtype(dtype, jnp.complexfloating)


_BITWISE = ("reduce_and", "reduce_or", "reduce_xor")
_EXTREMES = ("reduce_max", "reduce_min")


def _reduce(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """A split axis is kept, or reduced over devices."""
    (axis,), reduced_axes = operands, eqn.params["axes"]
    if axis is None or axis in reduced_axes:
        return every_result(eqn, None, reduced=True) if has_all_reduce(eqn) else None
    return every_result(eqn, position_without(axis, reduced_axes))


def _reduce_by_function(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """A reduction with a user-defined function, whose operands are arrays and then their initial values."""
    axis, reduced_axes = first_axis(operands), eqn.params["dimensions"]
    if axis is None or axis in reduced_axes:
        return None
    gathered = [i for i, other in enumerate(operands) if other not in (None, axis)]
    return every_result(eqn, position_without(axis, reduced_axes), *gathered)


def window_covers(eqn: Any, axis: int) -> bool:
    """Whether the window of an operation extends along an axis, or changes its length."""
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = (eqn.params[name][axis] for name in names if eqn.params.get(name))
    return any(eqn.params["padding"][axis]) or any(size != 1 for size in sizes)


def _window(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Window reductions keep the batch axis if the window does not extend along it."""
    axis = first_axis(operands)
    return None if axis is None or window_covers(eqn, axis) else same(eqn, operands)


def _fourier(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """An FFT keeps the axes that it does not transform."""
    rank = len(shape_of(eqn.invars[0]))
    return None if operands[0] in range(rank)[-len(eqn.params["fft_lengths"]) :] else same(eqn, operands)


RULES: dict[str, Rule] = {  # by the name of the primitive
    **dict.fromkeys(("reduce_sum", "reduce_prod", *_EXTREMES, *_BITWISE), _reduce),
    **dict.fromkeys(("argmax", "argmin"), removing("axes")),  # XLA has no all-reduce for them
    "reduce": locally(_reduce_by_function),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), except_axes("axis")),
    "sort": except_axes("dimension"),
    "top_k": locally(except_axes("axis")),  # the last axis if top_k has no such parameter
    "approx_top_k": locally(except_axes("reduction_dimension")),
    **dict.fromkeys(
        "reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add".split(), _window
    ),
    **dict.fromkeys("reduce_window select_and_gather_add".split(), locally(_window)),
    "fft": locally(_fourier),
}
