"""Makes garbage collection less frequent while programs are traced, planned and lowered."""

import contextlib
import gc
from collections.abc import Iterator

# A trace has hundreds of thousands of small objects, most of them live. Python scans them after every 700 new
# ones, which takes a sixth of the time of a search for a policy.
_THRESHOLDS = (200_000, 50, 100)


@contextlib.contextmanager
def infrequent_gc() -> Iterator[None]:
    """A context with a garbage collection only every 200,000 objects; a higher threshold stays.

    >>> before = gc.get_threshold()
    >>> with infrequent_gc():
    ...     gc.get_threshold()[0] >= 200_000
    True
    >>> gc.get_threshold() == before
    True
    """
    previous = gc.get_threshold()
    if previous[0] and previous[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*previous)
