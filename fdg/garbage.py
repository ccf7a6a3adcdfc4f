"""Less frequent garbage collection while programs are traced, planned and lowered."""

import contextlib
import gc
from collections.abc import Iterator

# A trace has hundreds of thousands of small, mostly live objects, and Python scans them after every 700 new
# ones: a sixth of the time of a search for a policy.
_SELDOM = (200_000, 50, 100)


@contextlib.contextmanager
def infrequent_gc() -> Iterator[None]:
    """A context with a garbage collection only every 200,000 objects; a higher threshold is unchanged.

    >>> before = gc.get_threshold()
    >>> with infrequent_gc():
    ...     gc.get_threshold()[0] >= 200_000
    True
    >>> gc.get_threshold() == before
    True
    """
    before = gc.get_threshold()
    if before[0] and before[0] < _SELDOM[0]:
        gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
