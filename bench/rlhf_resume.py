"""A run of a language model that goes on where it was: 0 differing bits, the order of problems included.

    python -m bench.rlhf_resume [--algo grpo]

Trains eight iterations at one go, and as five and three, on problems in epochs whose borders lie
within iterations; then compares every leaf of the state, and the rows of metrics.
"""

import argparse
import json
import shutil
from pathlib import Path

import jax
import numpy as np

import algos
import envs
import fdg

RUNS = Path("runs/rlhf-resume")
TIMES = ("wall_s", "tokens_per_s")


def trained(name: str, out: str, *iterations: int) -> fdg.Run:
    """A run of so many iterations, in as many sittings."""
    fields = {"num_prompts": 4, "dataset_size": 6, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    algorithm = algos.get(name)(env=envs.make("text:addition", digits=1), **fields)
    for i, count in enumerate(iterations):
        run = fdg.fit(
            algorithm,
            total_steps=count * algorithm.steps_per_iteration,
            devices=1,
            eval_episodes=0,
            out=RUNS / out,
            resume=i > 0,
            progress=False,
        )
    return run


def rows(run: fdg.Run) -> list[dict]:
    assert run.path is not None
    text = (run.path / "metrics.jsonl").read_text()
    every = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--algo", choices=algos.names("text"), default="grpo")
    name = parser.parse_args().algo
    shutil.rmtree(RUNS, ignore_errors=True)
    whole, parts = trained(name, "whole", 8), trained(name, "parts", 5, 8)
    bits = 0
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(parts.state), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        a, b = (np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (one, other))
        bits += int(np.unpackbits(a ^ b).sum())
    same = sum(one == other for one, other in zip(rows(whole), rows(parts), strict=True))
    print(f"{name}: {bits} bits differ; {same} of {len(rows(whole))} rows of metrics are the same")


if __name__ == "__main__":
    main()
