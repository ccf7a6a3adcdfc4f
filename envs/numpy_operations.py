"""JAX's operations in NumPy, by name; imports neither JAX nor this package.

Results are JAX's up to rounding; integers, comparisons and conversions are equal. The caller silences NumPy's
warnings (overflow, division by zero).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # np.ndarray, or a NumPy scalar
Function = Callable[..., Any]


class UnsupportedError(Exception):
    """An operation is not here, or not with these parameters; names it."""


def function_of(operation: str, params: dict[str, Any]) -> Function:
    """The function of an operation's operands; it returns an array, or a sequence if it has several results.

    Raises:
      UnsupportedError: there is none.
    """
    if operation in _ELEMENTWISE:
        return _ELEMENTWISE[operation]
    if operation not in _WITH_PARAMETERS:
        raise UnsupportedError(operation)
    return _WITH_PARAMETERS[operation](params)


# --- elementwise ---


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return np.divide(x, y)
    quotient = np.floor_divide(x - np.fmod(x, y), y)
    return np.where(y == 0, ~x.dtype.type(0), quotient)  # all bits are XLA's result for 0 as the divisor


def _remainder(x: Array, y: Array) -> Array:
    remainder = np.fmod(x, y)
    return remainder if x.dtype.kind == "f" else np.where(y == 0, x, remainder)


def _power(x: Array, y: Array) -> Array:
    return np.power(x, y.astype(x.dtype))


def _logistic(x: Array) -> Array:
    return np.reciprocal(np.exp(-x) + x.dtype.type(1))


def _select(which: Array, *cases: Array) -> Array:
    return np.where(which, cases[1], cases[0]) if which.dtype == np.bool_ else np.choose(which, cases)


def _each(function: Callable[[float], float]) -> Function:
    """A function of Python numbers as one of arrays."""
    of_array = np.frompyfunc(function, 1, 1)
    return lambda x: np.asarray(of_array(x)).astype(x.dtype)


_ELEMENTWISE: dict[str, Function] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "cos": np.cos,
    "cosh": np.cosh,
    "div": _divide,
    "eq": np.equal,
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": _logistic,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "pow": _power,
    "rem": _remainder,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "select_n": _select,
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}


# --- with parameters ---


def _integer_pow(params: dict[str, Any]) -> Function:
    return lambda x: np.power(x, params["y"])


def _round(params: dict[str, Any]) -> Function:
    if params["rounding_method"] == "TO_NEAREST_EVEN":
        return np.rint
    # away from zero
    return lambda x: np.trunc(x + np.copysign(np.nextafter(x.dtype.type(0.5), x.dtype.type(0)), x))


def _convert(params: dict[str, Any]) -> Function:
    dtype = np.dtype(params["new_dtype"])
    if dtype.kind not in "iu":
        return lambda x: x.astype(dtype)
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max

    def to_integer(x: Array) -> Array:
        if x.dtype.kind != "f":
            return x.astype(dtype)
        inside = np.where((x > lowest) & (x < highest), x, x.dtype.type(0)).astype(dtype)
        return np.where(x >= highest, highest, np.where(x <= lowest, lowest, inside)).astype(dtype)

    return to_integer


def _bitcast(params: dict[str, Any]) -> Function:
    dtype = np.dtype(params["new_dtype"])

    def bitcast(x: Array) -> Array:
        x = np.ascontiguousarray(x).reshape(x.shape)
        if x.dtype.itemsize == dtype.itemsize:
            return x.view(dtype)
        if x.dtype.itemsize < dtype.itemsize:  # the last axis has the parts of one number
            return x.view(dtype)[..., 0]
        return x[..., None].view(dtype)

    return bitcast


def _dot_general(params: dict[str, Any]) -> Function:
    (contracting, batch), dtype = params["dimension_numbers"], params["preferred_element_type"]

    def product(x: Array, y: Array) -> Array:
        free_x, free_y = (
            [axis for axis in range(z.ndim) if axis not in contracted and axis not in batched]
            for z, contracted, batched in zip((x, y), contracting, batch, strict=True)
        )
        shape = [x.shape[axis] for axis in batch[0]]
        shape_x, shape_y = [x.shape[axis] for axis in free_x], [y.shape[axis] for axis in free_y]
        size = math.prod(x.shape[axis] for axis in contracting[0])
        x = x.transpose(*batch[0], *free_x, *contracting[0]).reshape(*shape, math.prod(shape_x), size)
        y = y.transpose(*batch[1], *contracting[1], *free_y).reshape(*shape, size, math.prod(shape_y))
        return np.matmul(x, y).reshape(*shape, *shape_x, *shape_y)

    of_matrices = contracting == ((1,), (0,)) and not batch[0]

    def general(x: Array, y: Array) -> Array:
        if dtype is not None and (x.dtype != dtype or y.dtype != dtype):
            x, y = x.astype(dtype), y.astype(dtype)
        return np.matmul(x, y) if of_matrices and x.ndim == y.ndim == 2 else product(x, y)

    return general


def _broadcast_in_dim(params: dict[str, Any]) -> Function:
    shape, axes = params["shape"], params["broadcast_dimensions"]

    def broadcast(x: Array) -> Array:
        expanded = [1] * len(shape)
        for axis, size in zip(axes, x.shape, strict=True):
            expanded[axis] = size
        x = x.reshape(expanded)
        return x if x.shape == shape else np.broadcast_to(x, shape)

    return broadcast


def _reshape(params: dict[str, Any]) -> Function:
    sizes, order = params["new_sizes"], params["dimensions"]
    return lambda x: (x if order is None else x.transpose(order)).reshape(sizes)


def _slice(params: dict[str, Any]) -> Function:
    strides = params["strides"] or [1] * len(params["start_indices"])
    ranges = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    index = tuple(slice(*one) for one in ranges)
    return lambda x: x[index]


def _pad(params: dict[str, Any]) -> Function:
    config = params["padding_config"]  # by axis: entries before, after (negative: cut off) and between

    def pad(x: Array, value: Array) -> Array:
        spread = np.full([n + max(n - 1, 0) * config[i][2] for i, n in enumerate(x.shape)], value, x.dtype)
        spread[tuple(slice(None, None, between + 1) for _, _, between in config)] = x
        widths = [(max(before, 0), max(after, 0)) for before, after, _ in config]
        padded = np.pad(spread, widths, constant_values=value)
        starts, ends = ([max(-one[side], 0) for one in config] for side in (0, 1))
        return padded[tuple(slice(starts[i], n - ends[i]) for i, n in enumerate(padded.shape))]

    return pad


def _split(params: dict[str, Any]) -> Function:
    ends = np.cumsum(params["sizes"])[:-1]
    return lambda x: np.split(x, ends, params["axis"]) if len(ends) else x  # see `function_of`


def _unstack(params: dict[str, Any]) -> Function:
    def unstack(x: Array) -> Any:
        parts = np.moveaxis(x, params["axis"], 0)
        return parts if len(parts) > 1 else parts[0]  # see `function_of`

    return unstack


def _reduction(function: np.ufunc) -> Callable[[dict[str, Any]], Function]:
    def with_axes(params: dict[str, Any]) -> Function:
        axes = tuple(params["axes"])
        return lambda x: function.reduce(x, axes, dtype=x.dtype)

    return with_axes


def _argument(find: Function) -> Callable[[dict[str, Any]], Function]:
    def with_axis(params: dict[str, Any]) -> Function:
        (axis,), dtype = params["axes"], params["index_dtype"]
        return lambda x: find(x, axis).astype(dtype)

    return with_axis


def _cumulative(accumulate: Function) -> Callable[[dict[str, Any]], Function]:
    def with_axis(params: dict[str, Any]) -> Function:
        axis, reverse = params["axis"], params["reverse"]

        def cumulated(x: Array) -> Array:
            result = accumulate(np.flip(x, axis) if reverse else x, axis)
            return (np.flip(result, axis) if reverse else result).astype(x.dtype)

        return cumulated

    return with_axis


def _gather(params: dict[str, Any]) -> Function:
    """Looks up slices: `operand`, `indices [*batch, k]` -> `[*batch, *slice]`, with slice axes in between."""
    numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], params["mode"]
    if mode not in ("CLIP", "PROMISE_IN_BOUNDS", "FILL_OR_DROP"):
        raise UnsupportedError(f"gather with mode {mode}")
    offset_axes, start_axes = numbers["offset_dims"], numbers["start_index_map"]
    batching = dict(
        zip(numbers["operand_batching_dims"], numbers["start_indices_batching_dims"], strict=True)
    )
    not_in_result = {*numbers["collapsed_slice_dims"], *batching}

    def gather(operand: Array, indices: Array) -> Array:
        batch_shape = indices.shape[:-1]
        num_axes = len(batch_shape) + len(offset_axes)
        batch_axes = [axis for axis in range(num_axes) if axis not in offset_axes]

        def at_batch_axes(values: Array) -> Array:
            shape = [1] * num_axes
            for axis, size in zip(batch_axes, values.shape, strict=True):
                shape[axis] = size
            return values.reshape(shape)

        offset_axis_of = dict(
            zip([axis for axis in range(operand.ndim) if axis not in not_in_result], offset_axes, strict=True)
        )
        index, valid = [], np.ones((1,) * num_axes, np.bool_)
        for axis, size in enumerate(sizes):
            position: Array = np.zeros((1,) * num_axes, np.int64)
            if axis in offset_axis_of:
                position = np.arange(size).reshape([-1] + [1] * (num_axes - offset_axis_of[axis] - 1))
            if axis in start_axes:
                start = at_batch_axes(indices[..., start_axes.index(axis)].astype(np.int64))
                last = operand.shape[axis] - size
                valid = valid & (start >= 0) & (start <= last)
                position = position + np.clip(start, 0, last)
            if axis in batching:
                along = np.arange(batch_shape[batching[axis]])
                rest = len(batch_shape) - batching[axis] - 1
                position = position + at_batch_axes(
                    np.broadcast_to(along.reshape([-1] + [1] * rest), batch_shape)
                )
            index.append(position)
        found = operand[tuple(np.broadcast_arrays(*index))] if index else operand
        return found if mode != "FILL_OR_DROP" else np.where(valid, found, _fill(operand.dtype, params))

    return gather


def _fill(dtype: np.dtype, params: dict[str, Any]) -> Array:
    """What a look-up outside of an array gives."""
    if params["fill_value"] is not None:
        return dtype.type(params["fill_value"])
    if dtype.kind == "f":
        return dtype.type(np.nan)
    return (
        np.True_ if dtype.kind == "b" else np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    )


def _convolution(params: dict[str, Any]) -> Function:
    """A convolution without groups whose input is not dilated."""
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        raise UnsupportedError("conv_general_dilated with groups")
    if set(params["lhs_dilation"]) != {1}:
        raise UnsupportedError("conv_general_dilated of a dilated input")
    numbers, strides, dilation = params["dimension_numbers"], params["window_strides"], params["rhs_dilation"]
    dtype = params["preferred_element_type"]

    def convolve(x: Array, kernel: Array) -> Array:
        if dtype is not None:
            x, kernel = x.astype(dtype), kernel.astype(dtype)
        count = len(strides)
        spatial = tuple(range(2, 2 + count))
        x, kernel = x.transpose(numbers["lhs_spec"]), kernel.transpose(numbers["rhs_spec"])
        no_value = x.dtype.type(0)
        x = _pad({"padding_config": [(0, 0, 0)] * 2 + [(*ends, 0) for ends in params["padding"]]})(
            x, no_value
        )
        extents = [(n - 1) * gap + 1 for n, gap in zip(kernel.shape[2:], dilation, strict=True)]
        windows = np.lib.stride_tricks.sliding_window_view(x, extents, spatial)
        steps = [slice(None, None, n) for n in (*strides, *dilation)]
        windows = windows[(slice(None), slice(None), *steps)]
        window_axes = [1, *range(2 + count, 2 + 2 * count)]
        result = np.tensordot(windows, kernel, (window_axes, [1, *spatial]))  # [N, *spatial, features]
        in_order = np.moveaxis(result, -1, 1)
        return in_order.transpose(np.argsort(numbers["out_spec"]))

    return convolve


_WITH_PARAMETERS: dict[str, Callable[[dict[str, Any]], Function]] = {
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda params: lambda *parts: np.concatenate(parts, params["dimension"]),
    "conv_general_dilated": _convolution,
    "convert_element_type": _convert,
    "cumlogsumexp": _cumulative(np.logaddexp.accumulate),
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
    "cumprod": _cumulative(np.multiply.accumulate),
    "cumsum": _cumulative(np.add.accumulate),
    "dot_general": _dot_general,
    "gather": _gather,
    "integer_pow": _integer_pow,
    "pad": _pad,
    "reduce_and": _reduction(np.bitwise_and),
    "reduce_max": _reduction(np.maximum),
    "reduce_min": _reduction(np.minimum),
    "reduce_or": _reduction(np.bitwise_or),
    "reduce_prod": _reduction(np.multiply),
    "reduce_sum": _reduction(np.add),
    "reduce_xor": _reduction(np.bitwise_xor),
    "reshape": _reshape,
    "rev": lambda params: lambda x: np.flip(x, params["dimensions"]),
    "round": _round,
    "slice": _slice,
    "split": _split,
    "squeeze": lambda params: lambda x: x.squeeze(tuple(params["dimensions"])),
    "stack": lambda params: lambda *parts: np.stack(parts, params["axis"]),
    "tile": lambda params: lambda x: np.tile(x, params["reps"]),
    "transpose": lambda params: lambda x: x.transpose(params["permutation"]),
    "unstack": _unstack,
}
