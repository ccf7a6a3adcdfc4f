"""`in_bfloat16`: runs a function's matrix products with bfloat16 operands, and everything else in float32.

The function is traced. Each product of float32 arrays (`dot_general`, convolution) is replaced by one whose
operands are rounded to bfloat16 (8 bits of significand) and which accumulates in float32; tensor cores and
TPU matrix units are fastest at this. The two products of its gradient are replaced too. Other operations, and
the function's inputs and outputs, keep their types, so neither the function nor its callers change.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from fdg import jaxprs
from fdg.arguments import checked
from fdg.jax_internals import HIGH_LEVEL

_PRODUCTS = ("dot_general", "conv_general_dilated")
_OF_THEIR_OWN_GRADIENT = ("custom_jvp_call", "custom_vjp_call", *HIGH_LEVEL)


@checked
def in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function's float32 matrix products take bfloat16 operands and accumulate in float32.

    Products of other types are unchanged, and so are products with an explicit precision
    (`precision=jax.lax.Precision.HIGHEST`).

    Args:
      function: a pure function from pytrees of arrays to pytrees of arrays; keyword arguments are static.

    Returns:
      The function, with the same shapes and dtypes. It composes with `jit`, `vmap` and `grad`, but not with
      `jax.jvp`.

    >>> third = jax.numpy.full((1, 1), 1 / 3)
    >>> print(jax.numpy.matmul(third, third), in_bfloat16(jax.numpy.matmul)(third, third))
    [[0.11111112]] [[0.11154556]]
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        closed, shapes = jax.make_jaxpr(functools.partial(function, **options), return_shape=True)(*arguments)
        rounded = core.jaxpr_as_fun(jaxprs.rewrite(closed, _rounded))
        return jax.tree.unflatten(jax.tree.structure(shapes), rounded(*jax.tree.leaves(arguments)))

    return call


def _rounded(eqn: Any, inside: jaxprs.Inside) -> Any:
    """Rewrites an equation so that its products take bfloat16 operands."""
    if eqn.primitive.name in _PRODUCTS:
        return jaxprs.as_one(_product(eqn), eqn.invars, eqn.outvars) if _is_to_be_rounded(eqn) else eqn
    now = inside(eqn)
    if now is not eqn and eqn.primitive.name in _OF_THEIR_OWN_GRADIENT:
        return jaxprs.as_one(_rewritten_call(eqn), eqn.invars, eqn.outvars)
    return now


def _is_to_be_rounded(eqn: Any) -> bool:
    config: Any = jax.config  # if set, its default appears as every product's precision
    asked = eqn.params["precision"] is not None and config.jax_default_matmul_precision is None
    return not asked and all(v.aval.dtype == jnp.float32 for v in (*eqn.invars, *eqn.outvars))


def _product(eqn: Any) -> Callable[..., jax.Array]:
    """A product that rounds its float32 operands to bfloat16, and whose gradients are such products too."""
    params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}
    bind = functools.partial(eqn.primitive.bind, **params)
    of_left, of_right = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)

    @jax.custom_vjp
    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return bind(_to_bfloat16(left), _to_bfloat16(right))

    def forward(left: Any, right: Any) -> tuple[jax.Array, Any]:
        # An operand is a residual only if the other operand is differentiated.
        first, second = _to_bfloat16(left.value), _to_bfloat16(right.value)
        return bind(first, second), (
            first if right.perturbed else None,
            second if left.perturbed else None,
        )

    def backward(kept: Sequence[jax.Array | None], slope: Any) -> tuple[jax.Array | None, jax.Array | None]:
        if isinstance(slope, SymbolicZero):
            return None, None
        # The conversion to float32 is exact, so rounding again changes nothing.
        left, right = (None if x is None else x.astype(jnp.float32) for x in kept)
        return (
            None if right is None else _transposed(lambda x: bind(x, right), of_left, slope),
            None if left is None else _transposed(lambda x: bind(left, x), of_right, slope),
        )

    product.defvjp(forward, backward, symbolic_zeros=True)
    return product


def _to_bfloat16(x: jax.Array) -> jax.Array:
    # XLA may cancel a pair of conversions in one program and not in another. An explicit `reduce_precision`
    # rounds in every program, so the numbers are the same under every distribution policy.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _transposed(linear: Callable[..., jax.Array], shape: jax.ShapeDtypeStruct, slope: jax.Array) -> jax.Array:
    transpose = jax.linear_transpose(linear, shape)
    return in_bfloat16(lambda slope: transpose(slope)[0])(slope)


def _rewritten_call(eqn: Any) -> Callable[..., list[jax.Array]]:
    """Rewrites a call with a custom gradient: products of the function and of the gradient use bfloat16."""
    inputs = [core.Var(v.aval) for v in eqn.invars]
    itself = core.jaxpr_as_fun(jaxprs.build(inputs, eqn.outvars, [eqn.replace(invars=inputs)]))
    (body,) = map(core.jaxpr_as_fun, jaxprs.closed_bodies(eqn))
    float_operands = [i for i, v in enumerate(eqn.invars) if _is_float(v)]
    float_results = [i for i, v in enumerate(eqn.outvars) if _is_float(v)]

    @jax.custom_vjp
    def call(*operands: jax.Array) -> list[jax.Array]:
        return in_bfloat16(body)(*operands)

    def forward(*operands: jax.Array) -> tuple[list[jax.Array], Any]:
        def of_floats(*floats: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            given = [*operands]
            for i, x in zip(float_operands, floats, strict=True):
                given[i] = x
            results = itself(*given)
            return [results[i] for i in float_results], results

        _, pull, results = jax.vjp(of_floats, *(operands[i] for i in float_operands), has_aux=True)
        return results, pull

    def backward(pull: Any, slopes: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        pulled = in_bfloat16(lambda pull, slopes: pull(slopes))(pull, [slopes[i] for i in float_results])
        found = dict(zip(float_operands, pulled, strict=True))
        return tuple(found.get(i) for i in range(len(inputs)))

    call.defvjp(in_bfloat16(forward), backward)
    return call


def _is_float(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating)
