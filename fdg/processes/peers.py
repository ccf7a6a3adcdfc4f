"""Connects the processes of a run to process 0, to exchange messages and to detect lost processes.

This module does not use JAX. `docs/decisions/011-processes.md` says why JAX's own service is not enough.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from fdg.addresses import split_address
from fdg.errors import FdgError
from fdg.processes.lines import BEAT, BEAT_SECONDS, DATA, END, HELLO, SILENT_SECONDS, Line
from fdg.processes.rendezvous import Hello, Rendezvous, connect_to_first

JOIN_SECONDS = 300.0  # the time limit for all processes to connect, which is also JAX's
GRACE_SECONDS = 3.0  # the time that a process has to clean up after another process is lost


class LostError(FdgError):
    """Another process died, or failed and reported it."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status  # the exit status for this process


class Peers:
    """The connections of this process to the other processes of its run, all by way of process 0.

    All processes must make the same exchanges in the same order. A thread watches each connection. When a
    process dies, disconnects or fails, process 0 reports it to the others. A blocking call of this class then
    raises `LostError`; a process that blocks elsewhere ends after `GRACE_SECONDS`. Process 0 sends `notes`, a
    JSON value, to every process that joins.
    """

    def __init__(self, address: str, count: int, index: int, notes: Any = None):
        self.count, self.index = count, index
        self.who = f"process {index} (host {socket.gethostname()}, pid {os.getpid()})"
        host, port = split_address(address)
        self._lines = {} if index else self._welcome(host, port, notes)
        if index:
            self._lines[0], notes = self._connect(host, port)
        self.notes = notes
        self.lost: LostError | None = None
        self._loss_lock, self._death_lock = threading.Lock(), threading.Lock()
        self._is_loss_known = threading.Event()
        self._has_left = False
        for line in self._lines.values():
            threading.Thread(target=self._receive_messages, args=(line,), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def exchange(self, value: Any) -> list[Any]:
        """All-gather: the JSON values of all processes, in the order of their indices."""
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
        """Receives data that `process` sent with `give`; blocks."""
        data = self._lines[process].inbox.get()
        if data is None:
            assert self.lost is not None
            raise self.lost
        return data

    def wait_for_loss(self, seconds: float) -> LostError | None:
        """The error that names the lost process, or None. Waits at most `seconds` for a loss."""
        self._is_loss_known.wait(seconds)
        return self.lost

    def leave(self) -> None:
        """Tells the other processes that this process leaves; then a closed connection is no loss."""
        self._has_left = True
        _send_end(self._lines.values())

    def die(self, line: str, status: int, cause: str) -> NoReturn:
        """Ends this process and all others.

        `line` is printed on standard error, and `cause` is the error message of the others.
        """
        self._death_lock.acquire()  # never released: only one thread may print and exit
        _send_end(self._lines.values(), cause, status)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        os._exit(status)  # an ordinary exit would wait for the others in JAX's shutdown

    def _send(self, line: Line, data: bytes) -> None:
        try:
            line.send(DATA, data)
        except OSError:
            raise self.wait_for_loss(GRACE_SECONDS) or LostError(f"{line.who} is out of reach", 1) from None

    def _receive_messages(self, line: Line) -> None:
        """The thread of a connection: queues data, until the process at the other end leaves or is lost."""
        try:
            while True:
                kind, data = line.read()
                if kind == DATA:
                    line.inbox.put(data)
                elif kind == END and not data:
                    return
                elif kind == END:
                    cause, status = json.loads(data)
                    break
        except TimeoutError:
            cause, status = f"{line.who} has not answered for {SILENT_SECONDS:.0f} s", 1
        except OSError:
            cause, status = f"{line.who} died or lost its connection", 1
        if not self._has_left:
            self._report_loss(cause, status)

    def _report_loss(self, cause: str, status: int) -> None:
        """Tells the other processes and the waiting threads of a loss; then ends this process."""
        with self._loss_lock:
            if self.lost is not None:  # the first loss causes the others
                return
            self.lost = LostError(cause, status)
        self._is_loss_known.set()
        _send_end(self._lines.values(), cause, status)
        for line in self._lines.values():
            line.inbox.put(None)
        time.sleep(GRACE_SECONDS)
        self.die(f"error: {cause}", status, cause)

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.send(BEAT)

    def _welcome(self, host: str, port: int, notes: Any) -> dict[int, Line]:
        """Process 0: accepts connections until all other processes have joined."""
        lines: dict[int, Line] = {}
        deadline = time.monotonic() + JOIN_SECONDS
        with Rendezvous(host, port) as rendezvous:
            while len(lines) < self.count - 1:
                next_process = rendezvous.wait(deadline - time.monotonic())
                if next_process is None:
                    missing = ", ".join(str(i) for i in range(1, self.count) if i not in lines)
                    count = rendezvous.refused
                    refused = f" ({count} connections were refused)" if count else ""
                    refusal = (
                        f"of {self.count} processes {len(lines) + 1} connected to {host}:{port} within"
                        f" {JOIN_SECONDS:.0f} s: process {missing} is missing{refused}"
                    )
                    _send_end(lines.values(), refusal, 2)
                    raise FdgError(refusal)
                line, hello = next_process
                if refusal := self._refusal(hello, lines):
                    _send_end([*lines.values(), line], refusal, 2)
                    raise FdgError(refusal)
                lines[hello.process] = line
        for line in lines.values():
            with contextlib.suppress(OSError):  # `_receive_messages` reports a process that is lost by now
                line.send(HELLO, json.dumps({"who": self.who, "notes": notes}).encode())
        return lines

    def _refusal(self, hello: Hello, lines: dict[int, Line]) -> str:
        """The reason why a process cannot join; "" if it can. `lines` are the processes that have joined."""
        if hello.processes != self.count:
            return f"--num-processes is {self.count} for process 0 and {hello.processes} for {hello.who}"
        if hello.process in lines or not 0 < hello.process < self.count:
            other = lines[hello.process].who if hello.process in lines else self.who
            return f"--process-id {hello.process} was given to both {other} and {hello.who}"
        return ""

    def _connect(self, host: str, port: int) -> tuple[Line, Any]:
        """Every process but 0: connects to process 0, and waits until all processes have joined."""
        hello = Hello(self.who, self.index, self.count)._asdict()
        line = connect_to_first(host, port, JOIN_SECONDS)
        try:
            line.send(HELLO, json.dumps(hello).encode())
            kind, data = line.read(JOIN_SECONDS, 1)
            answer = json.loads(data)
        except (OSError, ValueError) as error:
            raise FdgError(f"process 0 at {host}:{port} disconnected before all processes joined") from error
        if kind == END:
            raise FdgError(answer[0])
        line.who = answer["who"]
        return line, answer["notes"]


def _send_end(lines: Iterable[Line], cause: str | None = None, status: int = 0) -> None:
    """Tells the processes at the other ends that this process ends, and the cause if it has failed."""
    data = b"" if cause is None else json.dumps([cause, status]).encode()
    for line in lines:
        with contextlib.suppress(OSError):
            line.send(END, data, wait=1)
