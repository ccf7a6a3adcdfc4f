"""Delays Ctrl-C from the donation of a state until the new state is stored, so that no state is lost."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def delayed_interrupt() -> Iterator[Callable[[], bool]]:
    """A context that delays Ctrl-C to its end; a second Ctrl-C is raised at once.

    Yields a function that says whether Ctrl-C was pressed. Nothing is delayed outside the main thread, or if
    Python does not handle SIGINT.
    """
    signals: list[tuple[int, Any]] = []  # the arguments of the delayed calls of the handler
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return

    def record(signal_number: int, frame: Any) -> None:
        if signals:
            handler(signal_number, frame)
        signals.append((signal_number, frame))

    signal.signal(signal.SIGINT, record)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals:
        handler(*signals[-1])
