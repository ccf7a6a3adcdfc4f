"""Do actors and learners work at the same time under staleness? Two host devices, one thread each.

Measured in one process, in turns: an iteration without staleness (actor, then learner), and one with
`staleness=1`. Without it the two parts never overlap, so their busy times are what each takes alone. And
since two devices of one machine share its caches and memory, also what the machine itself can do: the same
two programs, each on its device, started at once on arrays that are there already, without an engine.

    python -m bench.overlap
"""

import json
import os
import statistics
import time

# Before JAX starts: as many threads as devices, and no operation on more than one.
os.environ["PJRT_NPROC"] = "2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax

import algos
import envs
import fdg
import policies
from bench.harness import Spread, in_turns, seconds, zeros_and_keys

ROUNDS, ITERATIONS = 7, 40  # long calls: at their ends one of the two has nothing to do


def main() -> dict:
    """Medians over the rounds; seconds an iteration."""
    fdg.host_devices(2)
    devices = jax.devices("cpu")
    algorithm = algos.PPO(
        env=envs.make("Acrobot-v1"), num_envs=256, num_steps=64, num_epochs=1, total_steps=10**9
    )
    runs = {k: _Run(algorithm, policies.SingleLearnerCoarse(staleness=k), devices) for k in (0, 1)}
    machine = _bare_programs(runs[1].engine)
    rounds = in_turns({**{k: one.seconds for k, one in runs.items()}, "machine": machine}, ROUNDS, warm_up=0)
    rows = []
    for (apart, parts), (together, _), alone in zip(*rounds.values(), strict=True):
        rows.append(
            {
                "synchronous": apart,
                "staleness_1": together,
                **parts,
                "over_longer": together / max(parts.values()),
                "synchronous_over_sum": apart / sum(parts.values()),
                "machine": alone,
            }
        )
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    middle = Spread.of(row["over_longer"] for row in rows)
    return {**medians, "over_longer_middle_half": [middle.low, middle.high]}


class _Run:
    def __init__(self, algorithm, policy, devices):
        self.engine = fdg.compile(algorithm, policy, devices)
        self.state, metrics = self.engine.run(self.engine.init(0), ITERATIONS)
        jax.block_until_ready(metrics)

    def seconds(self, _):
        """Of one iteration, and each group's share of it."""
        before, begun = self.engine.busy_seconds(), time.perf_counter()
        self.state, metrics = self.engine.run(self.state, ITERATIONS)
        jax.block_until_ready((self.state, metrics))
        wall = (time.perf_counter() - begun) / ITERATIONS
        after = self.engine.busy_seconds()
        return wall, {group: (after[group] - before[group]) / ITERATIONS for group in after}


def _bare_programs(engine):
    """How much longer the two parts take at once than the longer alone, without schedule or transfers."""
    parts = [program for program in engine.programs if program.fragments]

    def together(programs):
        arguments = [zeros_and_keys(program.arguments) for program in programs]
        return seconds(lambda: [p.compiled(*a) for p, a in zip(programs, arguments, strict=True)])

    def measure(_):
        medians = [
            statistics.median(together(programs) for _ in range(ITERATIONS // 2))
            for programs in (*([part] for part in parts), parts)
        ]
        return medians[-1] / max(medians[:-1])

    return measure


if __name__ == "__main__":
    print(json.dumps(main()))
