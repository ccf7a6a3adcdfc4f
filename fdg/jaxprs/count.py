"""Counts of a jaxpr: floating-point operations, elements, equations."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from fdg.jaxprs.classes import CLASSES, PRODUCTS, VIEWS
from fdg.jaxprs.read import bodies, walk


def flops_of(jaxpr: core.Jaxpr) -> int:
    """The floating-point operations of one execution.

    A matrix product or convolution counts 2 per multiply-add; data movement, conversions and random bits 0;
    and any other equation the size of its largest operand or result. A scan counts each trip, a `while` loop
    its expected trips (`fdg.expect_trips`), or their upper bound, or one if both are unknown. A `cond` counts
    its most expensive branch.
    """
    return sum(map(equation_flops, jaxpr.eqns))


def equation_flops(eqn: core.JaxprEqn) -> int:
    """The floating-point operations of one equation, counted like `flops_of`; 0 if it only moves data."""
    inner = bodies(eqn)
    if not inner:
        return _operation_flops(eqn)
    totals = [body.trips * flops_of(body.jaxpr) for body in inner]
    return max(totals, default=0) if eqn.primitive.name == "cond" else sum(totals)


def equation_count(jaxpr: core.Jaxpr) -> int:
    """The number of equations that one execution runs. Called by `placing.agents_per_device`.

    Loops count each trip. A `cond` counts all branches, because it runs all of them when it is vmapped over
    agents.
    """
    count = 0
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        count += sum(body.trips * equation_count(body.jaxpr) for body in inner) if inner else 1
    return count


def largest_cost(jaxpr: core.Jaxpr) -> int:
    """The cost of the most expensive single equation, in FLOPs. Called by `running.host_devices`.

    Counted like `flops_of`, but equations other than products count 100 per element: a tanh takes about as
    long as fifty multiply-adds.
    """
    equations = (eqn for eqn in walk(jaxpr.eqns) if not bodies(eqn))
    costs = (
        _operation_flops(eqn) * (1 if eqn.primitive.name in PRODUCTS else _ELEMENTWISE_COST)
        for eqn in equations
    )
    return max(costs, default=0)


_ELEMENTWISE_COST = 100  # per element, in `largest_cost`

_MOVES = VIEWS.union(  # operations without FLOPs
    CLASSES["copy"],
    "gather scatter convert_element_type random_bits random_split random_fold_in random_seed".split(),
)


def _operation_flops(eqn: Any) -> int:
    """`equation_flops` of an equation without bodies."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return getattr(product_of(eqn), "flops", 0)
    size = max((math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)), default=0)
    if name == "polynomial":  # a product and a sum for each coefficient except the first
        return 2 * (len(eqn.invars) - 2) * size
    return 0 if name in _MOVES else size


class Product(NamedTuple):
    """The shape of a matrix product: `batch` times `[m, k] @ [k, n]`.

    A convolution counts as the equivalent product, whose left matrix has the input's patches as rows.

    >>> Product(1, 512, 4, 64, "float32").flops
    262144
    >>> [Product(1, 1, 1, 1, dtype).bytes for dtype in ("float32", "bfloat16", "float8_e4m3fn", "bool")]
    [12, 6, 3, 3]
    """

    batch: int
    m: int
    k: int
    n: int
    dtype: str
    convolution: bool = False

    @property
    def flops(self) -> int:
        """The floating-point operations of one product; a multiply-add counts as two."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """The bytes of the product's three matrices."""
        return (
            jnp.dtype(self.dtype).itemsize
            * self.batch
            * (self.m * self.k + self.k * self.n + self.m * self.n)
        )

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}{self.m} x {self.k} x {self.n}"


def product_of(eqn: Any) -> Product | None:
    """The shape of an equation's product; None if it is not a product or convolution, or is empty."""
    name = eqn.primitive.name
    if name not in PRODUCTS:
        return None
    left, right, out = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    dtype, size = str(eqn.invars[0].aval.dtype), math.prod(out)
    if name == "dot_general":
        (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
        batches = math.prod(left[axis] for axis in batch)
        k = math.prod(left[axis] for axis in contracting)
        m, n = (math.prod(side) // max(1, batches * k) for side in (left, right))
        return Product(batches, m, k, n, dtype) if size and k else None
    groups = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"])
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    k = math.prod(right) // max(1, features)
    return Product(groups, size // features, k, features // groups, dtype, True) if size and k else None
