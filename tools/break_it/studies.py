"""Kills of a study by signal 9: the resumed study must write the tables of one that was left alone."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.break_it.processes import KEPT, note

STUDY = """
algorithms = ["ppo", "a2c", "dqn"]
environments = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "probe:memory"]
total_steps = 20_000
seeds = 10
"""
TABLES = ("comparison.md", "comparison.tex", "comparison.json")
_CELLS = 12


def studies(number: int) -> str | None:
    """Kills a study of 12 cells twice, at random moments, and resumes it."""
    file = KEPT / "study.toml"
    file.write_text(STUDY)
    whole, killed = KEPT / "study", KEPT / f"study-{number}"
    _start(file, whole).wait()
    rng = random.Random(number)
    for cells in sorted(rng.sample(range(_CELLS), 2)):
        process = _start(file, killed)
        while _finished(killed) < cells and process.poll() is None:
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 5.0))
        process.send_signal(signal.SIGKILL)
        status = process.wait()
        note("studies", number, f"status {status}", cells=_finished(killed))
    _start(file, killed).wait()
    unequal = [name for name in TABLES if (killed / name).read_bytes() != (whole / name).read_bytes()]
    return f"unequal: {', '.join(unequal)}" if unequal else None


def _start(file: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fdg", "study", str(file), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _finished(out: Path) -> int:
    return len(list(out.glob("cells/*/summary.json")))
