"""Loses one of two processes at random moments, and resumes the run.

`fdg.launch` starts two processes. One of them, or the launcher, gets SIGKILL or SIGSTOP while it starts,
compiles, trains or writes a checkpoint. The launcher's last line must name the process within a time limit,
in seconds of wall time; no process may be left; the resumed run must have the bits of an undisturbed run.
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
from tools.break_it.comparing import wrong
from tools.break_it.kills import COMMON, KILLED
from tools.break_it.processes import KEPT, command_lines, descendants, is_running, note, worked

_WITHIN = {signal.SIGKILL: 10.0, signal.SIGSTOP: 45.0}
_PATIENCE = 900.0  # seconds of wall time after which a launcher counts as hanging
_LAUNCHER = "launcher"
_PHASES = ("starting", "compiling", "training", "checkpointing")


def losses(number: int) -> str | None:
    """Loses a process and resumes the run; returns what went wrong, or None."""
    draw = random.Random(number)
    target = _LAUNCHER if number % 6 == 5 else draw.randrange(2)
    sent = signal.SIGKILL if target == _LAUNCHER else (signal.SIGKILL, signal.SIGSTOP)[number % 2]
    phase = _PHASES[number // 2 % 4]
    whole = KEPT / "whole" / "launched"
    if not (whole / "summary.json").exists():
        with _launched(whole, KEPT / "whole.said") as launcher:
            status, output = _finished(launcher, KEPT / "whole.said")
        if status:
            return f"left alone: status {status}: {output}"
    what = f"{sent.name} to {target} while {phase}"
    with tempfile.TemporaryDirectory() as folder:
        run, file = Path(folder, "run"), Path(folder, "said")
        with _launched(run, file) as launcher:
            children = _children(launcher)
            _wait_for(phase, run, file, children, draw)
            victim = launcher.pid if target == _LAUNCHER else children[int(target)]
            if launcher.poll() is not None:
                return None  # it had ended before
            begun = time.monotonic()
            os.kill(victim, sent)
            status, output = _finished(launcher, file)
        while any(map(is_running, children.values())) and time.monotonic() - begun < _PATIENCE:
            time.sleep(0.05)
        seconds = time.monotonic() - begun
        note("losses", number, what, seconds=round(seconds, 1), load=os.getloadavg()[0], said=output[-1:])
        if seconds > _WITHIN[sent]:
            return f"{what}: {seconds:.0f} s: {output}"
        named = re.match(rf"error: process {target} \(.* pid {victim}\)", (output or [""])[-1])
        if target != _LAUNCHER and not named:
            return f"{what}: status {status}: {output}"
        running = [pid for pid, arguments in command_lines().items() if str(run) in arguments]
        if running:
            return f"{what}: processes {running} are left"
        with _launched(run, file) as launcher:
            status, output = _finished(launcher, file)
        if status:
            return f"{what}: resumed: status {status}: {output}"
        differing = forked(lambda: wrong(run.absolute(), whole.absolute(), 0.0))
    return f"{what}: {differing}"[:2000] if differing else None


@contextlib.contextmanager
def _launched(run: Path, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts or resumes a run by `fdg.launch`, with errors and output in files; killed at the end."""
    where = "--resume" if (run / "config.json").exists() else "--out"
    flags = [*KILLED["processes"].all_flags, *COMMON, where, str(run)]
    flags += ["--program-cache", str((KEPT / "programs").absolute())]
    command = [sys.executable, "-m", "fdg.launch", "--num-processes", "2", "--", *flags]
    with file.open("wb") as errors, file.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=errors, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _finished(launcher: subprocess.Popen[bytes], file: Path) -> tuple[int, list[str]]:
    """The exit status of a launcher, and the lines of its errors."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(_PATIENCE)
    launcher.kill()
    return launcher.wait(), file.read_text().splitlines()


def _children(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """The ids of both processes, by their number in the run, which is their last argument."""
    pids: dict[int, int] = {}
    while len(pids) < 2 and launcher.poll() is None:
        time.sleep(0.01)
        lines = descendants(launcher.pid).items()
        pids = {int(line[-1]): pid for pid, line in lines if line and line[-1] in ("0", "1")}
    return pids


def _wait_for(phase: str, run: Path, file: Path, children: dict[int, int], draw: random.Random) -> None:
    """Waits until a random moment of a phase, or until no process is left."""
    begun: dict[str, Callable[[], bool]] = {
        "starting": lambda: True,
        "compiling": lambda: "compiling" in file.with_suffix(".out").read_text(),
        "training": (run / "metrics.jsonl").exists,
        "checkpointing": lambda: any((run / "checkpoints").glob("*.writing")),
    }
    alive = lambda: all(map(is_running, children.values()))  # noqa: E731
    if phase == "checkpointing":
        skipped = draw.randrange(6)
        while alive() and len(list((run / "checkpoints").glob("[0-9]*"))) < skipped // 2:
            time.sleep(0.01)
    while alive() and not begun[phase]():
        time.sleep(0.002)
    until = {"starting": draw.uniform(0, 3), "checkpointing": 0}.get(phase, draw.random())
    until += worked(children[0]) if 0 in children else 0
    while alive() and worked(children[0]) < until:
        time.sleep(0.005)
