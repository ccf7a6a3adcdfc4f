"""Slots and micro-batches change no number: runs of every placement against one device, in float64.

    python -m tests.rlhf.synchronous
    python -m tests.rlhf.synchronous --only dpo --side Split

The reference has the same micro-batches, a slot for each response, and one device; the others have three
slots on one device, and under `Split` and `Standalone` in one process and in two. Each line says how far any
number of the last checkpoint and of ten iterations' metrics is from the reference's, relative to the largest
of its array or to 1; tokens, lengths and integers have to be the same.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp

import envs
from tools.break_it.comparing import compare

ALGORITHMS = {
    "grpo": "--group-size 2 --kl-coefficient 0.04",
    "ppo_rlhf": "--group-size 2",
    "dpo": "--group-size 2 --respondent policy",
}
COMMON = (
    "--env tests.rlhf.synchronous:eighths --num-prompts 4 --hidden-size 8 --num-layers 1"
    " --num-heads 2 --preset none --micro-batches 2 --total-steps 80 --eval-episodes 0 --seed 3"
)
SIDES = {  # flags, and processes
    "three slots": ("--slots 3 --devices 1", 1),
    "Colocated": ("--slots 4 --policy colocated --devices 2", 1),
    "Split": ("--slots 3 --policy split --devices 2", 1),
    "Standalone": ("--slots 3 --policy standalone --devices 3", 1),
    "Colocated in two processes": ("--slots 4 --policy colocated --devices 2", 2),
    "Split in two processes": ("--slots 3 --policy split --devices 2", 2),
}
BOUND = 1e-12


class Eighths(envs.text.TextTask):
    """Rewards are float32 everywhere: of eighths, their means are exact in any order."""

    def reward(self, answer, tokens, mask):
        total = (jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1) / 8).astype(jnp.float32)
        return envs.text.Reward(total, {"eighths": total})


def eighths():
    """Additions of one digit, paid for by the tokens of the response."""
    return Eighths(envs.make("text:addition", digits=1).problem, max_response=12)


def trained(algo, flags, processes, out):
    """A run directory of ten iterations."""
    words = [*f"--algo {algo} {ALGORITHMS[algo]} {COMMON} {flags} --out".split(), str(out)]
    start = ["fdg.launch", "--num-processes", str(processes), "--"] if processes > 1 else ["fdg.train"]
    done = subprocess.run(
        [sys.executable, "-m", *start, *words],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{algo}, {flags}: {done.stderr[-2000:]}")
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ALGORITHMS, action="append")
    parser.add_argument("--side", choices=SIDES, action="append")
    given, worst = parser.parse_args(), 0.0
    for algo in given.only or ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            reference = trained(algo, "--devices 1", 1, Path(folder, "reference"))
            for name in given.side or SIDES:
                flags, processes = SIDES[name]
                run = trained(algo, flags, processes, Path(folder, name.replace(" ", "-")))
                apart, where = compare(run, reference)
                worst = max(worst, apart)
                print(f"{algo:9} {name:28} {apart:8.1e}  {where}", flush=True)
    print(f"largest difference {worst:.1e}, bound {BOUND:.0e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
