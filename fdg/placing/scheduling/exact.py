"""Code that computes the same bits on any platform, number of devices or program.

    n + 1, random.split(key), x[:4], where(done, 0, x)     exact: every group that needs it may compute it
    x * 0.9 + y, mean(x), tanh(x)                           not: one group computes it and sends the result

Floating-point arithmetic depends on how its program was compiled: fusion, vectorisation, order of sums.
Integers, booleans, keys, and floats that are only moved or selected do not.
"""

import jax
from jax.extend import core

from fdg import jaxprs

_CHOOSES = frozenset(
    "select_n max min clamp neg abs sign floor ceil round sort reduce_max reduce_min cummax cummin".split()
)


def is_exact(eqn: core.JaxprEqn) -> bool:
    """Whether an equation, with all that it calls, computes the same bits everywhere."""
    inner = jaxprs.bodies(eqn)
    if inner:
        return all(is_exact(one) for body in inner for one in body.jaxpr.eqns)
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if not any(dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact) for dtype in dtypes):
        return True
    return eqn.primitive.name in _CHOOSES or not jaxprs.equation_flops(eqn)
