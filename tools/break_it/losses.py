"""Loses one of two processes at random moments, and resumes the run.

`fdg.launch` starts two processes. One of them, or the launcher, gets SIGKILL or SIGSTOP while it starts,
compiles, trains or writes a checkpoint. Within a time limit (wall time), the launcher's last line must name
the lost process, and no process may be left. The resumed run must have the same bits as an undisturbed run.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.forks import forked
from tools.break_it.comparing import describe_difference
from tools.break_it.kills import COMMON_FLAGS, RUNS
from tools.break_it.processes import (
    FOLDER,
    command_lines,
    cpu_seconds_of,
    descendants,
    is_running,
    record_circumstances,
)

_MAX_SECONDS = {signal.SIGKILL: 10.0, signal.SIGSTOP: 45.0}  # seconds until the launcher must end
_PATIENCE = 900.0  # seconds of wall time after which a launcher counts as hanging
_LAUNCHER = "launcher"
_PHASES = ("starting", "compiling", "training", "checkpointing")


def lose_process(try_number: int) -> str | None:
    """Loses a process and resumes the run; returns what went wrong, or None."""
    rng = random.Random(try_number)
    target = _LAUNCHER if try_number % 6 == 5 else rng.randrange(2)
    sent_signal = signal.SIGKILL if target == _LAUNCHER else (signal.SIGKILL, signal.SIGSTOP)[try_number % 2]
    phase = _PHASES[try_number // 2 % 4]
    undisturbed = FOLDER / "undisturbed" / "launched"
    if not (undisturbed / "summary.json").exists():
        with _launch(undisturbed, FOLDER / "undisturbed.said") as launcher:
            status, output = _wait_for_end(launcher, FOLDER / "undisturbed.said")
        if status:
            return f"undisturbed: status {status}: {output}"
    description = f"{sent_signal.name} to {target} while {phase}"
    with tempfile.TemporaryDirectory() as folder:
        run, errors_file = Path(folder, "run"), Path(folder, "launcher.errors")
        with _launch(run, errors_file) as launcher:
            children = _child_pids(launcher)
            _wait_for(phase, run, errors_file, children, rng)
            if launcher.poll() is not None:
                return None  # the launcher ended before the moment
            victim = launcher.pid if target == _LAUNCHER else children[int(target)]
            start_time = time.monotonic()
            os.kill(victim, sent_signal)
            status, output = _wait_for_end(launcher, errors_file)
        while any(map(is_running, children.values())) and time.monotonic() - start_time < _PATIENCE:
            time.sleep(0.05)
        seconds = time.monotonic() - start_time
        record_circumstances(
            "losses",
            try_number,
            description,
            seconds=round(seconds, 1),
            load=os.getloadavg()[0],
            said=output[-1:],
        )
        if seconds > _MAX_SECONDS[sent_signal]:
            return f"{description}: {seconds:.0f} s: {output}"
        names_process = re.match(rf"error: process {target} \(.* pid {victim}\)", (output or [""])[-1])
        if target != _LAUNCHER and not names_process:
            return f"{description}: status {status}: {output}"
        running = [pid for pid, arguments in command_lines().items() if str(run) in arguments]
        if running:
            return f"{description}: processes {running} are left"
        with _launch(run, errors_file) as launcher:
            status, output = _wait_for_end(launcher, errors_file)
        if status:
            return f"{description}: resumed: status {status}: {output}"
        difference = forked(lambda: describe_difference(run.absolute(), undisturbed.absolute(), 0.0))
    return f"{description}: {difference}"[:2000] if difference else None


@contextlib.contextmanager
def _launch(run: Path, errors_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts or resumes a run by `fdg.launch`, with its output in files; kills it at the end."""
    where = "--resume" if (run / "config.json").exists() else "--out"
    flags = [*RUNS["processes"].all_flags, *COMMON_FLAGS, where, str(run)]
    flags += ["--program-cache", str((FOLDER / "programs").absolute())]
    command = [sys.executable, "-m", "fdg.launch", "--num-processes", "2", "--", *flags]
    with errors_file.open("wb") as errors, errors_file.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=errors, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_end(launcher: subprocess.Popen[bytes], errors_file: Path) -> tuple[int, list[str]]:
    """Waits for a launcher; returns its exit status, and the lines that it wrote to standard error."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(_PATIENCE)
    launcher.kill()
    return launcher.wait(), errors_file.read_text().splitlines()


def _child_pids(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """The process ids of both processes of the run, by their number, which is their last argument."""
    pids: dict[int, int] = {}
    while len(pids) < 2 and launcher.poll() is None:
        time.sleep(0.01)
        lines = descendants(launcher.pid).items()
        pids = {int(line[-1]): pid for pid, line in lines if line and line[-1] in ("0", "1")}
    return pids


def _wait_for(phase: str, run: Path, errors_file: Path, children: dict[int, int], rng: random.Random) -> None:
    """Waits until a random moment of a phase, or until a process has ended."""
    has_begun: dict[str, Callable[[], bool]] = {
        "starting": lambda: True,
        "compiling": lambda: "compiling" in errors_file.with_suffix(".out").read_text(),
        "training": (run / "metrics.jsonl").exists,
        "checkpointing": lambda: any((run / "checkpoints").glob("*.writing")),
    }
    alive = lambda: len(children) == 2 and all(map(is_running, children.values()))  # noqa: E731
    if phase == "checkpointing":
        doubled = rng.randrange(6)  # twice the number of checkpoints to wait for
        while alive() and len(list((run / "checkpoints").glob("[0-9]*"))) < doubled // 2:
            time.sleep(0.01)
    while alive() and not has_begun[phase]():
        time.sleep(0.002)
    cpu_limit = {"starting": rng.uniform(0, 3), "checkpointing": 0}.get(phase, rng.random())
    cpu_limit += cpu_seconds_of(children[0]) if 0 in children else 0
    while alive() and cpu_seconds_of(children[0]) < cpu_limit:
        time.sleep(0.005)
