"""Maxima and minima over devices in which NaN stays NaN.

XLA's all-reduce of floats by `max` and `min` drops NaN on CPUs, and so does NCCL's, whose operators are
`fmax` and `fmin`. An all-reduce of integers has no such case. So what devices combine are integers in the
order of the floats, NaN beyond all others:

    m = reduce_max x     ->     m = float (reduce_max (ordered x))

    ordered   NaN (for min)  -inf ... -1.0 ... -0.0 < 0.0 ... 1.0 ... inf  NaN (for max)

There are as many exchanges as before, of as many bytes; no bit of what is not NaN is lost.
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
_NARROW = 16  # bits: of fewer, NaN has no fixed place among the bits, and float32 holds all numbers


def may_lose_nan(eqn: Any) -> bool:
    """Whether an operation takes an extreme of floats along an axis, from which an exchange may drop NaN."""
    if _name(eqn) not in _IS_MAX:
        return False
    floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
    return floats and all(v.aval.size for v in eqn.invars)  # of nothing, an extreme is infinite


def _name(eqn: Any) -> str:
    """Of the operation, or of the only one in a reduction of one array by a function of the user's own."""
    if eqn.primitive.name == "reduce" and len(eqn.outvars) == 1:
        inner = jaxprs.open_jaxpr(eqn.params["jaxpr"]).eqns
        while len(inner) == 1 and inner[0].primitive.name in ("jit", "pjit"):
            inner = jaxprs.open_jaxpr(inner[0].params["jaxpr"]).eqns
        return inner[0].primitive.name if len(inner) == 1 else ""
    return eqn.primitive.name if eqn.primitive.name not in ("max", "min") else ""


def keep_nan(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program all of whose extremes of floats keep NaN, at any depth, however XLA splits it."""
    return jaxprs.rewrite(closed, _kept)


def _kept(eqn: Any, inside: jaxprs.Inside) -> Any:
    if not may_lose_nan(eqn):
        return inside(eqn)
    return jaxprs.traced(functools.partial(_by_integers, eqn), eqn.invars, eqn.outvars)[0]


def extreme_over(axis: str, name: str, x: jax.Array) -> jax.Array:
    """The extreme of the arrays that the devices along a mesh axis have; NaN where one has NaN.

    Args:
      axis: of the mesh.
      name: of the operation that made them, such as `reduce_max`.
      x: this device's.
    """
    is_max = _IS_MAX[name]
    together = lax.pmax if is_max else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return together(x, axis)
    return _floats(together(_ordered(x, is_max), axis), x.dtype)


def _by_integers(eqn: Any, *operands: Any) -> Any:
    is_max, dtype = _IS_MAX[_name(eqn)], eqn.outvars[0].aval.dtype
    whole: list[Any] = [_ordered(x, is_max) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    made: Any
    if eqn.primitive.name in _SCATTERS:
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        made = _SCATTERS[eqn.primitive.name](*whole, **{name: eqn.params[name] for name in names})
    elif eqn.primitive.name == "reduce":
        array, start = whole
        made = lax.reduce(array, start, lax.max if is_max else lax.min, eqn.params["dimensions"])
    else:
        made = eqn.primitive.bind(*whole, **eqn.params)
    return jax.tree.map(lambda order: _floats(order, dtype), made)


def _ordered(x: jax.Array, is_max: bool) -> jax.Array:
    """Integers in the order of floats, of the same bits where these are positive."""
    if jnp.finfo(x.dtype).bits < _NARROW:
        x = lax.convert_element_type(x, jnp.float32)
    kind = jnp.iinfo(f"int{jnp.finfo(x.dtype).bits}")
    order = _turned(lax.bitcast_convert_type(x, kind.dtype), kind)
    last = lax.full_like(order, kind.max if is_max else kind.min)
    return lax.select(lax.ne(x, x), last, order)


def _floats(order: jax.Array, dtype: Any) -> jax.Array:
    """What `_ordered` was made of."""
    kind = jnp.iinfo(order.dtype)
    wide = dtype if jnp.finfo(dtype).bits == kind.bits else jnp.float32
    return lax.convert_element_type(lax.bitcast_convert_type(_turned(order, kind), wide), dtype)


def _turned(bits: jax.Array, kind: Any) -> jax.Array:
    """With the order of those that are negative reversed: twice is as it was."""
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, kind.bits - 1))
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, lax.full_like(bits, kind.max)))
