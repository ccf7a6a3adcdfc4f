"""`python -m fdg.launch --num-processes N`: `fdg.train` as several processes on this machine.

A convenience. On a cluster, start `fdg.train` with its own launcher (`srun`, `mpirun`) and `--distributed`.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from fdg import ctrl_c
from fdg.commands.flags import Flag, Parser, add_flag, normalise
from fdg.errors import FdgError
from fdg.processes import lines, ports

STOP_SECONDS = 20.0  # within which the others end by themselves when one has failed

_NUM_PROCESSES = Flag("num_processes", int, 2, "how many to start; the other flags are those of fdg.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes, and waits for them; gives the exit status of the first that failed, or 0."""
    parser = Parser(prog="python -m fdg.launch", description=__doc__, allow_abbrev=False, add_help=False)
    add_flag(parser, _NUM_PROCESSES)
    try:
        known, rest = parser.parse_known_args(normalise(sys.argv[1:] if argv is None else argv))
        count = vars(known).get("num_processes", _NUM_PROCESSES.default)
        if count < 1:
            raise FdgError(f"--num-processes {count}: it must be at least 1")
    except FdgError as error:
        print("error:", error, file=sys.stderr)
        return 2
    if "-h" in rest or "--help" in rest:
        parser.print_help()
        return 0
    return _run(count, rest)


def _run(count: int, words: Sequence[str]) -> int:
    # Only who was started here can join: in the environment, for anybody can read a command line.
    key = {lines.KEY_VARIABLE: secrets.token_hex(32)}
    address = f"localhost:{ports.free_port('localhost')}"
    processes: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []

    def forward(number: int, _: Any) -> None:
        if number != signal.SIGINT:  # which a terminal sends to all of them
            for process in processes:
                process.send_signal(number)

    ctrl_c.be_patient(None)  # the processes end by themselves, and this one after them
    before = [signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        for i in range(count):
            mine = ["--coordinator-address", address, "--num-processes", str(count), "--process-id", str(i)]
            # On a machine with GPUs, process i has the i-th; a CPU's devices do not heed this.
            environment = {"JAX_LOCAL_DEVICE_IDS": str(i), **key, **os.environ}
            process = subprocess.Popen(
                [sys.executable, "-m", "fdg.train", *words, *mine],
                env=environment,
                stderr=subprocess.PIPE if i else None,
                text=True,
            )
            processes.append(process)
            if i:
                readers.append(threading.Thread(target=_forward_lines, args=(i, process), daemon=True))
                readers[-1].start()
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
        for reader in readers:
            reader.join(1)
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def _forward_lines(index: int, process: subprocess.Popen) -> None:
    assert process.stderr is not None
    with process.stderr as said:
        for line in said:
            print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    failed, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        for process in processes:
            if process.returncode and not failed:
                failed, deadline = process.returncode, time.monotonic() + STOP_SECONDS
    failed = failed or next((process.returncode for process in processes if process.returncode), 0)
    return 128 - failed if failed < 0 else failed
