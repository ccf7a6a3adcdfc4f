"""Measures how far actors and learners overlap with staleness, on two host devices with one thread each.

One process alternates between iterations without staleness, in which actor and learner never overlap, and
iterations with `staleness=1`. Two host devices share caches and memory, which slows programs down. The figure
`machine` shows by how much: the time of the same two programs without an engine, started together on arrays
that are ready, relative to the longer one alone.

    python -m bench.overlap
"""

import json
import os
import statistics
import time

# Set before JAX starts: one thread per device, and each operation on one thread.
os.environ["PJRT_NPROC"] = "2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax

import algos
import envs
import fdg
import policies
from bench.harness import Spread, in_turns, seconds, zeros_and_keys

ROUNDS, ITERATIONS = 7, 40  # calls are long, because at the end of a call one of the two groups is idle


def main() -> dict:
    """Measures; returns medians over the rounds.

    Returns:
      Seconds per iteration: `synchronous` (without staleness), `staleness_1`, and by name of a group its busy
      seconds without staleness. Ratios: `over_longer` is `staleness_1` over the longer busy time, with its
      middle half; `synchronous_over_sum` is `synchronous` over the sum of busy times; `machine`.
    """
    fdg.host_devices(2)
    devices = jax.devices("cpu")
    algorithm = algos.PPO(
        env=envs.make("Acrobot-v1"), num_envs=256, num_steps=64, num_epochs=1, total_steps=10**9
    )
    runs = {i: _Run(algorithm, policies.SingleLearnerCoarse(staleness=i), devices) for i in (0, 1)}
    machine = _slowdown_without_engine(runs[1].engine)
    sides = {**{i: run.seconds for i, run in runs.items()}, "machine": machine}
    rounds = in_turns(sides, ROUNDS, warm_up=0)
    rows = [
        {
            "synchronous": synchronous,
            "staleness_1": overlapped,
            **busy,
            "over_longer": overlapped / max(busy.values()),
            "synchronous_over_sum": synchronous / sum(busy.values()),
            "machine": slowdown,
        }
        for (synchronous, busy), (overlapped, _), slowdown in zip(*rounds.values(), strict=True)
    ]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    spread = Spread.of(row["over_longer"] for row in rows)
    return {**medians, "over_longer_middle_half": [spread.low, spread.high]}


class _Run:
    """An engine and its state, which each measurement continues."""

    def __init__(self, algorithm, policy, devices):
        self.engine = fdg.compile(algorithm, policy, devices)
        self.state, metrics = self.engine.run(self.engine.init(0), ITERATIONS)
        jax.block_until_ready(metrics)

    def seconds(self, _):
        """Seconds per iteration, and each group's busy seconds."""
        before, begun = self.engine.busy_seconds(), time.perf_counter()
        self.state, metrics = self.engine.run(self.state, ITERATIONS)
        jax.block_until_ready((self.state, metrics))
        wall = (time.perf_counter() - begun) / ITERATIONS
        after = self.engine.busy_seconds()
        return wall, {group: (after[group] - before[group]) / ITERATIONS for group in after}


def _slowdown_without_engine(engine):
    """A function that measures the time of two concurrent programs relative to the longer one alone."""
    programs_of_fragments = [program for program in engine.programs if program.fragments]

    def concurrent_seconds(programs):
        arguments = [zeros_and_keys(program.arguments) for program in programs]
        return seconds(lambda: [p.compiled(*a) for p, a in zip(programs, arguments, strict=True)])

    def measure(_):
        medians = [
            statistics.median(concurrent_seconds(programs) for _ in range(ITERATIONS // 2))
            for programs in (*([program] for program in programs_of_fragments), programs_of_fragments)
        ]
        return medians[-1] / max(medians[:-1])

    return measure


if __name__ == "__main__":
    print(json.dumps(main()))
