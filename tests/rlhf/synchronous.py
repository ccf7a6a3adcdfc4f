"""Slots, micro-batches and placements do not change results: float64 runs, compared with one device.

    python -m tests.rlhf.synchronous
    python -m tests.rlhf.synchronous --only dpo --placement Split

The reference has one device, the same micro-batches, and a slot for each response. The other runs have fewer
slots, and several devices in one or two processes. Each line shows the largest difference of any number in
the last checkpoint and in the metrics of ten iterations, relative to the largest of its array or to 1.
Tokens, lengths and integers must be equal.
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
PLACEMENTS = {  # (flags, number of processes)
    "three slots": ("--slots 3 --devices 1", 1),
    "Colocated": ("--slots 4 --policy colocated --devices 2", 1),
    "Split": ("--slots 3 --policy split --devices 2", 1),
    "Standalone": ("--slots 3 --policy standalone --devices 3", 1),
    "Colocated in two processes": ("--slots 4 --policy colocated --devices 2", 2),
    "Split in two processes": ("--slots 3 --policy split --devices 2", 2),
}
BOUND = 1e-12


class Eighths(envs.text.TextTask):
    """Rewards are multiples of 1/8, so that their float32 means are exact in any order."""

    def reward(self, answer, tokens, mask):
        total = (jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1) / 8).astype(jnp.float32)
        return envs.text.Reward(total, {"eighths": total})


def eighths():
    """Addition of one-digit numbers; the reward depends on the tokens of the response."""
    return Eighths(envs.make("text:addition", digits=1).problem, max_response=12)


def train(algo, flags, processes, out):
    """Trains for ten iterations; returns the run directory."""
    options = [*f"--algo {algo} {ALGORITHMS[algo]} {COMMON} {flags} --out".split(), str(out)]
    start = ["fdg.launch", "--num-processes", str(processes), "--"] if processes > 1 else ["fdg.train"]
    process = subprocess.run(
        [sys.executable, "-m", *start, *options],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{algo}, {flags}: {process.stderr[-2000:]}")
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ALGORITHMS, action="append")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append")
    arguments, worst = parser.parse_args(), 0.0
    for algo in arguments.only or ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            reference = train(algo, "--devices 1", 1, Path(folder, "reference"))
            for name in arguments.placement or PLACEMENTS:
                flags, processes = PLACEMENTS[name]
                run = train(algo, flags, processes, Path(folder, name.replace(" ", "-")))
                difference, where = compare(run, reference)
                worst = max(worst, difference)
                print(f"{algo:9} {name:28} {difference:8.1e}  {where}", flush=True)
    print(f"largest difference {worst:.1e}, bound {BOUND:.0e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
