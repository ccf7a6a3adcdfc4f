"""Ctrl-C ends a command within two seconds, at any moment, and says how to go on.

Python runs a signal's handler in the main thread, between two of its own instructions: while XLA compiles,
that is many seconds later. And an exception that comes up amid a callback is swallowed; one that ends the
interpreter around threads of C++ aborts the process. So a thread of its own watches for Ctrl-C (the operating
system's handler writes a byte for it), and ends the process itself: nothing is lost, for whatever is on the
disk is whole at any moment. See docs/decisions/030-ctrl-c-is-watched-for.md.

Only for processes that are one of the commands, from the first import on; elsewhere an import does nothing.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from fdg.ending import is_command

STATUS = 130
GRACE_SECONDS = 1.5  # in which training may end a call and save what it has

_text = "nothing was begun"
_patience: float | None = 0.0  # seconds that what is at work may take to end by itself; None: it sees to it
_tell_others: Callable[[str], None] | None = None
_guarding = False


def guard() -> None:
    """From here on Ctrl-C ends this process. Called again, and where Ctrl-C is ignored, it does nothing."""
    global _guarding
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _guarding or not usual or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _leave_it_to_the_thread)
    _guarding = True
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="ctrl-c").start()


def is_guarding() -> bool:
    """Whether Ctrl-C ends this process."""
    return _guarding


def going_on(text: str) -> None:
    """What is said from here on, after `interrupted: `."""
    global _text
    _text = text


def be_patient(seconds: float | None) -> None:
    """Gives what is at work so many seconds to end by itself; a second Ctrl-C does not wait.

    Args:
      seconds: 0 to end at once; None where Ctrl-C is seen to otherwise.
    """
    global _patience
    _patience = seconds


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Within, `handler` gets SIGINT and SIGTERM, and this process does not end by itself."""
    be_patient(None)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)
        be_patient(0)


def tell_others(tell: Callable[[str], None]) -> None:
    """What tells the other processes of a run; it may end this one too."""
    global _tell_others
    _tell_others = tell


def leave(line: str | None = None) -> NoReturn:
    """Ends the process as Ctrl-C does.

    Not through the interpreter's own end: threads of C++ that come back to it then abort the process.
    """
    line = f"interrupted: {_text}" if line is None else line
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        line = f"\033[?25h{line}"  # a progress bar hides the cursor
    if _tell_others is not None:
        _tell_others(line)
    try:
        os.write(2, f"{line}\n".encode() if line else b"")
    finally:
        os._exit(STATUS)


def _leave_it_to_the_thread(*_: Any) -> None:
    """A handler that lets whatever was interrupted go on: the thread has been told."""


def _watch(reader: int) -> None:
    waiting = False
    while True:
        ready = select.select([reader], [], [], _patience if waiting else None)[0]
        if not ready:
            leave()
        if signal.SIGINT not in os.read(reader, 4096) or _patience is None:
            continue
        if waiting or not _patience:
            leave()
        waiting = True


if is_command():
    guard()
