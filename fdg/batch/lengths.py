"""Which numbers of devices a jaxpr cannot tell apart: those that divide the same of its lengths.

    tanh(x @ w), x [4096, 12], w [12, 64]     8, 16, 32 and 64 are alike: they divide 4096 and 64, and not 12
                                              4 divides all three, 12 divides 12 alone, 128 divides 4096 alone

Where the batch goes depends on nothing else of how many devices there are, so what is worked out for one
number serves the others of its kind: choosing among plans asks for many.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

from fdg import jaxprs
from fdg.batch.rules.result import shape_of


def alike(unit: int, lengths: frozenset[int]) -> int:
    """The least number that divides the same of some lengths as `unit` does.

    >>> alike(64, frozenset({4096, 12, 64})), alike(6, frozenset({12, 9}))
    (8, 2)
    """
    others = [length for length in lengths if length % unit]
    return next(n for n in divisors(unit) if all(length % n for length in others))


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of a number, the least first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@functools.lru_cache(maxsize=10_000)
def lengths_of(jaxpr: Any) -> frozenset[int]:
    """The lengths of all axes of everything in an open jaxpr, at any depth, and counts among parameters."""
    found = set(_of_atoms((*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)))
    for eqn in jaxpr.eqns:
        found |= lengths_of_equation(eqn)
    return frozenset(found)


def lengths_of_equation(eqn: Any) -> set[int]:
    """Likewise of one equation."""
    found = set(_of_atoms((*eqn.invars, *eqn.outvars)))
    # What rules call `divided`: numbers of groups.
    found.update(n for name, n in eqn.params.items() if name.endswith("_count") and isinstance(n, int))
    for body in jaxprs.bodies(eqn):
        found |= lengths_of(body.jaxpr)
    return found


def _of_atoms(atoms: Iterable[Any]) -> Iterable[int]:
    return (length for atom in atoms for length in shape_of(atom))
