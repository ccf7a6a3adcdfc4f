"""Caches results by the identity of their argument, such as a jaxpr that is called from many places.

Choosing among hundreds of plans of a graph thus opens its iteration once for each placement of fragments.
"""

import collections
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class IdentityCache(Generic[Found]):
    """An LRU cache from (object, key) to a result; exceptions are not cached."""

    def __init__(self, max_entries: int | None = None) -> None:
        """Keeps at most `max_entries` results; all, if None."""
        self._max_entries = max_entries
        self._known: collections.OrderedDict[Hashable, tuple[Any, Found]] = collections.OrderedDict()

    def __call__(self, of: Any, how: Hashable, make: Callable[[], Found]) -> Found:
        """Returns `make()`, cached by the identity of `of` and by `how`.

        The cache keeps `of` alive, so that its id is not reused.
        """
        key = id(of), how
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][1]
        found = make()
        self._known[key] = of, found
        if self._max_entries is not None and len(self._known) > self._max_entries:
            self._known.popitem(last=False)
        return found
