"""Code that gives the same bits wherever it runs: on another platform, on more devices, in another program.

    n + 1, random.split(key), x[:4], where(done, 0, x)     exact: may be computed by every group that needs it
    x * 0.9 + y, mean(x), tanh(x)                           not: one group computes it, and the others get it

Floating-point arithmetic rounds as its program was compiled: fused or not, vectorised or not, summed in this
order or that. Integers, booleans, keys, and floats that are only moved or chosen do not depend on it.
"""

import jax
from jax.extend import core

from fdg import jaxprs

_CHOOSES = frozenset(
    "select_n max min clamp neg abs sign floor ceil round sort reduce_max reduce_min cummax cummin".split()
)


def is_exact(eqn: core.JaxprEqn) -> bool:
    """Whether an equation, and all that it calls, gives the same bits everywhere for the same inputs."""
    inner = jaxprs.bodies(eqn)
    if inner:
        return all(is_exact(one) for body in inner for one in body.jaxpr.eqns)
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if not any(dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact) for dtype in dtypes):
        return True
    return eqn.primitive.name in _CHOOSES or not jaxprs.equation_flops(eqn)
