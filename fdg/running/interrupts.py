"""Ctrl-C held back for a moment: arrays that are given up are not lost before their successors are kept."""

import signal
import threading
from typing import Any


class Held:
    """While it is entered, Ctrl-C is only noted; on leaving, it happens. A second one happens at once.

    Where Python does not handle the signal, or in another thread than the main one, it does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._caught: tuple[int, Any] | None = None

    def caught(self) -> bool:
        """Whether there was one."""
        return self._caught is not None

    def __enter__(self) -> "Held":
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
