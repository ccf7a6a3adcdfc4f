"""Hoists random draws out of loops: they are drawn for all trips at once, with the same numbers.

In a loop that carries `x` and scans over keys, one per trip,

    scan 128 trips { x; key: k = split key; u = uniform k[0]; r = uniform k[1]; x = step x u r }

the draws depend only on the keys, not on carried values. They are hoisted and vectorised:

    us, rs = for all 128 keys: k = split key; u = uniform k[0]; r = uniform k[1]
    scan 128 trips { x; u, r: x = step x u r }

A draw consists of many small operations. On a CPU they take half of the time of a step with few environments;
on a GPU each of them is a kernel launch. The bits are the same, because threefry hashes each key
independently. Draws of generators whose bits depend on the batch of keys stay in the loop.
"""

import functools

from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.hoisting import HoistRule, hoist

# The maximum bytes of all draws of a loop; above it, drawing in each trip is faster than storing them.
MAX_BYTES = 64 << 20

_DRAWS = frozenset(  # primitives
    "random_bits random_split random_fold_in random_gamma random_seed threefry2x32 random_clone".split()
)


@functools.lru_cache(maxsize=256)
def hoist_draws(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Hoists the draws of a program's scans, at any depth."""
    return hoist(jaxpr, HoistRule("draws", lambda eqn: eqn.primitive.name in _DRAWS, MAX_BYTES))
