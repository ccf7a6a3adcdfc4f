"""Calls functions in forks of this process, which has imported their modules but started no JAX backend."""

import contextlib
import json
import math
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


class LateError(Exception):
    """The call used too much CPU time."""


class LostError(Exception):
    """The call raised an error, or its process ended."""


def forked(call: Callable[[], Any], limit: float = math.inf) -> Any:
    """Makes a call in a fork, then kills the fork and its children; returns the result, through JSON.

    Args:
      call: the function; its output is discarded.
      limit: limit of CPU time in seconds, which other work on the machine does not change. A call also ends
        after as many seconds of wall time without progress in CPU time.

    Raises:
      LateError: the call exceeded the limit.
      LostError: the call raised an error, or its process ended.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # JAX warns of forks, but none of its threads runs yet
        child = os.fork()
    if child == 0:
        os.setsid()  # `killpg` then kills its children, too
        null_device = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null_device, stream)
        try:
            answer = {"result": call()}
        except BaseException:
            answer = {"error": traceback.format_exc()[-2000:]}
        os.write(write_end, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    os.close(write_end)
    try:
        _wait(read_end, child, limit)
        with open(read_end, "rb", closefd=False) as pipe:
            output = pipe.readline()  # not to the end: processes that the call started may hold the pipe
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(status)  # negative: the signal that ended the process
    answer = json.loads(output) if output else {"error": f"the process ended with status {status}"}
    if "error" in answer:
        raise LostError(answer["error"])
    return answer["result"]


def _wait(read_end: int, session: int, limit: float) -> None:
    """Waits until the pipe is readable; `session` is the fork, `limit` the limit of `forked`.

    Raises:
      LateError: the limit is exceeded.
    """
    cpu_at_progress, time_of_progress = 0.0, time.monotonic()
    while not select.select([read_end], [], [], 2.0)[0]:
        cpu_seconds = _cpu_seconds(session)
        if cpu_seconds > cpu_at_progress + 0.01 * limit:
            cpu_at_progress, time_of_progress = cpu_seconds, time.monotonic()
        if cpu_seconds > limit or time.monotonic() - time_of_progress > limit:
            raise LateError(f"not done after {limit:g} s of CPU time")


def _cpu_seconds(session: int) -> float:
    """CPU time of a session's processes, with the CPU time of their ended children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")
