"""Calls that cannot be interrupted, with a limit on how long the caller waits."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Deadline:
    """A thread that makes calls which cannot be interrupted, so that the caller can stop waiting."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """The function's result, or what it raises.

        Raises:
          TimeoutError: it was not there in time. The thread may be lost: use another `Deadline`.
        """
        self.begin(function)
        return self.finish(seconds)

    def begin(self, function: Callable[[], Any]) -> None:
        """Has the thread call the function; `finish` gives what comes of it."""
        self._calls.put(function)

    def finish(self, seconds: float | None) -> Any:
        """The result of the call that began first of those not finished, or what it raised; see `call`.

        `seconds=None` waits as long as it takes.
        """
        try:
            result, error = self._results.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return result

    def ready(self) -> bool:
        """Whether `finish` would not wait."""
        return not self._results.empty()

    def close(self) -> None:
        """Lets the thread end, once it has done what it is at."""
        self._calls.put(None)

    def _work(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:
                self._results.put((None, error))
            function = None
