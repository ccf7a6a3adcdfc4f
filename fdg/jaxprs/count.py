"""Counts of a jaxpr: floating-point operations, elements, equations."""

import math
from collections.abc import Callable
from typing import Any

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
    size = max((math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)), default=0)
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracting)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(out_features, 1)
    if name == "polynomial":  # a product and a sum for each coefficient but one
        return 2 * (len(eqn.invars) - 2) * size
    return 0 if name in _MOVES else size
