"""Starts the processes of a run on this machine and waits for them."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fdg import ctrl_c
from fdg.launching.restarting import LOST_SECONDS, REFUSED, STOP_SECONDS, Ending, Process, ending_of
from fdg.process_exit import TIED
from fdg.processes import lines, ports


class Here:
    """A launcher that starts `fdg.train` processes on this machine."""

    def __init__(self, count: int):
        self.count = count

    def reserve(self, first: bool) -> int:
        """The number of processes of the next `run`."""
        return self.count

    def run(self, words: Sequence[str]) -> Ending:
        """Starts `fdg.train` in each process, and waits until all have ended."""
        # The key lets only these processes join. Other users can read a command line, so it goes into the
        # environment.
        own = {lines.KEY_VARIABLE: secrets.token_hex(32), TIED: "1"}
        address = f"localhost:{ports.free_port('localhost')}"
        processes: list[subprocess.Popen] = []
        readers: list[threading.Thread] = []
        errors: list[str] = []  # of all processes except the first
        asked = threading.Event()

        def forward(number: int, _: Any) -> None:
            asked.set()
            if number != signal.SIGINT:  # a terminal sends SIGINT to all of them
                for process in processes:
                    process.send_signal(number)

        with ctrl_c.signal_handler(forward):  # the processes end by themselves, then this one
            try:
                for i in range(self.count):
                    mine = triple(address, self.count, i)
                    # On a machine with GPUs, process i gets GPU i; CPU devices ignore this variable.
                    environment = {"JAX_LOCAL_DEVICE_IDS": str(i), **own, **os.environ}
                    process = _start([*words, *mine], environment, quiet=i > 0)
                    processes.append(process)
                    if i:
                        readers.append(
                            threading.Thread(target=_forward_lines, args=(i, process, errors), daemon=True)
                        )
                        readers[-1].start()
                return ending_of(_wait(processes), asked.is_set())
            finally:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()  # they hold the lock of the run directory, which a restart needs
                    if process.stdin is not None:
                        process.stdin.close()
                for reader in readers:
                    reader.join(1)
                if processes and processes[0].returncode != REFUSED:  # process 0 has printed it
                    print(*errors, sep="", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Does nothing: there are no resources to release."""


def triple(address: str, count: int, index: int) -> list[str]:
    """The flags with which a process joins the run."""
    return ["--coordinator-address", address, "--num-processes", str(count), "--process-id", str(index)]


def _start(words: Sequence[str], environment: Mapping[str, str], quiet: bool) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fdg.train", *words],
        env=environment,
        stdin=subprocess.PIPE,  # it ends when this end is closed: see `fdg.process_exit`
        stderr=subprocess.PIPE if quiet else None,
        text=True,
    )


def _forward_lines(index: int, process: subprocess.Popen, errors: list[str]) -> None:
    """Forwards a process's standard error; lines that begin with `error: ` are kept for the end."""
    assert process.stderr is not None
    with process.stderr as said:
        for line in said:
            if line.startswith("error: "):
                errors.append(f"[{index}] {line}")
                continue
            # If standard error is closed, keep reading, so that the process does not block.
            with contextlib.suppress(OSError):
                print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


def _wait(processes: Sequence[subprocess.Popen]) -> list[Process]:
    """Waits for the processes; returns how each ended, in the order of their ends.

    After a failure the others have some seconds to end; those that do not are left out (`run` kills them). A
    stopped process (SIGSTOP) counts as lost after `SILENT_SECONDS`, or at once if another one that waited for
    it has failed.
    """
    ended: dict[int, Process] = {}
    stopped: dict[int, float] = {}  # seconds, without those when this process was suspended
    deadline, before = float("inf"), time.monotonic()

    def lose(i: int) -> None:
        how = "it was stopped by a signal, and did not go on"
        ended[i] = Process(_who(i, processes[i]), None, how)

    while len(ended) < len(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        before, passed = time.monotonic(), min(1.0, time.monotonic() - before)
        for i, process in enumerate(processes):
            if i in ended:
                continue
            if _is_stopped(process, i in stopped):
                stopped[i] = stopped.get(i, 0.0) + passed
            else:
                stopped.pop(i, None)
            if stopped.get(i, 0.0) >= lines.SILENT_SECONDS:
                lose(i)
            elif process.returncode is not None:
                ended[i] = Process(_who(i, process), process.returncode)
        lost = [one for one in ended.values() if one.status is None or one.status < 0]
        if any(one.status != 0 for one in ended.values()):
            deadline = min(deadline, time.monotonic() + (LOST_SECONDS if lost else STOP_SECONDS))
            if all(i in ended or i in stopped for i in range(len(processes))):
                break
    for i in stopped.keys() - ended.keys():
        lose(i)
    return list(ended.values())


def _who(index: int, process: subprocess.Popen) -> str:
    return f"process {index} (host {socket.gethostname()}, pid {process.pid})"


def _is_stopped(process: subprocess.Popen, was_stopped: bool) -> bool:
    """Whether a process is stopped; records its exit status if it has ended."""
    while process.returncode is None:
        try:
            found, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:  # another thread has waited for it
            process.poll()
            return False
        if not found:
            return was_stopped
        if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
            process.returncode = os.waitstatus_to_exitcode(status)
        was_stopped = os.WIFSTOPPED(status)
    return False
