"""Caches results by the identity of an argument, such as a jaxpr that is called from many places.

So when fdg compares hundreds of plans of a graph, it opens the iteration once per placement of fragments.
Use `functools.lru_cache` if the key would be all arguments of a function: it compares jaxprs by identity too.
"""

import collections
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class IdentityCache(Generic[Result]):
    """An LRU cache from (object, key) to a result; exceptions are not cached."""

    def __init__(self, max_entries: int | None = None) -> None:
        """Keeps at most `max_entries` results; None keeps all."""
        self._max_entries = max_entries
        self._results: collections.OrderedDict[Hashable, tuple[Any, Result]] = collections.OrderedDict()

    def __call__(self, argument: Any, options: Hashable, make: Callable[[], Result]) -> Result:
        """Returns `make()`, cached by the identity of `argument` and by `options`.

        The cache keeps `argument` alive, so that its id is not reused.
        """
        key = id(argument), options
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key][1]
        result = make()
        self._results[key] = argument, result
        if self._max_entries is not None and len(self._results) > self._max_entries:
            self._results.popitem(last=False)
        return result
