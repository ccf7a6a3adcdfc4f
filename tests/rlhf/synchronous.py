"""Slots, micro-batches and placements do not change results: float64 runs, compared with one device.

    python -m tests.rlhf.synchronous
    python -m tests.rlhf.synchronous --only dpo --placement Split
    python -m tests.rlhf.synchronous --only grpo --only impala --lag 1 --ahead 2
    python -m tests.rlhf.synchronous --only "impala in rings" --staleness 1

The reference has one device, the same micro-batches, and a slot for each response. The other runs have fewer
slots, and several devices in one or two processes. With `--ahead`, slots change what is generated together,
so all runs have the same number. With a lag or a staleness, all runs have it, the reference included. PPO and
IMPALA train on an environment on the host; their micro-batches are the four steps of a rollout.

Each line shows the largest difference of any number in the last checkpoint and in the metrics of ten
iterations, relative to the largest of its array or to 1. Tokens, lengths and integers must be equal.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

import envs
from tools.break_it.comparing import compare

TEXT = (
    "--env tests.rlhf.synchronous:eighths --num-prompts 4 --hidden-size 8 --num-layers 1"
    " --num-heads 2 --micro-batches 2 --group-size 2 --total-steps 80"
)
HOST = "--env gymnasium:CartPole-v1 --env-workers 2 --num-envs 4 --num-steps 4 --hidden 8 --total-steps 160"
ALGORITHMS = {
    "grpo": f"--algo grpo {TEXT} --kl-coefficient 0.04",
    "ppo_rlhf": f"--algo ppo_rlhf {TEXT}",
    "dpo": f"--algo dpo {TEXT} --respondent policy",
    "ppo": f"--algo ppo {HOST} --num-minibatches 2",
    "impala": f"--algo impala {HOST}",
    "ppo in rings": f"--algo ppo {HOST} --num-minibatches 2 --rings 2",
    "impala in rings": f"--algo impala {HOST} --rings 2",
}
COMMON = "--preset none --eval-episodes 0 --seed 3"


class Placement(NamedTuple):
    """A placement to compare with one device.

    Attributes:
      flags: flags of `fdg.train`.
      slots: slots of a language model without `ahead`.
      processes: number of processes.
      runs: whether it runs language models, environments on the host, or both.
      takes_lag: whether its distribution policy has a staleness and a lag.
    """

    flags: str
    slots: int = 3
    processes: int = 1
    runs: tuple[str, ...] = (TEXT, HOST)
    takes_lag: bool = True


_SINGLE, _WORKERS = "--policy single_learner_coarse", "--policy workers --environments 1"
PLACEMENTS = {
    "three slots": Placement("--devices 1", runs=(TEXT,), takes_lag=False),
    "Colocated": Placement("--policy colocated --devices 2", slots=4, runs=(TEXT,), takes_lag=False),
    "Split": Placement("--policy split --devices 2", runs=(TEXT,)),
    "Standalone": Placement("--policy standalone --devices 3", runs=(TEXT,)),
    "SingleLearnerCoarse": Placement(f"{_SINGLE} --devices 2"),
    "SingleLearnerCoarse, 2 learners": Placement(f"{_SINGLE} --learners 2 --devices 3"),
    "Workers": Placement(f"{_WORKERS} --devices 3"),
    "Colocated in two processes": Placement(
        "--policy colocated --devices 2", slots=4, processes=2, runs=(TEXT,), takes_lag=False
    ),
    "Split in two processes": Placement("--policy split --devices 2", processes=2, runs=(TEXT,)),
    "SingleLearnerCoarse in two processes": Placement(f"{_SINGLE} --devices 2", processes=2, runs=(HOST,)),
    "Workers in two processes": Placement(f"{_WORKERS} --learners 2 --devices 4", processes=2, runs=(HOST,)),
}
# The networks of PPO and IMPALA are float32 even if float64 is enabled.
BOUNDS = {TEXT: ("language models", 1e-12), HOST: ("PPO and IMPALA", 1e-5)}


class Eighths(envs.text.TextTask):
    """Rewards are multiples of 1/8, so that their float32 means are exact in any order."""

    def reward(self, answer, tokens, mask):
        total = (jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1) / 8).astype(jnp.float32)
        return envs.text.Reward(total, {"eighths": total})


def eighths():
    """Addition of one-digit numbers; the reward depends on the tokens of the response."""
    return Eighths(envs.make("text:addition", digits=1).problem, max_response=12)


def train(flags, processes, out):
    """Trains for ten iterations; returns the run directory."""
    options = [*f"{flags} {COMMON} --out".split(), str(out)]
    start = ["fdg.launch", "--num-processes", str(processes), "--"] if processes > 1 else ["fdg.train"]
    process = subprocess.run(
        [sys.executable, "-m", *start, *options],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{flags}: {process.stderr[-2000:]}")
    return out


def placements(kind, delay, names):
    """The placements, of these names, that run this kind of algorithm, with a delay or without."""
    return {
        name: placement
        for name, placement in PLACEMENTS.items()
        if name in names and kind in placement.runs and (placement.takes_lag or not delay)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ALGORITHMS, action="append")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append")
    parser.add_argument("--lag", type=int, default=0, help="in micro-batches")
    parser.add_argument("--staleness", type=int, default=0, help="in iterations")
    parser.add_argument("--ahead", type=int, default=0, help="only for language models")
    arguments = parser.parse_args()
    worst = dict.fromkeys(BOUNDS, 0.0)
    delays = {"--lag": arguments.lag, "--staleness": arguments.staleness}
    delay = " ".join(f"{flag} {number}" for flag, number in delays.items() if number)
    reference_policy = f"--policy single_learner_coarse {delay}" if delay else ""
    for algo in arguments.only or ALGORITHMS:
        flags = ALGORITHMS[algo]
        if arguments.lag and "--rings" in flags:
            continue  # rings take a staleness, but no lag
        kind = TEXT if TEXT in flags else HOST
        if arguments.ahead and kind == TEXT:
            flags += f" --ahead {arguments.ahead} --slots 4"
        with tempfile.TemporaryDirectory() as folder:
            reference = train(f"{flags} {reference_policy} --devices 1", 1, Path(folder, "reference"))
            found = placements(kind, delay, arguments.placement or PLACEMENTS)
            for name, placement in found.items():
                slots = f"--slots {placement.slots}" if kind == TEXT and not arguments.ahead else ""
                options = f"{flags} {slots} {placement.flags} {delay}"
                run = train(options, placement.processes, Path(folder, name.replace(" ", "-")))
                difference, where = compare(run, reference)
                worst[kind] = max(worst[kind], difference)
                print(f"{algo:15} {name:36} {difference:8.1e}  {where}", flush=True)
    for kind, (name, bound) in BOUNDS.items():
        print(f"{name}: largest difference {worst[kind]:.1e}, bound {bound:.0e}")
    return int(any(worst[kind] > bound for kind, (_, bound) in BOUNDS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
