"""Max and min reductions across devices that propagate NaN.

XLA's all-reduce of floats by `max` and `min` drops NaN on CPUs, and so does NCCL's, which uses `fmax` and
`fmin`. Therefore devices convert floats to integers that have the same order, with NaN beyond all other
values, and reduce the integers:

    m = reduce_max x     ->     m = as_floats (reduce_max (as_ints x))

    order of the integers   NaN (for min)  -inf ... -1.0 ... -0.0 < 0.0 ... 1.0 ... inf  NaN (for max)

The number and size of collectives are unchanged, and so are the bits of all values except NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fdg import jaxprs
from fdg.jax_internals import ClosedJaxpr
from fdg.placing.layout import BATCH

_IS_MAX = {  # operation -> True for max, False for min
    **dict.fromkeys(("max", "reduce_max", "scatter-max", "pmax"), True),
    **dict.fromkeys(("min", "reduce_min", "scatter-min", "pmin"), False),
}
_SCATTERS = {"scatter-max": lax.scatter_max, "scatter-min": lax.scatter_min}
_MIN_FLOAT_BITS = 16  # narrower floats, which encode NaN differently, are converted to float32 (exactly)


def may_lose_nan(eqn: Any) -> bool:
    """Whether an operation reduces floats along an axis by max or min, so that a collective may drop NaN."""
    if _operation_name(eqn) not in _IS_MAX:
        return False
    are_floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
    return are_floats and all(v.aval.size for v in eqn.invars)  # an empty reduction is infinite, never NaN


def _operation_name(eqn: Any) -> str:
    """The operation's name; for a `reduce` by a function of one operation, the name of that operation.

    An empty string for the elementwise `max` and `min`, which need no collective.
    """
    if eqn.primitive.name == "reduce" and len(eqn.outvars) == 1:
        inner = jaxprs.open_jaxpr(eqn.params["jaxpr"]).eqns
        while len(inner) == 1 and inner[0].primitive.name == "jit":
            inner = jaxprs.open_jaxpr(inner[0].params["jaxpr"]).eqns
        return inner[0].primitive.name if len(inner) == 1 else ""
    return eqn.primitive.name if eqn.primitive.name not in ("max", "min") else ""


def keep_nan(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites all max and min reductions of floats so that they keep NaN, at any depth and sharding."""
    return jaxprs.rewrite(closed, _rewrite_extreme)


def _rewrite_extreme(eqn: Any, inside: jaxprs.Inside) -> Any:
    if not may_lose_nan(eqn):
        return inside(eqn)
    return jaxprs.traced(functools.partial(_reduce_as_ints, eqn), eqn.invars, eqn.outvars)[0]


def extreme_over_devices(name: str, x: jax.Array) -> jax.Array:
    """The max or min over the devices that split the batch; NaN if any device has NaN."""
    is_max = _IS_MAX[name]
    reduce = lax.pmax if is_max else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, BATCH)
    return _as_floats(reduce(_as_ints(x, is_max), BATCH), x.dtype)


def _reduce_as_ints(eqn: Any, *operands: Any) -> Any:
    """The results of a max or min reduction, computed on integers."""
    is_max, dtype = _IS_MAX[_operation_name(eqn)], eqn.outvars[0].aval.dtype
    ints: list[Any] = [_as_ints(x, is_max) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    results: Any
    if eqn.primitive.name in _SCATTERS:
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        results = _SCATTERS[eqn.primitive.name](*ints, **{name: eqn.params[name] for name in names})
    elif eqn.primitive.name == "reduce":
        array, start = ints
        results = lax.reduce(array, start, lax.max if is_max else lax.min, eqn.params["dimensions"])
    else:
        results = eqn.primitive.bind(*ints, **eqn.params)
    return jax.tree.map(lambda order: _as_floats(order, dtype), results)


def _as_ints(x: jax.Array, is_max: bool) -> jax.Array:
    """Converts floats to integers in the same order; positive floats keep their bits."""
    if jnp.finfo(x.dtype).bits < _MIN_FLOAT_BITS:
        x = lax.convert_element_type(x, jnp.float32)
    int_info = jnp.iinfo(f"int{jnp.finfo(x.dtype).bits}")
    ordered_ints = _flip_negatives(lax.bitcast_convert_type(x, int_info.dtype), int_info)
    nan_ints = lax.full_like(ordered_ints, int_info.max if is_max else int_info.min)
    return lax.select(lax.ne(x, x), nan_ints, ordered_ints)


def _as_floats(ordered_ints: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_as_ints`."""
    int_info = jnp.iinfo(ordered_ints.dtype)
    float_dtype = dtype if jnp.finfo(dtype).bits == int_info.bits else jnp.float32
    return lax.convert_element_type(
        lax.bitcast_convert_type(_flip_negatives(ordered_ints, int_info), float_dtype), dtype
    )


def _flip_negatives(bits: jax.Array, int_info: Any) -> jax.Array:
    """Reverses the order of negative numbers, so that integers are ordered like the floats; self-inverse."""
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, int_info.bits - 1))
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, lax.full_like(bits, int_info.max)))
