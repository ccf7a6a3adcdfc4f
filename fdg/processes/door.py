"""How the processes of a run find each other: process 0 opens a door, the others knock until they are let in.

Anybody may connect to a port. Each who does is heard in a thread of its own, for a few seconds: one who says
nothing, or the wrong thing, keeps nobody waiting.
"""

import json
import queue
import socket
import threading
import time
from types import TracebackType
from typing import NamedTuple

from fdg.errors import FdgError
from fdg.processes.lines import HANDSHAKE_SECONDS, KEY_VARIABLE, Line, StrangerError, key_of_run
from fdg.processes.ports import listen

_HEARD_AT_ONCE = 64  # who comes then is sent away, and a process of ours comes again


class Hello(NamedTuple):
    """How a process introduces itself."""

    who: str  # as errors name it
    process: int  # its index
    processes: int  # how many there are, as far as it knows


class Door:
    """Process 0's: a context in which processes of the run can join.

    Attributes:
      strangers: how many connections were refused.

    Raises:
      FdgError: something else listens at the address, or it is not this machine's.
    """

    def __init__(self, host: str, port: int):
        try:
            self._server = listen(host, port)
        except (OSError, OverflowError) as error:
            raise FdgError(f"process 0 cannot listen on {host}:{port}: {error}") from error
        self.strangers = 0
        self._key = key_of_run(port)
        self._came: queue.SimpleQueue[tuple[Line, Hello]] = queue.SimpleQueue()
        self._closing, self._places = threading.Event(), threading.BoundedSemaphore(_HEARD_AT_ONCE)
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "Door":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()

    def wait(self, seconds: float) -> tuple[Line, Hello] | None:
        """The next process that came, and how it introduced itself; None if none came in time."""
        try:
            return self._came.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def _accept(self) -> None:
        with self._server:
            self._server.settimeout(0.1)
            while not self._closing.is_set():
                try:
                    connected = self._server.accept()[0]
                except OSError:  # none within the time, or one that is gone already
                    continue
                if not self._places.acquire(blocking=False):
                    connected.close()
                    continue
                threading.Thread(target=self._hear, args=(connected,), daemon=True).start()

    def _hear(self, connected: socket.socket) -> None:
        line = None
        try:
            line = Line(connected)
            line.prove(self._key, asks_first=True)
            said = json.loads(line.read_hello(HANDSHAKE_SECONDS))
            line.who = str(said["who"])
            self._came.put((line, Hello(line.who, int(said["process"]), int(said["processes"]))))
        except (StrangerError, OSError, ValueError, TypeError, KeyError):
            self.strangers += 1
            (connected if line is None else line).close()
        finally:
            self._places.release()


def knock(host: str, port: int, seconds: float) -> Line:
    """The other processes: a line to process 0, as soon as it is there.

    Raises:
      FdgError: it was not there within so many seconds, or what listens there has another key.
    """
    deadline = time.monotonic() + seconds
    while True:
        line = None
        try:
            line = Line(socket.create_connection((host, port), timeout=5))
            line.prove(key_of_run(port), asks_first=False)
            return line
        except StrangerError as error:
            assert line is not None
            line.close()
            raise FdgError(
                f"what listens at {host}:{port} is not process 0 of this run ({error}):"
                f" all its processes need the same {KEY_VARIABLE}, or none"
            ) from error
        except OSError as error:
            if line is not None:
                line.close()
            if time.monotonic() > deadline:
                raise FdgError(
                    f"process 0 was not at {host}:{port} within {seconds:.0f} s: {error}"
                ) from None
            time.sleep(0.2)
