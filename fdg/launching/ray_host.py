"""The Ray actor on each host: it starts one process of a run and reports its output.

Ray sends this file's code to the hosts. It imports nothing of fdg, so that hosts need not import JAX.
"""

import contextlib
import os
import queue
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_LINES = 1000  # the maximum number of lines of output in one answer
_PORTS = range(20_000, 32_000)  # below the range that the system uses for outgoing connections


class Host:
    """A Ray actor that starts one process, which ends with the actor (`fdg.process_exit`)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def describe(self) -> dict[str, Any]:
        """Facts of this host by name: `host` (its name), `ip`, `node` (Ray's ID), `port` and `address`.

        The port is free now, and may be taken later; `address` is that of the cluster.
        """
        import ray

        context, ip = ray.get_runtime_context(), ray.util.get_node_ip_address()
        return {
            "host": socket.gethostname(),
            "ip": ip,
            "node": context.get_node_id(),
            "port": _free_port("127.0.0.1" if ip == "127.0.0.1" else ""),
            "address": context.gcs_address,
        }

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> tuple[int, str]:
        """Starts `python WORDS` in a folder, with these environment variables added.

        Returns the process id and "", or 0 and the reason why the process cannot be started.
        """
        if not os.path.isdir(folder):
            return 0, f"there is no folder {folder} on that host: start from a folder that all hosts share"
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", *words],
                env={**os.environ, **environment},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            return 0, f"{error.filename}: {error.strerror}"
        self._process = process
        for name, pipe in (("out", process.stdout), ("err", process.stderr)):
            reader = threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)
        return process.pid, ""

    def follow(self, seconds: float) -> tuple[list[tuple[str, str]], int | None]:
        """Waits at most `seconds` for output.

        Returns pairs (stream, line), where the stream is "out" or "err", and the exit status. The status is
        None until the process has ended and all of its output was returned.
        """
        assert self._process is not None
        lines: list[tuple[str, str]] = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._output.get(timeout=seconds))
            while len(lines) < _MAX_LINES:
                lines.append(self._output.get_nowait())
        if lines or self._process.poll() is None:
            return lines, None
        for reader in self._readers:
            reader.join(1)  # a grandchild that still holds the pipe must not block
        while not self._output.empty():
            lines.append(self._output.get())
        self.stop()
        return lines, self._process.returncode

    def signal(self, signal_number: int) -> None:
        """Sends a signal to the process."""
        if self._process is not None:
            self._process.send_signal(signal_number)

    def stop(self) -> None:
        """Kills the process if it runs, and waits for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _read(self, name: str, pipe: Any) -> None:
        with pipe:
            for line in pipe:
                self._output.put((name, line.decode(errors="replace").rstrip("\r\n")))


def _free_port(host: str) -> int:
    """As `processes.ports.free_port`, which this file cannot import."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
