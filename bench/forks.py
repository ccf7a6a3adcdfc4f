"""Calls in forks of this process, which has imported what they need and started none of JAX's backends."""

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
    """A call used too much CPU time."""


class LostError(Exception):
    """A call raised an error, or its process ended; why."""


def forked(call: Callable[[], Any], limit: float = math.inf) -> Any:
    """What a call returns, as JSON, from a fork, which is killed with all that it has started.

    Args:
      call: whatever it prints goes nowhere.
      limit: seconds of CPU time, so that other work on the machine makes no difference; and as many on the
        clock without any.

    Raises:
      LateError: it was not done within the limit.
      LostError: it raised, or its process ended.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # JAX warns of forks; none of its threads runs yet
        child = os.fork()
    if child == 0:
        os.setsid()  # so that what it starts ends with it
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        try:
            answer = {"result": call()}
        except BaseException:
            answer = {"error": traceback.format_exc()[-2000:]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    try:
        _wait(reading, child, limit)
        output = os.read(reading, 1 << 16)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    answer = json.loads(output) if output else {"error": f"the process ended with status {status}"}
    if "error" in answer:
        raise LostError(answer["error"])
    return answer["result"]


def _wait(reading: int, session: int, limit: float) -> None:
    """Waits for something to read."""
    used, moved = 0.0, time.monotonic()
    while not select.select([reading], [], [], 2.0)[0]:
        now = _cpu_seconds(session)
        if now > used + 0.01 * limit:
            used, moved = now, time.monotonic()
        if now > limit or time.monotonic() - moved > limit:
            raise LateError(f"not done after {limit:g} s of CPU time")


def _cpu_seconds(session: int) -> float:
    """CPU time that the living processes of a session have used, with that of their dead children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
