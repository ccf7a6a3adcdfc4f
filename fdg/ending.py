"""A command's process ends with its exit status, not through the interpreter's own teardown.

Threads of XLA, of gloo and of pools are still there when the interpreter ends. One that comes back to it then
is ended by `pthread_exit`, which unwinds its frames of C++, and the process aborts with `exception not
rethrown` (Python 3.11; one end in ten of two processes that were told to stop). So everything that is
registered for the end runs, output is written out, and then the process is left at once.

What ends one with a traceback because a file of the current folder is named as a library is one line instead;
and where the reader of its output has gone (`| head`), it ends as SIGPIPE would end it, without a word.
And one that begins with closed streams (`>&-`) gets /dev/null for them: the next files that it opens would
take their numbers, and what C++ has to say would be written into these.

One that a launcher has started ends with it, however that ends: its standard input is a pipe that no one
writes to (`TIED` says so), which the operating system closes when the process at the other end is gone, be it
killed. Then this one is killed too, for no one would see what it prints or stop it.

Only for processes that are one of the commands; elsewhere nothing here does anything.
"""

import atexit
import itertools
import os
import signal
import sys
import threading
from typing import Any

from fdg.neighbours import shadowed

TIED = "FDG_TIED"  # environment variable of a process whose standard input is its launcher's pipe
CLOSED_PIPE = 141  # exit status of a process that SIGPIPE ends

_status: int | None = None


def is_command() -> bool:
    """Whether this process was started as `python -m fdg...` or `fdg`."""
    words = sys.orig_argv[1:]
    modules = [b for a, b in itertools.pairwise(words) if a == "-m"][:1]
    modules += [word[2:] for word in words if word.startswith("-m") and len(word) > 2][:1]
    named = any(name == "fdg" or name.startswith("fdg.") for name in modules)
    return named or os.path.basename(sys.argv[0] if sys.argv else "") == "fdg"


def ends_with(status: int) -> int:
    """Says what this process ends with, and gives it back: `raise SystemExit(ends_with(main()))`."""
    global _status
    _status = status
    return status


def _leave() -> None:
    """The last function that is called at the end, for it is the first that was registered."""
    if _status is None:  # an exception that nobody expected is on its way
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, broken (`| head`), or none at all
            continue
    os._exit(_status)


def _explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if isinstance(error, BrokenPipeError):
        os._exit(CLOSED_PIPE)
    line = shadowed(error)
    if line is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    os.write(2, f"error: {line}\n".encode(errors="backslashreplace"))
    os._exit(2)


def _overhear(unraisable: Any) -> None:
    # TensorStore's threads say it once a checkpoint has failed, when Orbax has ended the loop that it ran in.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _open_closed() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def _tie() -> None:
    """From here on this process ends with its launcher; what this one starts does not get the pipe."""
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # Ray's processes block it, and their children
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_watch, args=(pipe,), daemon=True, name="tied").start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if is_command():
    _open_closed()
    if os.environ.pop(TIED, None) is not None:  # at once: importing JAX takes seconds
        _tie()
    sys.excepthook, sys.unraisablehook = _explain, _overhear
    atexit.register(_leave)
