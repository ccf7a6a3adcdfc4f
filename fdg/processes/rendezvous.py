"""Rendezvous: process 0 listens; the others connect, and both sides authenticate.

Any program may connect to the port. Each connection gets a thread and a few seconds to authenticate, so a
silent or foreign connection does not delay others.
"""

import json
import queue
import socket
import threading
import time
from typing import NamedTuple

from fdg.errors import FdgError
from fdg.processes.lines import HANDSHAKE_SECONDS, KEY_VARIABLE, Line, StrangerError, key_of_run
from fdg.processes.ports import listen

_MAX_HANDSHAKES = 64  # at once; further connections are closed, and processes of the run connect again


class Hello(NamedTuple):
    """The first message of a process."""

    who: str  # the process's name in error messages
    process: int  # the process's index
    processes: int  # the number of processes that the process expects


class Rendezvous:
    """The listener of process 0: a context in which the other processes of the run can join."""

    def __init__(self, host: str, port: int):
        try:
            self._server = listen(host, port)
        except (OSError, OverflowError) as error:
            raise FdgError(
                f"process 0 cannot listen on {host}:{port}: {error}: use a free port of its machine"
            ) from error
        self.refused = 0  # the number of refused connections
        self._key = key_of_run(port)
        self._joined: queue.SimpleQueue[tuple[Line, Hello]] = queue.SimpleQueue()
        self._closing, self._handshake_slots = threading.Event(), threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "Rendezvous":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def wait(self, seconds: float) -> tuple[Line, Hello] | None:
        """The connection and the `Hello` of the next process; None if no process joins in time."""
        try:
            return self._joined.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def _accept(self) -> None:
        """The thread that accepts connections until the context ends."""
        with self._server:
            self._server.settimeout(0.1)
            while not self._closing.is_set():
                try:
                    connection = self._server.accept()[0]
                except OSError:  # no connection within the timeout, or it is closed already
                    continue
                if not self._handshake_slots.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._handshake, args=(connection,), daemon=True).start()

    def _handshake(self, connection: socket.socket) -> None:
        """The thread of one connection: authenticates it and reads its `Hello`, or refuses it."""
        line = None
        try:
            line = Line(connection)
            line.authenticate(self._key, asks_first=True)
            hello = json.loads(line.read_hello(HANDSHAKE_SECONDS))
            line.who = str(hello["who"])
            self._joined.put((line, Hello(line.who, int(hello["process"]), int(hello["processes"]))))
        except (StrangerError, OSError, ValueError, TypeError, KeyError):
            self.refused += 1
            (connection if line is None else line).close()
        finally:
            self._handshake_slots.release()


def connect_to_first(host: str, port: int, seconds: float) -> Line:
    """Connects to process 0; retries for at most `seconds`, until process 0 listens.

    Raises:
      FdgError: process 0 does not listen in time, or another program listens.
    """
    deadline = time.monotonic() + seconds
    while True:
        line = None
        try:
            line = Line(socket.create_connection((host, port), timeout=5))
            line.authenticate(key_of_run(port), asks_first=False)
            return line
        except StrangerError as error:
            assert line is not None
            line.close()
            raise FdgError(
                f"the program that listens at {host}:{port} is not process 0 of this run ({error}):"
                f" give all processes the same {KEY_VARIABLE}, or none"
            ) from error
        except OSError as error:
            if line is not None:
                line.close()
            if time.monotonic() > deadline:
                message = f"process 0 did not listen at {host}:{port} within {seconds:.0f} s: {error}"
                raise FdgError(message) from None
            time.sleep(0.2)
