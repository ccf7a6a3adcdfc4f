"""A command's process ends with its exit status, not through the interpreter's own teardown.

Threads of XLA, of gloo and of pools are still there when the interpreter ends. One that comes back to it then
is ended by `pthread_exit`, which unwinds its frames of C++, and the process aborts with `exception not
rethrown` (Python 3.11; one end in ten of two processes that were told to stop). So everything that is
registered for the end runs, output is written out, and then the process is left at once.

Only for processes that are one of the commands; elsewhere nothing here does anything.
"""

import atexit
import itertools
import os
import sys

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


if is_command():
    atexit.register(_leave)
