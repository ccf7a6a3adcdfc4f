"""Controls how a command's process starts and exits. In other processes, importing this module does nothing.

- Exit: XLA, gloo and thread pools still have threads when the interpreter ends. If such a thread returns to
  Python 3.11, `pthread_exit` ends it, which aborts the process (`exception not rethrown`). So `atexit`
  functions run, output is flushed, and `os._exit` ends the process.
- Errors: if a file of the current folder shadows a library, one line replaces the traceback. A closed pipe
  (`| head`) ends the process silently, with the status of SIGPIPE.
- Closed standard streams (`>&-`) are opened as /dev/null; otherwise the next opened files would get their
  descriptors and receive messages of C++ libraries.
- A launched process ends with its launcher, even if the launcher is killed: its standard input is a pipe from
  the launcher (environment variable `LAUNCHER_PIPE`), and it kills itself when the pipe closes.
"""

import atexit
import os
import re
import signal
import sys
import threading
from typing import Any

from fdg.hidden_modules import shadowing_file

LAUNCHER_PIPE = "FDG_TIED"  # environment variable of a process whose standard input is its launcher's pipe
CLOSED_PIPE = 141  # exit status of a process that SIGPIPE has ended

_status: int | None = None  # the exit status, set by `exit_with`


def is_command() -> bool:
    """Whether this process was started as `python -m fdg...` or `fdg`."""
    name = len(sys.orig_argv) - len(sys.argv)  # the position of the module's name, or of `-umNAME`
    option = " ".join(sys.orig_argv[max(name - 1, 1) : name + 1])
    runs_module = re.fullmatch(r"(.* )?-[^-cmWX ]*m ?fdg(\..*)?", option) is not None
    return runs_module or os.path.basename(sys.argv[0] if sys.argv else "") == "fdg"


def exit_with(status: int) -> int:
    """Sets this process's exit status and returns it: `raise SystemExit(exit_with(main()))`."""
    global _status
    _status = status
    return status


def _exit() -> None:
    """Flushes output and exits. `atexit` calls it last, since it is registered first."""
    if _status is None:  # an unexpected exception: leave the exit to Python
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, broken (`| head`), or missing
            continue
    os._exit(_status)


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Handles an uncaught exception: one line if a user's file hides a library, none for a closed pipe."""
    if isinstance(error, BrokenPipeError):
        os._exit(CLOSED_PIPE)
    line = shadowing_file(error)
    if line is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    os.write(2, f"error: {line}\n".encode(errors="backslashreplace"))
    os._exit(2)


def _unraisablehook(unraisable: Any) -> None:
    # TensorStore's threads raise this after a failed checkpoint, when Orbax has closed their event loop.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _open_standard_streams() -> None:
    """Opens /dev/null in place of each closed standard stream."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", encoding="utf-8", closefd=False))


def _end_with_launcher() -> None:
    """Kills this process when its launcher ends. Child processes do not inherit the pipe."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's processes and their children block it
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_kill_at_end_of, args=(pipe,), daemon=True, name="tied").start()


def _kill_at_end_of(pipe: int) -> None:
    """Kills this process when the other end of the pipe closes."""
    while os.read(pipe, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if is_command():
    _open_standard_streams()
    if os.environ.pop(LAUNCHER_PIPE, None) is not None:  # before JAX is imported, which takes seconds
        _end_with_launcher()
    sys.excepthook, sys.unraisablehook = _excepthook, _unraisablehook
    atexit.register(_exit)
