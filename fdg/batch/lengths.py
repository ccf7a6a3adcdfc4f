"""Replaces a number of devices by the smallest one that is equivalent for a jaxpr.

Two numbers of devices are equivalent if they divide the same axis lengths of the jaxpr:

    tanh(x @ w), x [4096, 12], w [12, 64]     8, 16, 32 and 64 are equivalent: they divide 4096 and 64, not 12
                                              4 divides all three, 12 only 12, 128 only 4096

Propagation of the batch axis uses the number of devices only to test divisibility. So one result serves all
equivalent numbers, which saves time when many plans are compared.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

from fdg import jaxprs
from fdg.batch.rules.result import shape_of


def smallest_equivalent(devices: int, lengths: frozenset[int]) -> int:
    """The smallest divisor of `devices` that divides the same lengths.

    >>> smallest_equivalent(64, frozenset({4096, 12, 64})), smallest_equivalent(6, frozenset({12, 9}))
    (8, 2)
    """
    undivided = [length for length in lengths if length % devices]
    return next(n for n in divisors(devices) if all(length % n for length in undivided))


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@functools.lru_cache(maxsize=10_000)
def lengths_of(jaxpr: Any) -> frozenset[int]:
    """The lengths of all axes in an open jaxpr and its inner jaxprs; convolutions' numbers of groups, too."""
    lengths = frozenset(_axis_lengths((*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)))
    return lengths.union(*map(lengths_of_equation, jaxpr.eqns))


def lengths_of_equation(eqn: Any) -> set[int]:
    """The lengths of all axes in one equation."""
    lengths = set(_axis_lengths((*eqn.invars, *eqn.outvars)))
    # Numbers of groups, such as `feature_group_count`: they are tested, too (`multiples` of `RuleResult`).
    lengths.update(n for name, n in eqn.params.items() if name.endswith("_count") and isinstance(n, int))
    return lengths.union(*(lengths_of(body.jaxpr) for body in jaxprs.bodies(eqn)))


def _axis_lengths(atoms: Iterable[Any]) -> Iterable[int]:
    return (length for atom in atoms for length in shape_of(atom))
