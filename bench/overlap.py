"""Measures how far actors and learners overlap with staleness, on two host devices.

One process alternates between iterations without staleness, in which actor and learner never overlap, and
iterations with `staleness=1`. The same two programs are also started together without an engine, on copies of
the arrays that they had in training: no engine can overlap them better (`bare`). XLA runs matrix products and
independent operations on all threads, so a program alone is not confined to one core.

    python -m bench.overlap --epochs 2
"""

import argparse
import json
import os
import statistics
import time

os.environ["PJRT_NPROC"] = "2"  # XLA's threads; read when JAX starts

import jax
import jax.numpy as jnp

import algos
import envs
import fdg
import policies
from bench.harness import Spread, in_turns, seconds

ROUNDS, ITERATIONS = 7, 40  # calls are long, because at the end of a call one of the two groups is idle


def main(num_envs: int, num_steps: int, num_epochs: int) -> dict:
    """Measures; returns medians over the rounds. With more epochs, the learner takes longer.

    Returns:
      Seconds per iteration: `synchronous` (without staleness), `staleness_1`, `bare` (the two programs
      without the engine, started together), and each program alone. Ratios: `speedup` is `synchronous` over
      `staleness_1`, `share_of_bare` is `bare` over `staleness_1`, with its middle half; `bare_speedup` is
      the sum of the programs alone over `bare`.
    """
    fdg.host_devices(2)
    devices = jax.devices("cpu")
    algorithm = algos.PPO(
        env=envs.make("Acrobot-v1"),
        num_envs=num_envs,
        num_steps=num_steps,
        num_epochs=num_epochs,
        total_steps=10**9,
    )
    runs = {i: _Run(algorithm, policies.SingleLearnerCoarse(staleness=i), devices) for i in (0, 1)}
    rounds = in_turns({**{i: r.seconds for i, r in runs.items()}, "bare": runs[1].bare_seconds}, ROUNDS)
    rows = [
        {
            "synchronous": synchronous,
            "staleness_1": overlapped,
            **bare,
            "speedup": synchronous / overlapped,
            "share_of_bare": bare["bare"] / overlapped,
            "bare_speedup": (sum(bare.values()) - bare["bare"]) / bare["bare"],
        }
        for synchronous, overlapped, bare in zip(*rounds.values(), strict=True)
    ]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    spread = Spread.of(row["share_of_bare"] for row in rows)
    return {**medians, "share_of_bare_middle_half": [spread.low, spread.high]}


class _Run:
    """An engine and its state, which each measurement continues."""

    def __init__(self, algorithm, policy, devices):
        self.engine = fdg.compile(algorithm, policy, devices)
        self.state = self.engine.init(0)
        self.programs = {p.devices[0].id: p for p in self.engine.programs if p.fragments}
        self.seconds(None)
        self.arguments = self._arguments_in_training()

    def seconds(self, _):
        """Seconds per iteration."""
        begun = time.perf_counter()
        self.state, metrics = self.engine.run(self.state, ITERATIONS)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - begun) / ITERATIONS

    def bare_seconds(self, _):
        """Median seconds of each program alone, and of both together, without the engine."""
        names = {program.name: [device] for device, program in self.programs.items()}
        sides = {**names, "bare": list(self.programs)}
        return {
            name: statistics.median(self._bare(d) for _ in range(ITERATIONS)) for name, d in sides.items()
        }

    def _bare(self, devices):
        arguments = [jax.block_until_ready(jax.tree.map(jnp.copy, self.arguments[d])) for d in devices]
        return seconds(
            lambda: [self.programs[d].compiled(*a) for d, a in zip(devices, arguments, strict=True)]
        )

    def _arguments_in_training(self):
        """Runs two iterations; returns copies of each program's last arguments, by its device."""
        arguments = {}
        executables = {device: program.compile() for device, program in self.programs.items()}
        for device, program in self.programs.items():

            def run(*arrays, device=device):
                arguments[device] = jax.block_until_ready(jax.tree.map(jnp.copy, arrays))
                return executables[device](*arrays)

            program.compiled = run
        self.state, metrics = self.engine.run(self.state, 2)
        jax.block_until_ready(metrics)
        for device, program in self.programs.items():
            program.compiled = executables[device]
        return arguments


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=int, default=256, help="environments (default %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="steps of a rollout (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of the learner (default %(default)s)")
    flags = parser.parse_args()
    print(json.dumps(main(flags.envs, flags.steps, flags.epochs)))
