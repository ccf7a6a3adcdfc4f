"""Training speed with several versions of JAX, in turns.

    python -m bench.versions .venv/bin/python .venv-newest/bin/python --envs 64 1024

Each round trains once with each interpreter; a ratio is of one round, so that what else the machine does
weighs on both of its runs. The table has medians, and the least and the largest of the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ASK = "import jax, sys; print(f'JAX {jax.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}')"


def steps_per_s(python: str, envs: int, steps: int, seed: int) -> float:
    """Of one run of PPO on CartPole-v1, compiling left out."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        words = [
            "--env",
            "CartPole-v1",
            "--num-envs",
            envs,
            "--total-steps",
            steps,
            "--seed",
            seed,
            "--out",
            run,
        ]
        command = [python, "-m", "fdg.train", *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": "."})
        return json.loads((run / "summary.json").read_text())["steps_per_s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="interpreters; ratios are to the first")
    parser.add_argument("--envs", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    names = [subprocess.check_output([python, "-c", ASK], text=True).strip() for python in given.pythons]
    print("| environments | version | steps/s | ratio (least to largest) |\n|---|---|---|---|")
    for envs in given.envs:
        rounds = [
            [steps_per_s(python, envs, given.steps, seed) for python in given.pythons]
            for seed in range(given.rounds)
        ]
        for name, speeds, ratios in zip(
            names,
            zip(*rounds, strict=True),
            zip(*[[speed / one[0] for speed in one] for one in rounds], strict=True),
            strict=True,
        ):
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {envs:,} | {name} | {statistics.median(speeds):,.0f} | {spread} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
