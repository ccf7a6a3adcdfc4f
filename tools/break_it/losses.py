"""Losses of one of two processes at random moments: the error and the resumed run.

`fdg.launch` starts two processes. One of them, or the launcher, gets SIGKILL or SIGSTOP while it starts,
compiles or trains, or while a checkpoint is written. The launcher's last line has to name that process within
so many seconds; none of the processes may be left; and the resumed run has the bits of an undisturbed one.
Seconds are of the clock; they are noted with the machine's load.
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
_PATIENCE = 900.0  # seconds of the clock, after which a launcher that does not end hangs
_LAUNCHER = "launcher"
_PHASES = ("starting", "compiling", "training", "checkpointing")


def losses(number: int) -> str | None:
    """One loss of a process, and what the run becomes when it continues."""
    draw = random.Random(number)
    which = _LAUNCHER if number % 6 == 5 else draw.randrange(2)
    sent = signal.SIGKILL if which == _LAUNCHER else (signal.SIGKILL, signal.SIGSTOP)[number % 2]
    phase = _PHASES[number // 2 % 4]
    whole = KEPT / "whole" / "launched"
    if not (whole / "summary.json").exists():
        with _launched(whole, KEPT / "whole.said") as launcher:
            status, output = _finished(launcher, KEPT / "whole.said")
        if status:
            return f"left alone: status {status}: {output}"
    what = f"{sent.name} to {which} while {phase}"
    with tempfile.TemporaryDirectory() as folder:
        run, file = Path(folder, "run"), Path(folder, "said")
        with _launched(run, file) as launcher:
            children = _children(launcher)
            _wait_for(phase, run, file, children, draw)
            victim = launcher.pid if which == _LAUNCHER else children[int(which)]
            if launcher.poll() is not None:
                return None  # it was done before
            begun = time.monotonic()
            os.kill(victim, sent)
            status, output = _finished(launcher, file)
        while any(map(is_running, children.values())) and time.monotonic() - begun < _PATIENCE:
            time.sleep(0.05)
        seconds = time.monotonic() - begun
        note("losses", number, what, seconds=round(seconds, 1), load=os.getloadavg()[0], said=output[-1:])
        if seconds > _WITHIN[sent]:
            return f"{what}: {seconds:.0f} s: {output}"
        named = re.match(rf"error: process {which} \(.* pid {victim}\)", (output or [""])[-1])
        if which != _LAUNCHER and not named:
            return f"{what}: status {status}: {output}"
        left = [pid for pid, words in command_lines().items() if str(run) in words]
        if left:
            return f"{what}: processes {left} are left"
        with _launched(run, file) as launcher:
            status, output = _finished(launcher, file)
        if status:
            return f"{what}: resumed: status {status}: {output}"
        differing = forked(lambda: wrong(run.absolute(), whole.absolute(), 0.0))
    return f"{what}: {differing}"[:2000] if differing else None


@contextlib.contextmanager
def _launched(run: Path, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`fdg.launch`, of a run or of what is left of it, with errors and output in files; killed at last."""
    where = "--resume" if (run / "config.json").exists() else "--out"
    words = [*KILLED["processes"].words, *COMMON, where, str(run)]
    words += ["--program-cache", str((KEPT / "programs").absolute())]
    command = [sys.executable, "-m", "fdg.launch", "--num-processes", "2", "--", *words]
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
    """The ids of both processes of a run, by their number in it, which is their last word."""
    pids: dict[int, int] = {}
    while len(pids) < 2 and launcher.poll() is None:
        time.sleep(0.01)
        lines = descendants(launcher.pid).items()
        pids = {int(words[-1]): pid for pid, words in lines if words and words[-1] in ("0", "1")}
    return pids


def _wait_for(phase: str, run: Path, file: Path, children: dict[int, int], draw: random.Random) -> None:
    """Returns at a random moment of a phase, or when there is no process any more."""
    begun: dict[str, Callable[[], bool]] = {
        "starting": lambda: True,
        "compiling": lambda: "compiling" in file.with_suffix(".out").read_text(),
        "training": (run / "metrics.jsonl").exists,
        "checkpointing": lambda: any((run / "checkpoints").glob("*.writing")),
    }
    there = lambda: all(map(is_running, children.values()))  # noqa: E731
    if phase == "checkpointing":
        skipped = draw.randrange(6)
        while there() and len(list((run / "checkpoints").glob("[0-9]*"))) < skipped // 2:
            time.sleep(0.01)
    while there() and not begun[phase]():
        time.sleep(0.002)
    until = {"starting": draw.uniform(0, 3), "checkpointing": 0}.get(phase, draw.random())
    until += worked(children[0]) if 0 in children else 0
    while there() and worked(children[0]) < until:
        time.sleep(0.005)
