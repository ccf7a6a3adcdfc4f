"""Losses of one of two processes at random moments, for `bench.break_it`: the error and the resumed run.

`fdg.launch` starts two processes. One of them, or the launcher, gets SIGKILL or SIGSTOP while it starts,
compiles or trains, or while a checkpoint is written. The launcher's last line has to name that process within
so many seconds; none of the processes may be left; and the resumed run has the bits of an undisturbed one.
Seconds are of the clock: what was met, and the machine's load, is in build/break_it/lost.jsonl.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.break_it_kills import COMMON, KEPT, KILLED, difference, in_a_copy, worked

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
        status, said = _finished(_launch(whole, KEPT / "whole.said"))
        if status:
            return f"left alone: status {status}: {said}"
    what = f"{sent.name} to {which} while {phase}"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        launcher = _launch(run, Path(folder, "said"))
        children = _children(launcher)
        _wait_for(phase, run, Path(folder, "said"), children, draw)
        victim = launcher.pid if which == _LAUNCHER else children[int(which)]
        if launcher.poll() is not None:
            return None  # it was done before
        begun = time.monotonic()
        os.kill(victim, sent)
        status, said = _finished(launcher)
        while any(map(_is_there, children.values())) and time.monotonic() - begun < _PATIENCE:
            time.sleep(0.05)
        seconds = time.monotonic() - begun
        with (KEPT / "lost.jsonl").open("a") as file:
            row = {"number": number, "what": what, "seconds": round(seconds, 1), "load": os.getloadavg()[0]}
            file.write(json.dumps({**row, "met": _met(run), "said": said[-1:]}) + "\n")
        if seconds > _WITHIN[sent]:
            return f"{what}: {seconds:.0f} s: {said}"
        if which != _LAUNCHER and not re.match(
            rf"error: process {which} \(.* pid {victim}\)", (said or [""])[-1]
        ):
            return f"{what}: status {status}: {said}"
        left = _with_word(str(run))
        if left:
            return f"{what}: processes {left} are left"
        status, said = _finished(_launch(run, Path(folder, "said")))
        if status:
            return f"{what}: going on: status {status}: {said}"
        differing = in_a_copy(difference, run.absolute(), whole.absolute(), 0.0)
    return f"{what}: {differing}"[:2000] if differing else None


def _launch(run: Path, said: Path) -> subprocess.Popen[bytes]:
    """`fdg.launch`, of a run or of what is left of it; what it says goes into two files."""
    where = "--resume" if (run / "config.json").exists() else "--out"
    words = [*KILLED["processes"].flags.split(), *COMMON, where, str(run)]
    words += ["--program-cache", str((KEPT / "programs").absolute())]
    command = [sys.executable, "-m", "fdg.launch", "--num-processes", "2", "--", *words]
    said.unlink(missing_ok=True)
    with said.open("wb") as out, said.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
    process.said = said.with_suffix(".err")  # type: ignore[attr-defined]
    return process


def _finished(launcher: subprocess.Popen[bytes]) -> tuple[int, list[str]]:
    """The exit status of a launcher, and the lines that it has said on standard error."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(_PATIENCE)
    launcher.kill()
    return launcher.wait(), launcher.said.read_text().splitlines()  # type: ignore[attr-defined]


def _children(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """The ids of both processes of a run, by their number in it."""
    found: dict[int, int] = {}
    while len(found) < 2 and launcher.poll() is None:
        time.sleep(0.01)
        with contextlib.suppress(OSError, ValueError, IndexError):
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            found = {int(_words(int(pid))[-1]): int(pid) for pid in children}
    return found


def _wait_for(phase: str, run: Path, said: Path, children: dict[int, int], draw: random.Random) -> None:
    """Returns at a random moment of a phase, or when there is no process any more."""
    begun: dict[str, Callable[[], bool]] = {
        "starting": lambda: True,
        "compiling": lambda: "compiling" in said.read_text(),
        "training": (run / "metrics.jsonl").exists,
        "checkpointing": lambda: any((run / "checkpoints").glob("*.writing")),
    }
    there = lambda: all(map(_is_there, children.values()))  # noqa: E731
    if phase == "checkpointing":
        skipped = draw.randrange(6)
        while there() and len(list((run / "checkpoints").glob("[0-9]*"))) < skipped // 2:
            time.sleep(0.01)
    while there() and not begun[phase]():
        time.sleep(0.002)
    until = worked(children[0]) + {"starting": draw.uniform(0, 3), "checkpointing": 0}.get(
        phase, draw.random()
    )
    while there() and worked(children[0]) < until:
        time.sleep(0.005)


def _met(run: Path) -> str:
    newest = [path.name for path in (run / "checkpoints").glob("*")] if run.exists() else []
    return f"checkpoints {sorted(newest)}" if newest else "no checkpoint"


def _words(pid: int) -> Sequence[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _with_word(word: str) -> list[int]:
    """Processes that have a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in _words(int(path.name)):
                found.append(int(path.name))
    return found
