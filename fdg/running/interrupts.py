"""Delays Ctrl-C while a state is replaced, so that a donated state is not lost before the new one is kept."""

import signal
import threading
from typing import Any


class DelayedInterrupt:
    """A context that delays Ctrl-C to its end; a second Ctrl-C is raised at once.

    Does nothing outside the main thread, or if Python does not handle SIGINT.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._caught: tuple[int, Any] | None = None

    def caught(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._caught is not None

    def __enter__(self) -> "DelayedInterrupt":
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
        signal.signal(signal.SIGINT, before)
        if self._caught is not None and kind is None:
            before(*self._caught)

    def _note(self, number: int, frame: Any) -> None:
        if self._caught is not None:
            self._before(number, frame)
        self._caught = number, frame
