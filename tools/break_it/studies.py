"""Kills a study (SIGKILL) and resumes it: it must write the same tables as an undisturbed study."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.break_it.processes import FOLDER, record_circumstances

STUDY = """
algorithms = ["ppo", "a2c", "dqn"]
environments = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "probe:memory"]
total_steps = 20_000
seeds = 10
"""
TABLES = ("comparison.md", "comparison.tex", "comparison.json")
_CELLS = 12


def kill_study(try_number: int) -> str | None:
    """Kills a study of 12 cells twice, at random moments; returns which final tables differ, or None."""
    file = FOLDER / "study.toml"
    file.write_text(STUDY)
    undisturbed, killed = FOLDER / "study", FOLDER / f"study-{try_number}"
    _start(file, undisturbed).wait()
    rng = random.Random(try_number)
    for num_cells in sorted(rng.sample(range(_CELLS), 2)):
        process = _start(file, killed)
        while _count_finished(killed) < num_cells and process.poll() is None:
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 5.0))
        process.send_signal(signal.SIGKILL)
        status = process.wait()
        record_circumstances("studies", try_number, f"status {status}", cells=_count_finished(killed))
    _start(file, killed).wait()
    differing = [name for name in TABLES if (killed / name).read_bytes() != (undisturbed / name).read_bytes()]
    return f"these tables differ: {', '.join(differing)}" if differing else None


def _start(file: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fdg", "study", str(file), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _count_finished(out: Path) -> int:
    return len(list(out.glob("cells/*/summary.json")))
