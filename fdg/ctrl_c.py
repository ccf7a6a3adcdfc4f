"""Ctrl-C ends a command within two seconds at any moment and prints how to resume.

Python runs signal handlers in the main thread, between bytecodes: while XLA compiles, that is many seconds
later. An exception raised inside a callback is swallowed, and tearing down the interpreter while C++ threads
run aborts the process. So a daemon thread reads the signal's wakeup pipe and ends the process.
Nothing is lost: files on disk are complete at any moment. See docs/decisions/030-ctrl-c-is-watched-for.md.

Only processes started as a command install this, at the first import; in other processes an import does
nothing.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from fdg.process_exit import is_command

STATUS = 130  # exit status after Ctrl-C
GRACE_SECONDS = 1.5  # in which training may finish a call and save a checkpoint

_hint = "nothing was begun"  # how to resume; printed after `interrupted: `
_grace_s: float | None = 0.0  # seconds; None: a signal handler ends the process
_notify_peers: Callable[[str], None] | None = None
_installed = False


def install() -> None:
    """Makes Ctrl-C end this process. Does nothing if called again, or if SIGINT is ignored or handled."""
    global _installed
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _installed or not is_default or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # `_watch` reads the signal from the pipe
    _installed = True
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="ctrl-c").start()


def is_installed() -> bool:
    """Whether `install` was called, so that a thread of ours handles Ctrl-C."""
    return _installed


def set_resume_hint(text: str) -> None:
    """Sets the text that is printed after `interrupted: `."""
    global _hint
    _hint = text


def set_grace_period(seconds: float | None) -> None:
    """Sets for how long work may go on after the first Ctrl-C; a second Ctrl-C ends the process at once.

    With 0, the first Ctrl-C ends the process at once; with None, a signal handler ends it.
    """
    global _grace_s
    _grace_s = seconds


@contextlib.contextmanager
def signal_handler(handler: Callable[[int, Any], object], grace: float | None = None) -> Iterator[None]:
    """A context in which `handler` handles SIGINT and SIGTERM; `grace` is as in `set_grace_period`."""
    set_grace_period(grace)
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(signal_number, handler) for signal_number in signals]
    try:
        yield
    finally:
        for signal_number, handler_before in zip(signals, previous, strict=True):
            signal.signal(signal_number, handler_before)
        set_grace_period(0)


@contextlib.contextmanager
def collected_signals(
    end: Callable[[int], object], most: int = 1, grace: float | None = None
) -> Iterator[list[int]]:
    """A context that collects SIGINT and SIGTERM in a list, and calls `end` with each after the first `most`.

    `grace` is as in `set_grace_period`, and stays set after the context if a signal came. Outside the main
    thread nothing is collected.
    """
    caught: list[int] = []

    def collect(signal_number: int, _: Any) -> None:
        caught.append(signal_number)
        if len(caught) > most:
            end(signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    try:
        with signal_handler(collect, grace):
            yield caught
    finally:
        if caught and grace:
            set_grace_period(grace)


def set_peer_notifier(notify: Callable[[str], None]) -> None:
    """Sets the function that notifies the other processes of a run; it may end this process too."""
    global _notify_peers
    _notify_peers = notify


def exit_interrupted(line: str | None = None) -> NoReturn:
    """Ends the process as Ctrl-C does, without the interpreter's teardown, which C++ threads would abort.

    Prints `line`, by default `interrupted: ` and the hint.
    """
    line = f"interrupted: {_hint}" if line is None else line
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        line = f"\033[?25h{line}"  # a progress bar hides the cursor
    if _notify_peers is not None:
        _notify_peers(line)
    try:
        os.write(2, f"{line}\n".encode() if line else b"")
    finally:
        os._exit(STATUS)


def _watch(reader: int) -> None:
    """The thread that ends the process: after the grace period of a first Ctrl-C, or at a second one."""
    in_grace_period = False
    while True:
        ready = select.select([reader], [], [], _grace_s if in_grace_period else None)[0]
        if not ready:
            exit_interrupted()
        if signal.SIGINT not in os.read(reader, 4096) or _grace_s is None:
            continue
        if in_grace_period or not _grace_s:
            exit_interrupted()
        in_grace_period = True


if is_command():
    install()
