"""Counts of a jaxpr: floating-point operations, elements, equations."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend import core

from fdg.jaxprs.classes import CLASSES, VIEWS
from fdg.jaxprs.read import bodies, walk


def total(jaxpr: core.Jaxpr, of: Callable[[Any], int]) -> int:
    """Sums `of(eqn)` over all equations that one execution of the jaxpr runs.

    Scans count each trip, `while` loops their largest possible number of trips, or one if it is unknown. A
    `cond` counts its most expensive branch.
    """
    return sum(_total_of(eqn, of) for eqn in jaxpr.eqns)


def _total_of(eqn: core.JaxprEqn, of: Callable[[Any], int]) -> int:
    inner = bodies(eqn)
    if not inner:
        return of(eqn)
    each = [body.trips * total(body.jaxpr, of) for body in inner]
    return max(each, default=0) if eqn.primitive.name == "cond" else sum(each)


def flops_of(jaxpr: core.Jaxpr) -> int:
    """Floating-point operations of one execution, summed as in `total`.

    A matrix product or convolution counts 2 for each multiply-add, any other equation the size of its largest
    operand or result, and data movement 0.
    """
    return total(jaxpr, _operation_flops)


def equation_flops(eqn: core.JaxprEqn) -> int:
    """Floating-point operations of one equation, counted as in `flops_of`; 0 for one that only moves data."""
    return _total_of(eqn, _operation_flops)


def equation_count(jaxpr: core.Jaxpr) -> int:
    """Equations that one execution runs; loops count each trip, and a `cond` all its branches.

    Mapped over agents, a `cond` runs all of them.
    """
    count = 0
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        count += sum(body.trips * equation_count(body.jaxpr) for body in inner) if inner else 1
    return count


def largest_cost(jaxpr: core.Jaxpr) -> int:
    """Cost of the most expensive single equation in floating-point operations.

    Counted as in `flops_of`, but elementwise equations count 100 for each element: a tanh takes about as long
    as fifty multiply-adds.
    """
    alone = (eqn for eqn in walk(jaxpr.eqns) if not bodies(eqn))
    weighed = (
        _operation_flops(eqn) * (1 if eqn.primitive.name in _PRODUCTS else _ELEMENTWISE) for eqn in alone
    )
    return max(weighed, default=0)


_ELEMENTWISE = 100

_PRODUCTS = ("dot_general", "conv_general_dilated")

_MOVES = VIEWS.union(
    CLASSES["copy"],
    "gather scatter convert_element_type random_bits random_split random_fold_in random_seed".split(),
)


def _operation_flops(eqn: Any) -> int:
    name = eqn.primitive.name
    if name in _PRODUCTS:
        return getattr(product_of(eqn), "flops", 0)
    size = max((math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)), default=0)
    if name == "polynomial":  # a product and a sum for each coefficient except one
        return 2 * (len(eqn.invars) - 2) * size
    return 0 if name in _MOVES else size


class Product(NamedTuple):
    """The shape of a matrix product: `batch` times `[m, k] @ [k, n]`.

    A convolution counts as the equivalent product with its patches as rows.

    >>> Product(1, 512, 4, 64, "float32").flops
    262144
    """

    batch: int
    m: int
    k: int
    n: int
    dtype: str
    convolution: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of one product; a multiply-add counts as two."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Bytes of its three matrices."""
        wide = int("".join(c for c in self.dtype if c.isdigit()) or 32) // 8
        return wide * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}{self.m} x {self.k} x {self.n}"


def product_of(eqn: Any) -> Product | None:
    """The shape of an equation's product; None if it is neither a product nor a convolution, or empty."""
    name = eqn.primitive.name
    if name not in _PRODUCTS:
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
