"""What was worked out for an object, by its identity: a jaxpr called from many places is rewritten once.

Choosing among hundreds of plans of a graph opens its iteration once for each way to place its fragments.
"""

import collections
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class IdentityCache(Generic[Found]):
    """Results by what they are of; errors are raised anew each time."""

    def __init__(self, most: int | None = None) -> None:
        """Of the latest `most`; of all, if None."""
        self._most = most
        self._known: collections.OrderedDict[Hashable, tuple[Any, Found]] = collections.OrderedDict()

    def __call__(self, of: Any, how: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives, or gave before for the same object and the same `how`.

        `of` is kept, so that no other object gets its identity.
        """
        key = id(of), how
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][1]
        found = make()
        self._known[key] = of, found
        if self._most is not None and len(self._known) > self._most:
            self._known.popitem(last=False)
        return found
