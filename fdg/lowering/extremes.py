"""Max and min reductions across devices that propagate NaN.

XLA's all-reduce of floats by `max` and `min` drops NaN on CPUs, and so does NCCL's, which uses `fmax` and
`fmin`. Integers have no such case. So devices reduce integers in the order of the floats, with NaN beyond all
others:

    m = reduce_max x     ->     m = float (reduce_max (ordered x))

    ordered   NaN (for min)  -inf ... -1.0 ... -0.0 < 0.0 ... 1.0 ... inf  NaN (for max)

The number and size of collectives are unchanged, and so are the bits of everything but NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fdg import jaxprs
from fdg.jax_internals import ClosedJaxpr

_IS_MAX = {
    **dict.fromkeys(("max", "reduce_max", "scatter-max", "pmax"), True),
    **dict.fromkeys(("min", "reduce_min", "scatter-min", "pmin"), False),
}
_SCATTERS = {"scatter-max": lax.scatter_max, "scatter-min": lax.scatter_min}
_NARROW = 16  # bits. NaN encodings differ in narrower floats, but float32 represents their values exactly


def may_lose_nan(eqn: Any) -> bool:
    """Whether an operation reduces floats by max or min along an axis, so that a collective may drop NaN."""
    if _name(eqn) not in _IS_MAX:
        return False
    floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
    return floats and all(v.aval.size for v in eqn.invars)  # an empty reduction is infinite, never NaN


def _name(eqn: Any) -> str:
    """The operation's name, or that of the only operation in a user-defined reduction of one array."""
    if eqn.primitive.name == "reduce" and len(eqn.outvars) == 1:
        inner = jaxprs.open_jaxpr(eqn.params["jaxpr"]).eqns
        while len(inner) == 1 and inner[0].primitive.name in ("jit", "pjit"):
            inner = jaxprs.open_jaxpr(inner[0].params["jaxpr"]).eqns
        return inner[0].primitive.name if len(inner) == 1 else ""
    return eqn.primitive.name if eqn.primitive.name not in ("max", "min") else ""


def keep_nan(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites all max and min reductions of floats so that they keep NaN, at any depth and sharding."""
    return jaxprs.rewrite(closed, _kept)


def _kept(eqn: Any, inside: jaxprs.Inside) -> Any:
    if not may_lose_nan(eqn):
        return inside(eqn)
    return jaxprs.traced(functools.partial(_by_integers, eqn), eqn.invars, eqn.outvars)[0]


def extreme_over(axis: str, name: str, x: jax.Array) -> jax.Array:
    """The max or min over the devices along a mesh axis; NaN if any device has NaN."""
    is_max = _IS_MAX[name]
    together = lax.pmax if is_max else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return together(x, axis)
    return _as_floats(together(_as_ints(x, is_max), axis), x.dtype)


def _by_integers(eqn: Any, *operands: Any) -> Any:
    is_max, dtype = _IS_MAX[_name(eqn)], eqn.outvars[0].aval.dtype
    whole: list[Any] = [_as_ints(x, is_max) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    made: Any
    if eqn.primitive.name in _SCATTERS:
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        made = _SCATTERS[eqn.primitive.name](*whole, **{name: eqn.params[name] for name in names})
    elif eqn.primitive.name == "reduce":
        array, start = whole
        made = lax.reduce(array, start, lax.max if is_max else lax.min, eqn.params["dimensions"])
    else:
        made = eqn.primitive.bind(*whole, **eqn.params)
    return jax.tree.map(lambda order: _as_floats(order, dtype), made)


def _as_ints(x: jax.Array, is_max: bool) -> jax.Array:
    """Floats as integers in the same order, with the same bits for positive ones."""
    if jnp.finfo(x.dtype).bits < _NARROW:
        x = lax.convert_element_type(x, jnp.float32)
    kind = jnp.iinfo(f"int{jnp.finfo(x.dtype).bits}")
    order = _flip_negatives(lax.bitcast_convert_type(x, kind.dtype), kind)
    last = lax.full_like(order, kind.max if is_max else kind.min)
    return lax.select(lax.ne(x, x), last, order)


def _as_floats(order: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_as_ints`."""
    kind = jnp.iinfo(order.dtype)
    wide = dtype if jnp.finfo(dtype).bits == kind.bits else jnp.float32
    return lax.convert_element_type(lax.bitcast_convert_type(_flip_negatives(order, kind), wide), dtype)


def _flip_negatives(bits: jax.Array, kind: Any) -> jax.Array:
    """Reverses the order of negative numbers, so integers are in the order of the floats; its own inverse."""
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, kind.bits - 1))
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, lax.full_like(bits, kind.max)))
