"""Ctrl-C and SIGTERM, which end a run at the end of a call instead of in the middle of one."""

import signal
import threading
from typing import Any

from fdg import ctrl_c
from fdg.processes import distributed


class Signals:
    """Keeps Ctrl-C and SIGTERM for the loop to look at; a second one ends the program where it stands.

    In a command, Ctrl-C leaves the loop `ctrl_c.GRACE_SECONDS` to save what it has. In other threads than
    the main one, where no signal arrives, it catches none.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._catch) for n in (signal.SIGINT, signal.SIGTERM)}
            ctrl_c.be_patient(ctrl_c.GRACE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before and self.caught is None:  # else the time that it was given goes on
            ctrl_c.be_patient(0)

    def agreed(self) -> int | None:
        """What any of the processes caught: all stop at the same iteration."""
        return next((caught for caught in distributed.exchange(self.caught) if caught is not None), None)

    def _catch(self, number: int, _: Any) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = number
