"""Delays Ctrl-C from the donation of a state until the new state is stored, so that no state is lost."""

import signal
import threading
from typing import Any


class DelayedInterrupt:
    """A context that delays Ctrl-C to its end; a second Ctrl-C is raised at once.

    Does nothing outside the main thread, or if Python does not handle SIGINT.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # Python's handler of SIGINT, while this context replaces it
        self._signal: tuple[int, Any] | None = None  # the arguments of the delayed call of the handler

    def is_pending(self) -> bool:
        """Whether Ctrl-C was pressed inside the context."""
        return self._signal is not None

    def __enter__(self) -> "DelayedInterrupt":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        if self._handler is None:
            return
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        if self._signal is not None and error_type is None:
            handler(*self._signal)

    def _record(self, signal_number: int, frame: Any) -> None:
        if self._signal is not None:
            self._handler(signal_number, frame)
        self._signal = signal_number, frame
