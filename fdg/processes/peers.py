"""The processes of one run: a line from each to process 0, over which they talk and notice who is gone.

Nothing here knows of JAX. Why JAX's own means do not do: see `docs/decisions/011-processes.md`.
"""

import contextlib
import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from fdg.errors import FdgError

JOIN_SECONDS = 300.0  # within which all processes must come, as in JAX
BEAT_SECONDS = 10.0  # from one sign of life to the next ...
SILENT_BEATS = 3  # ... and how many may be missing
GRACE_SECONDS = 3.0  # in which a process may put its things in order once another is gone

_HEAD = struct.Struct("!cQ")  # kind and length of a message
_HELLO, _BEAT, _DATA, _END = b"h", b"b", b"d", b"e"


class LostError(FdgError):
    """Another process died, or failed and said so.

    Attributes:
      status: to exit with.
    """

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class _Line:
    """A connection that carries whole messages.

    Attributes:
      who: the process at its other end, as errors name it.
      inbox: its data, as they came; None once a process is lost.
    """

    def __init__(self, connection: socket.socket, who: str = ""):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self.who = who
        self.inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._socket, self._sending = connection, threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, kind: bytes, data: bytes = b"", wait: float = -1) -> None:
        if not self._sending.acquire(timeout=wait):
            raise TimeoutError
        try:
            self._socket.sendall(_HEAD.pack(kind, len(data)))
            self._socket.sendall(data)
        finally:
            self._sending.release()

    def read(self, seconds: float = BEAT_SECONDS, tries: int = SILENT_BEATS) -> tuple[bytes, bytearray]:
        """The next message. Several short waits, so that one who was stopped himself waits again."""
        kind, length = _HEAD.unpack(self._read_bytes(_HEAD.size, seconds, tries))
        if kind == _HELLO and length > 10_000:
            raise ConnectionError("not one of ours")
        return kind, self._read_bytes(length, seconds, tries)

    def _read_bytes(self, count: int, seconds: float, tries: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            if not any(self._poll.poll(1000 * seconds) for _ in range(tries)):
                raise TimeoutError
            got = self._socket.recv_into(view[done:])
            if not got:
                raise ConnectionError("closed")
            done += got
        return data

    def close(self) -> None:
        self._socket.close()


class Peers:
    """This process among those of its run. Every method is called by all of them, in the same order.

    A thread a line watches the other end. When a process dies, is cut off or fails, process 0 tells the
    others who it was. Whoever waits here then gets a `LostError`; a process that waits elsewhere is ended
    after `GRACE_SECONDS`.

    Args:
      address: HOST:PORT, where process 0 listens.
      count: how many processes.
      index: this one.
      notes: what process 0 has to tell the others.

    Raises:
      FdgError: not all processes came.
    """

    def __init__(self, address: str, count: int, index: int, notes: Any = None):
        self.count, self.index = count, index
        self.who = f"process {index} (host {socket.gethostname()}, pid {os.getpid()})"
        host, port = split_address(address)
        self._lines = {} if index else self._welcome(host, port, notes)
        if index:
            self._lines[0], notes = self._knock(host, port)
        self.notes = notes
        self.lost: LostError | None = None
        self._losing, self._dying, self._knows = threading.Lock(), threading.Lock(), threading.Event()
        self._left = False
        for line in self._lines.values():
            threading.Thread(target=self._watch, args=(line,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; what JSON knows."""
        if self.index:
            self.give(json.dumps(value).encode())
            return json.loads(self.take(0))
        values = [value, *(json.loads(self.take(i)) for i in range(1, self.count))]
        data = json.dumps(values).encode()
        for line in self._lines.values():
            self._send(line, data)
        return json.loads(data)

    def give(self, data: bytes) -> None:
        """Sends data to process 0, which must `take` it."""
        self._send(self._lines[0], data)

    def take(self, process: int) -> bytes:
        """What that process gave."""
        data = self._lines[process].inbox.get()
        if data is None:
            assert self.lost is not None
            raise self.lost
        return data

    def who_is_lost(self, seconds: float) -> LostError | None:
        """The process that is gone. Waits so long for its cause to be known."""
        self._knows.wait(seconds)
        return self.lost

    def leave(self) -> None:
        """Says goodbye; from here on the others may end."""
        self._left = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_END, wait=1)

    def die(self, line: str, status: int, cause: str) -> NoReturn:
        """Ends this process, and all others with it.

        Args:
          line: what to print on standard error.
          status: of the exit.
          cause: what the others say.
        """
        self._dying.acquire()  # for ever: only one thread has the last word
        self._tell(cause, status)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        os._exit(status)  # an ordinary exit would wait for the others in JAX's shutdown

    def _tell(self, cause: str, status: int) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(_END, json.dumps([cause, status]).encode(), wait=1)

    def _send(self, line: _Line, data: bytes) -> None:
        try:
            line.send(_DATA, data)
        except OSError:
            raise self.who_is_lost(GRACE_SECONDS) or LostError(f"{line.who} is out of reach", 1) from None

    def _watch(self, line: _Line) -> None:
        try:
            while True:
                kind, data = line.read()
                if kind == _DATA:
                    line.inbox.put(bytes(data))
                elif kind == _END and not data:
                    return
                elif kind == _END:
                    cause, status = json.loads(data)
                    break
        except TimeoutError:
            cause, status = f"{line.who} has not answered for {SILENT_BEATS * BEAT_SECONDS:.0f} s", 1
        except OSError:
            cause, status = f"{line.who} died or lost its connection", 1
        if not self._left:
            self._lose(cause, status)

    def _lose(self, cause: str, status: int) -> None:
        with self._losing:
            if self.lost is not None:  # the first one counts: the others follow from it
                return
            self.lost = LostError(cause, status)
        self._knows.set()
        self._tell(cause, status)
        for line in self._lines.values():
            line.inbox.put(None)
        time.sleep(GRACE_SECONDS)
        self.die(f"error: {cause}", status, cause)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.send(_BEAT)

    def _welcome(self, host: str, port: int, notes: Any) -> dict[int, _Line]:
        """Process 0: waits for all others."""
        lines: dict[int, _Line] = {}
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            server = _listen(host, port)
        except (OSError, OverflowError) as error:
            raise FdgError(f"process 0 cannot listen on {host}:{port}: {error}") from error
        with server:
            while len(lines) < self.count - 1:
                server.settimeout(max(0.1, deadline - time.monotonic()))
                told, refusal = list(lines.values()), None
                try:
                    line = _Line(server.accept()[0])
                    kind, data = line.read(5, 1)
                    hello = json.loads(data) if kind == _HELLO else {}
                    line.who = hello["who"]
                    told.append(line)
                    refusal = self._refusal(hello, lines)
                except (OSError, ValueError, TypeError, KeyError):
                    if time.monotonic() < deadline:
                        continue  # it was somebody else
                    missing = sorted(set(range(1, self.count)) - lines.keys())
                    refusal = (
                        f"of {self.count} processes {len(lines) + 1} came to {host}:{port} within"
                        f" {JOIN_SECONDS:.0f} s: process {', '.join(map(str, missing))} is missing"
                    )
                if refusal:
                    for one in told:
                        with contextlib.suppress(OSError):
                            one.send(_END, json.dumps([refusal, 2]).encode())
                    raise FdgError(refusal)
                lines[hello["process"]] = line
        for line in lines.values():
            with contextlib.suppress(OSError):  # who is gone by now is found by the watch
                line.send(_HELLO, json.dumps({"who": self.who, "notes": notes}).encode())
        return lines

    def _refusal(self, hello: dict[str, Any], lines: dict[int, _Line]) -> str | None:
        if hello["count"] != self.count:
            return f"--num-processes is {self.count} for process 0 and {hello['count']} for {hello['who']}"
        if hello["process"] in lines or not 0 < hello["process"] < self.count:
            other = lines[hello["process"]].who if hello["process"] in lines else self.who
            return f"--process-id {hello['process']} is that of {other} and of {hello['who']}"
        return None

    def _knock(self, host: str, port: int) -> tuple[_Line, Any]:
        """The other processes: find process 0, and wait until all are there."""
        deadline = time.monotonic() + JOIN_SECONDS
        hello = {"process": self.index, "count": self.count, "who": self.who}
        while True:
            try:
                line = _Line(socket.create_connection((host, port), timeout=5))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise FdgError(
                        f"process 0 was not at {host}:{port} within {JOIN_SECONDS:.0f} s: {error}"
                    ) from None
                time.sleep(0.2)
        try:
            line.send(_HELLO, json.dumps(hello).encode())
            kind, data = line.read(JOIN_SECONDS, 1)
            answer = json.loads(data)
        except (OSError, ValueError) as error:
            raise FdgError(f"process 0 at {host}:{port} went away before all processes were there") from error
        if kind == _END:
            raise FdgError(answer[0])
        line.who = answer["who"]
        return line, answer["notes"]


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as host and port.

    >>> split_address("localhost:1234"), split_address("[::1]:80")
    (('localhost', 1234), ('::1', 80))

    Raises:
      FdgError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise FdgError(f"--coordinator-address {address}: write HOST:PORT")
    return host.strip("[]"), int(port)


def is_local(host: str) -> bool:
    """Whether the name is that of this machine for itself."""
    return host in ("localhost", "127.0.0.1")


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with _listen(host, 0) as server:
        return server.getsockname()[1]


def keep_open(upstream: Sequence[Any]) -> int:
    """Forwards what connects to a port of this machine, and does not pass on that the other side closes.

    Returns:
      The port.
    """

    def serve() -> None:
        while True:
            local = server.accept()[0]
            try:
                remote = socket.create_connection(tuple(upstream), timeout=10)
            except OSError:
                local.close()  # whoever it is will try again
                continue
            remote.settimeout(None)
            threading.Thread(target=pump, args=(local, remote, True), daemon=True).start()
            threading.Thread(target=pump, args=(remote, local, False), daemon=True).start()

    def pump(source: socket.socket, target: socket.socket, closes: bool) -> None:
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        if closes:
            for one in (source, target):
                with contextlib.suppress(OSError):
                    one.close()

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1]


def _listen(host: str, port: int) -> socket.socket:
    if is_local(host):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
