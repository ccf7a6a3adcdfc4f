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
from fdg.process_exit import LAUNCHER_PIPE
from fdg.processes import lines, ports


class Here:
    """A `restarting.Launcher` that starts `fdg.train` processes on this machine."""

    def __init__(self, count: int):
        self.count = count

    def reserve(self, first: bool) -> int:
        """The number of processes that the next `run` starts; `first` makes no difference on one machine."""
        return self.count

    def run(self, words: Sequence[str]) -> Ending:
        """Starts processes, each of which runs `python -m fdg.train WORDS`; waits until all have ended."""
        # Only processes with this key can join the run. It is passed in the environment, because other users
        # can read command lines.
        private_variables = {lines.KEY_VARIABLE: secrets.token_hex(32), LAUNCHER_PIPE: "1"}
        address = f"localhost:{ports.free_port('localhost')}"
        processes: list[subprocess.Popen] = []
        readers: list[threading.Thread] = []
        errors: list[str] = []  # error lines of all processes but the first
        user_ended = threading.Event()

        def forward(signal_number: int, _: Any) -> None:
            user_ended.set()
            if signal_number != signal.SIGINT:  # a terminal sends SIGINT to all processes itself
                for process in processes:
                    process.send_signal(signal_number)

        with ctrl_c.signal_handler(forward):  # a signal ends the processes first, and then this one
            try:
                for i in range(self.count):
                    process_flags = join_flags(address, self.count, i)
                    # On a machine with GPUs, process i gets GPU i; CPU devices ignore this variable.
                    environment = {"JAX_LOCAL_DEVICE_IDS": str(i), **private_variables, **os.environ}
                    process = _start([*words, *process_flags], environment, forwards_errors=i > 0)
                    processes.append(process)
                    if i:
                        readers.append(
                            threading.Thread(target=_forward_lines, args=(i, process, errors), daemon=True)
                        )
                        readers[-1].start()
                return ending_of(_wait(processes), user_ended.is_set())
            finally:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()  # they hold the lock of the run directory, which a restart needs
                    if process.stdin is not None:
                        process.stdin.close()
                for reader in readers:
                    reader.join(1)
                # If process 0 refused the request, it has printed the error.
                if processes and processes[0].returncode != REFUSED:
                    print(*errors, sep="", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Does nothing: there are no resources to release."""


def join_flags(address: str, count: int, index: int) -> list[str]:
    """The flags with which process `index` of `count` joins the run."""
    return ["--coordinator-address", address, "--num-processes", str(count), "--process-id", str(index)]


def _start(words: Sequence[str], environment: Mapping[str, str], forwards_errors: bool) -> subprocess.Popen:
    """Starts `python -m fdg.train WORDS`; `forwards_errors` makes its standard error a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "fdg.train", *words],
        env=environment,
        stdin=subprocess.PIPE,  # the process ends when this pipe is closed: see `fdg.process_exit`
        stderr=subprocess.PIPE if forwards_errors else None,
        text=True,
        errors="backslashreplace",  # C++ libraries may print anything
    )


def _forward_lines(index: int, process: subprocess.Popen, errors: list[str]) -> None:
    """Forwards a process's standard error; collects lines that begin with `error: ` in `errors`."""
    assert process.stderr is not None
    with process.stderr as stream:
        for line in stream:
            if line.startswith("error: "):
                errors.append(f"[{index}] {line}")
                continue
            # If standard error is closed, keep reading, so that the process does not block.
            with contextlib.suppress(OSError):
                print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


def _wait(processes: Sequence[subprocess.Popen]) -> list[Process]:
    """Waits for the processes; returns how they ended, in order of time.

    After a failure, the other processes have some seconds to end. Processes that run longer are not returned
    (`run` kills them). A stopped process (SIGSTOP) counts as lost after `SILENT_SECONDS`. It counts as lost
    at once if another process has failed, and no process still runs.
    """
    ended_processes: dict[int, Process] = {}
    # For how many seconds each stopped process has been stopped. Time in which this process was suspended
    # does not count.
    stopped: dict[int, float] = {}
    deadline, last_check = float("inf"), time.monotonic()

    def mark_ended(i: int, status: int | None) -> None:
        how = "a signal stopped it, and it did not continue" if status is None else ""
        who = f"process {i} (host {socket.gethostname()}, pid {processes[i].pid})"
        ended_processes[i] = Process(who, status, how)

    while len(ended_processes) < len(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        last_check, elapsed = time.monotonic(), min(1.0, time.monotonic() - last_check)
        for i, process in enumerate(processes):
            if i in ended_processes:
                continue
            if _is_stopped(process, i in stopped):
                stopped[i] = stopped.get(i, 0.0) + elapsed
            else:
                stopped.pop(i, None)
            if stopped.get(i, 0.0) >= lines.SILENT_SECONDS:
                mark_ended(i, None)
            elif process.returncode is not None:
                mark_ended(i, process.returncode)
        statuses = [process.status for process in ended_processes.values()]
        if any(status != 0 for status in statuses):
            is_lost = any(status is None or status < 0 for status in statuses)
            deadline = min(deadline, time.monotonic() + (LOST_SECONDS if is_lost else STOP_SECONDS))
            if all(i in ended_processes or i in stopped for i in range(len(processes))):
                break
    for i in stopped.keys() - ended_processes.keys():
        mark_ended(i, None)
    return list(ended_processes.values())


def _is_stopped(process: subprocess.Popen, was_stopped: bool) -> bool:
    """Whether a process is stopped; sets its `returncode` if it has ended."""
    while process.returncode is None:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:  # another thread has waited for it
            process.poll()
            return False
        if not pid:
            return was_stopped
        if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
            process.returncode = os.waitstatus_to_exitcode(status)
        was_stopped = os.WIFSTOPPED(status)
    return False
