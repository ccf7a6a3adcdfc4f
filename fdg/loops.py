"""`expect_trips`: declares how many trips a `while` loop makes, which its jaxpr does not say."""

import jax
from jax.ad_checkpoint import checkpoint_name

from fdg.arguments import check_at_least, checked
from fdg.jaxprs.read import EXPECTED_TRIPS


@checked
def expect_trips(condition: jax.Array, trips: int) -> jax.Array:
    """Returns a `while` loop's condition unchanged, and declares the mean number of trips.

    Predicted times, counts of operations and `auto` depend on it; the loop's results do not. Without it, a
    loop counts as N trips if its condition is `i < N` and `i` counts from 0, and else as one trip.

    Args:
      condition: bool, the result of `cond_fun` of `jax.lax.while_loop`.
      trips: at least 0.

    Raises:
      FdgError: `trips` is negative or not an integer.

    >>> halve = lambda x: jax.lax.while_loop(lambda x: expect_trips(x > 1, 10), lambda x: x / 2, x)
    >>> print(halve(1000.0))
    0.9765625
    """
    check_at_least(0, trips=trips)
    # JAX keeps the name of a value through every transformation.
    return checkpoint_name(condition, f"{EXPECTED_TRIPS}{trips}")
