"""An authenticated connection between two processes of a run, which carries whole messages.

`multiprocessing.connection` frames the messages and authenticates both ends. Each message has a length
prefix, which is checked before the message is read. Each side sends a challenge, which the other answers with
an HMAC under the shared key. A peer without the key can make this process allocate at most
`_MAX_HELLO_BYTES`. A peer with the key can send any number of parts of at most `_MAX_MESSAGE_BYTES`.
"""

import contextlib
import hashlib
import os
import queue
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

BEAT_SECONDS = 5.0  # seconds between heartbeats
# A process counts as lost after this number of missing heartbeats. The time must be below 30 s, after which
# gloo fails and may abort the process.
SILENT_BEATS = 4
SILENT_SECONDS = SILENT_BEATS * BEAT_SECONDS
HANDSHAKE_SECONDS = 10.0  # time limit of authentication
KEY_VARIABLE = "FDG_AUTHKEY"  # the environment variable with the secret of a run

HELLO, BEAT, DATA, END = b"h", b"b", b"d", b"e"  # kinds of messages, as their first bytes
_PART = b"p"  # data that continue in the next message
_MAX_MESSAGE_BYTES = 1 << 22  # longer data are sent in parts
_MAX_HELLO_BYTES = 10_000  # of the first message


def key_of_run(port: int) -> bytes:
    """The authentication key of a run.

    `fdg.launch` generates a secret for each run and passes it in the environment. Without the variable, the
    key is derived from the port alone. That is not secret; it only prevents accidental connections.
    """
    return hashlib.sha256(f"fdg:{port}:{os.environ.get(KEY_VARIABLE, '')}".encode()).digest()


class StrangerError(Exception):
    """The other end of a connection is not a process of this run."""


class Line:
    """A connection that carries whole messages.

    Attributes:
      who: the process at the other end, as errors name it.
      inbox: data from the other end, in order of arrival; None once that process is lost.
    """

    def __init__(self, connected_socket: socket.socket):
        connected_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected_socket.settimeout(None)
        # `_receive` limits the wait for the first byte of a message, and this the wait for each further byte.
        seconds = struct.pack("ll", int(SILENT_SECONDS), 0)
        connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self.who = ""
        self.inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._connection = Connection(connected_socket.detach())

    def authenticate(self, key: bytes, asks_first: bool) -> None:
        """Authenticates both ends: each proves that it has the key. With `asks_first`, this end begins.

        Raises:
          StrangerError: the other end has another key, or uses another protocol.
          OSError: the other end is gone, or took longer than `HANDSHAKE_SECONDS`.
        """
        timer = threading.Timer(HANDSHAKE_SECONDS, self._shut_down)  # the calls below may block
        timer.daemon = True
        timer.start()
        try:
            for step in (deliver_challenge, answer_challenge)[:: 1 if asks_first else -1]:
                step(self._connection, key)
        except (AuthenticationError, AssertionError, ValueError) as error:
            raise StrangerError(str(error)) from error
        except EOFError as error:
            raise ConnectionError("closed") from error
        finally:
            timer.cancel()

    def send(self, kind: bytes, data: bytes = b"", wait: float = -1) -> None:
        """Sends a message, in parts if it is long.

        Waits at most `wait` seconds while another thread is sending; -1 for no limit.
        """
        if not self._send_lock.acquire(timeout=wait):
            raise TimeoutError
        try:
            view = memoryview(data)
            while len(view) >= _MAX_MESSAGE_BYTES:
                self._connection.send_bytes(_PART + view[: _MAX_MESSAGE_BYTES - 1])
                view = view[_MAX_MESSAGE_BYTES - 1 :]
            self._connection.send_bytes(kind + view)
        finally:
            self._send_lock.release()

    def read(self, seconds: float = BEAT_SECONDS, tries: int = SILENT_BEATS) -> tuple[bytes, bytes]:
        """The next message: its kind and its content.

        Waits `seconds` up to `tries` times, so that a suspension of this process ends only one of the waits.

        Raises:
          TimeoutError: no message came.
          OSError: the other end is gone, or sent an invalid message.
        """
        parts = []
        while True:
            message = self._receive(_MAX_MESSAGE_BYTES, seconds, tries)
            parts.append(message[1:])
            if message[:1] != _PART:
                return message[:1], parts[0] if len(parts) == 1 else b"".join(parts)

    def read_hello(self, seconds: float) -> bytes:
        """The content of the first message, which has a small size limit (`_MAX_HELLO_BYTES`)."""
        message = self._receive(_MAX_HELLO_BYTES, seconds, 1)
        if message[:1] != HELLO:
            raise ConnectionError("not a greeting")
        return message[1:]

    def close(self) -> None:
        """Ends the connection."""
        self._shut_down()
        self._connection.close()

    def _receive(self, max_bytes: int, seconds: float, tries: int) -> bytes:
        """The next part of a message, with its kind as the first byte; waits as `read` does."""
        if not any(self._connection.poll(seconds) for _ in range(tries)):
            raise TimeoutError
        try:
            return self._connection.recv_bytes(max_bytes)
        except BlockingIOError:
            raise TimeoutError from None
        except EOFError:
            raise ConnectionError("closed") from None

    def _shut_down(self) -> None:
        """Ends both directions of the connection, which wakes threads that read or write."""
        with (
            contextlib.suppress(OSError),
            socket.fromfd(self._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as connected,
        ):
            connected.shutdown(socket.SHUT_RDWR)
