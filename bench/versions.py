"""Compares training speed of several versions of JAX, in turns.

    python -m bench.versions .venv/bin/python .venv-newest/bin/python --envs 64 1024

Each round trains once with each interpreter. Ratios are within a round, because other work on the machine
slows all interpreters. The table has medians, and the smallest and largest ratio over the rounds.
"""

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.harness import in_turns, parser, table

PRINT_VERSIONS = (
    "import jax, sys; print(f'JAX {jax.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}')"
)


def steps_per_s(python: str, envs: int, steps: int, seed: int) -> float:
    """Steps per second of PPO on CartPole-v1 with `envs` environments, without compilation."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        flags = f"--env CartPole-v1 --num-envs {envs} --total-steps {steps} --seed {seed} --out {run}".split()
        command = [python, "-m", "fdg.train", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": "."})
        return json.loads((run / "summary.json").read_text())["steps_per_s"]


def main() -> None:
    command = parser("bench.versions", __doc__)
    command.add_argument("pythons", nargs="+", help="interpreters; ratios are to the first")
    command.add_argument("--envs", nargs="+", type=int, default=[64, 1024])
    command.add_argument("--steps", type=int, default=2_000_000)
    command.add_argument("--rounds", type=int, default=5)
    args = command.parse_args()
    rows = []
    for envs in args.envs:
        sides = {
            python: lambda seed, python=python, envs=envs: steps_per_s(python, envs, args.steps, seed)
            for python in args.pythons
        }
        speeds = in_turns(sides, args.rounds, warm_up=0)
        for python, rates in speeds.items():
            name = subprocess.check_output([python, "-c", PRINT_VERSIONS], text=True).strip()
            ratios = sorted(a / b for a, b in zip(rates, speeds[args.pythons[0]], strict=True))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            rows.append((f"{envs:,}", name, f"{statistics.median(rates):,.0f}", spread))
    print(table(("environments", "version", "steps/s", "ratio (smallest to largest)"), rows))


if __name__ == "__main__":
    main()
