"""Pre-transposes operands of weight-gradient products, so that XLA's CPU library computes them faster.

    g = dot_general d x    [O, I], contracted over the rows of d [N, O] and x [N, I]
    w = transpose g        [I, O]

XLA computes both lines as one product `x.T @ d` that reads both operands along columns. On one core it takes
1.1 to 2 times as long as with `x` transposed in memory (N x I x O = 512 x 256 x 256: 750 and 650 us;
128 x 1024 x 128: 670 and 340 us). XLA would merge a transpose with the product that reads it, so an
optimization barrier separates them.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from fdg import jaxprs
from fdg.jax_internals import ClosedJaxpr

# Transposing pays off if the second operand has at least this many columns, ...
_MIN_COLUMNS = 64
_SMALL_BYTES = 1 << 20  # ... or the first operand has at most this many bytes
_CONTRACT_ROWS = (((0,), (0,)), ((), ()))  # the dimension numbers of x.T @ y
_MATMUL = (((1,), (0,)), ((), ()))  # the dimension numbers of x @ y


def transpose_weight_gradients(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Transposes the first operand of products over rows, also in loops and calls.

    >>> grad = jax.grad(lambda w, x: (x @ w).sum())
    >>> traced = jax.make_jaxpr(grad)(jax.numpy.ones((64, 64)), jax.numpy.ones((8, 64)))
    >>> [eqn.primitive.name for eqn in jaxprs.open_jaxpr(transpose_weight_gradients(traced)).eqns[-3:]]
    ['transpose', 'optimization_barrier', 'dot_general']
    """
    return jaxprs.rewrite_blocks(closed, _transpose_products)


def _transpose_products(jaxpr: Any, context: None, inside: jaxprs.Inside) -> Iterator[Any]:
    """The equations of a jaxpr; a product that only a transpose reads is computed transposed."""
    reads = Counter(jaxprs.variables([*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]))
    # product -> its first operand, its second operand, and the result that is computed for it
    products = {eqn.outvars[0]: (*eqn.invars, eqn.outvars[0]) for eqn in jaxpr.eqns if _contracts_rows(eqn)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "transpose" and reads[eqn.invars[0]] == 1 and eqn.invars[0] in products:
            first, second, _ = products[eqn.invars[0]]
            products[eqn.invars[0]] = second, first, eqn.outvars[0]
    products = {product: operands for product, operands in products.items() if _is_faster(*operands[:2])}
    # results of transposes that the products compute themselves
    merged = {out for product, (_, _, out) in products.items() if out is not product}
    transposed: dict[Any, Any] = {}  # operand -> the variable of its transpose
    for eqn in jaxpr.eqns:
        if eqn.outvars and eqn.outvars[0] in products:
            first, second, out = products[eqn.outvars[0]]
            if first not in transposed:
                equations, (transposed[first],) = jaxprs.traced(_transpose, [first])
                yield from equations
            params = {**eqn.params, "dimension_numbers": _MATMUL}
            product = functools.partial(eqn.primitive.bind, **params)
            yield jaxprs.traced_equation(product, [transposed[first], second], [out])
        elif not (eqn.outvars and eqn.outvars[0] in merged):
            yield inside(eqn)


def _transpose(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x.T)


def _contracts_rows(eqn: Any) -> bool:
    """Whether an equation is a product of two matrices that contracts the rows of both."""
    return (
        eqn.primitive.name == "dot_general"
        and tuple(tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"]) == _CONTRACT_ROWS
        and all(v.aval.ndim == 2 and not jaxprs.is_literal(v) for v in eqn.invars)
    )


def _is_faster(first: Any, second: Any) -> bool:
    """Whether transposing the first operand saves more time than it costs."""
    first, second = first.aval, second.aval
    # XLA would turn the transposed product with a vector into an elementwise sum, 4 times as slow.
    if first.shape[1] == 1 or second.shape[1] == 1:
        return False
    return second.shape[1] >= _MIN_COLUMNS or jaxprs.bytes_of(first) <= _SMALL_BYTES
