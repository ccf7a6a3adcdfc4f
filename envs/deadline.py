"""Time limits for calls that cannot be interrupted, such as those of a library in C++."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Deadline:
    """A thread that makes calls, so that the caller can stop waiting for one that cannot be interrupted."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """The function's result; raises its exceptions.

        Raises:
          TimeoutError: the time limit passed. The thread may hang in the call: use another `Deadline`.
        """
        self.begin(function)
        return self.finish(seconds)

    def begin(self, function: Callable[[], Any]) -> None:
        """Queues a call of the function; `finish` returns its result."""
        self._calls.put(function)

    def finish(self, seconds: float | None) -> Any:
        """Waits for the oldest call whose result was not returned yet; returns and raises as `call` does.

        `seconds=None` waits without limit.
        """
        try:
            result, error = self._results.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return result

    def ready(self) -> bool:
        """True if `finish` would not wait."""
        return not self._results.empty()

    def close(self) -> None:
        """Ends the thread after its current call."""
        self._calls.put(None)

    def _work(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:
                self._results.put((None, error))
            function = None  # drop the reference while waiting
