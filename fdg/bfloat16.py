"""`in_bfloat16`: runs a function's matrix products with bfloat16 operands, and everything else in float32.

The function is traced. Each product of float32 arrays (`dot_general`, convolution) is replaced by a product
that rounds its operands to bfloat16 (8 bits of significand) and accumulates in float32; tensor cores and TPU
matrix units are fastest at this. The two products of its gradient are replaced too. Other operations, and the
function's inputs and outputs, keep their types, so neither the function nor its callers change.
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
from fdg.jax_internals import HIGH_LEVEL_PRIMITIVES
from fdg.jaxprs.classes import PRODUCTS
from fdg.rowwise import rowwise_p, trace_rows

# Primitives whose gradient may differ from that of their body.
_CUSTOM_GRADIENTS = ("custom_jvp_call", "custom_vjp_call", *HIGH_LEVEL_PRIMITIVES)


@checked
def in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function's float32 matrix products take bfloat16 operands and accumulate in float32.

    Products of other types are unchanged, and so are products with an explicit precision
    (`precision=jax.lax.Precision.HIGHEST`) other than JAX's setting `jax_default_matmul_precision`.

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
        name = getattr(function, "__name__", "function")

        def on_arrays(*arguments: Any) -> Any:
            return jaxprs.require_arrays(f"in_bfloat16 '{name}': result", function(*arguments, **options))

        jaxprs.require_arrays(f"in_bfloat16 '{name}': argument", arguments)
        closed, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*arguments)
        rounded = core.jaxpr_as_fun(jaxprs.rewrite(closed, _rewrite_equation))
        return jax.tree.unflatten(jax.tree.structure(shapes), rounded(*jax.tree.leaves(arguments)))

    return call


def _rewrite_equation(eqn: Any, inside: jaxprs.Inside) -> Any:
    """The equation, rewritten so that its products take bfloat16 operands."""
    if eqn.primitive.name in PRODUCTS:
        return (
            jaxprs.traced_equation(_product(eqn), eqn.invars, eqn.outvars) if _rounds_operands(eqn) else eqn
        )
    if eqn.primitive is rowwise_p:  # devices, `vmap` and gradients trace its function again
        function = in_bfloat16(eqn.params["function"])
        jaxpr = trace_rows(function, jaxprs.shapes_of(eqn.invars))
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr, "function": function})
    rewritten = inside(eqn)
    if eqn.primitive.name == "custom_vmap_call":  # `vmap` calls its rule in place of its body
        rule = functools.partial(_rule_in_bfloat16, eqn.params["rule"])
        return rewritten.replace(params={**rewritten.params, "rule": rule})
    if rewritten is not eqn and eqn.primitive.name in _CUSTOM_GRADIENTS:
        return jaxprs.traced_equation(_rewritten_call(eqn), eqn.invars, eqn.outvars)
    return rewritten


def _rule_in_bfloat16(rule: Callable[..., Any], size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
    """Calls the rule of a `custom_vmap`, which also returns which results are batched."""
    is_batched: list[Any] = []

    def results(*arguments: Any) -> Any:
        result, marks = rule(size, batched, *arguments)
        is_batched.append(marks)
        return result

    return in_bfloat16(results)(*arguments), is_batched[0]


def _rounds_operands(eqn: Any) -> bool:
    """Whether a product is rewritten: all its arrays are float32, and it has no precision of its own."""
    config: Any = jax.config
    has_precision = eqn.params["precision"] != _default_precision(config.jax_default_matmul_precision)
    return not has_precision and all(v.aval.dtype == jnp.float32 for v in (*eqn.invars, *eqn.outvars))


@functools.cache
def _default_precision(setting: str | None) -> Any:
    """The `precision` of a product if the user gives none, under this `jax_default_matmul_precision`."""
    matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    with jax.default_matmul_precision(setting):
        return jax.make_jaxpr(jnp.matmul)(matrix, matrix).eqns[0].params["precision"]


def _product(eqn: Any) -> Callable[..., jax.Array]:
    """A function for a product that rounds its float32 operands to bfloat16, also in its gradient."""
    params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}
    bind = functools.partial(eqn.primitive.bind, **params)
    left_shape, right_shape = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)

    @jax.custom_vjp
    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return bind(_to_bfloat16(left), _to_bfloat16(right))

    def forward(left: Any, right: Any) -> tuple[jax.Array, Any]:
        # An operand is a residual only if the other operand is differentiated (`perturbed`).
        rounded_left, rounded_right = _to_bfloat16(left.value), _to_bfloat16(right.value)
        return bind(rounded_left, rounded_right), (
            rounded_left if right.perturbed else None,
            rounded_right if left.perturbed else None,
        )

    def backward(
        residuals: Sequence[jax.Array | None], cotangent: Any
    ) -> tuple[jax.Array | None, jax.Array | None]:
        if isinstance(cotangent, SymbolicZero):
            return None, None
        # The conversion to float32 is exact, so rounding again changes nothing.
        left, right = (None if x is None else x.astype(jnp.float32) for x in residuals)
        return (
            None if right is None else _apply_transpose(lambda x: bind(x, right), left_shape, cotangent),
            None if left is None else _apply_transpose(lambda x: bind(left, x), right_shape, cotangent),
        )

    product.defvjp(forward, backward, symbolic_zeros=True)
    return product


def _to_bfloat16(x: jax.Array) -> jax.Array:
    # XLA may cancel a pair of conversions in one program and not in another. An explicit `reduce_precision`
    # rounds in every program, so the numbers are the same under every distribution policy.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _apply_transpose(
    linear: Callable[..., jax.Array], shape: jax.ShapeDtypeStruct, cotangent: jax.Array
) -> jax.Array:
    """Applies the transpose of a linear function to a cotangent, with bfloat16 products."""
    transpose = jax.linear_transpose(linear, shape)
    return in_bfloat16(lambda cotangent: transpose(cotangent)[0])(cotangent)


def _rewritten_call(eqn: Any) -> Callable[..., list[jax.Array]]:
    """A function for a call with a custom gradient, with bfloat16 products in the call and its gradient."""
    inputs = [core.Var(v.aval) for v in eqn.invars]
    original = core.jaxpr_as_fun(jaxprs.build(inputs, eqn.outvars, [eqn.replace(invars=inputs)]))
    (body,) = map(core.jaxpr_as_fun, jaxprs.closed_bodies(eqn))
    float_operands, float_results = (
        [i for i, v in enumerate(variables) if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        for variables in (eqn.invars, eqn.outvars)
    )

    @jax.custom_vjp
    def call(*operands: jax.Array) -> list[jax.Array]:
        return in_bfloat16(body)(*operands)

    def forward(*operands: jax.Array) -> tuple[list[jax.Array], Any]:
        def call_on_floats(*floats: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            replaced = dict(zip(float_operands, floats, strict=True))
            results = original(*(replaced.get(i, x) for i, x in enumerate(operands)))
            return [results[i] for i in float_results], results

        _, vjp, results = jax.vjp(call_on_floats, *(operands[i] for i in float_operands), has_aux=True)
        return results, vjp

    def backward(vjp: Any, cotangents: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        gradients = in_bfloat16(lambda vjp, cotangents: vjp(cotangents))(
            vjp, [cotangents[i] for i in float_results]
        )
        by_operand = dict(zip(float_operands, gradients, strict=True))
        return tuple(by_operand.get(i) for i in range(len(inputs)))

    call.defvjp(in_bfloat16(forward), backward)
    return call
