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
import jax.numpy as jnp

import algos
import envs
import fdg
import policies

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
    rounds = []
    for _ in range(ROUNDS):
        apart, parts = runs[0].seconds()
        together, _ = runs[1].seconds()
        rounds.append({"synchronous": apart, "staleness_1": together, **parts,
                       "over_longer": together / max(parts.values()),
                       "synchronous_over_sum": apart / sum(parts.values()),
                       "machine": machine()})  # fmt: skip
    medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    ratios = sorted(row["over_longer"] for row in rounds)
    return {**medians, "over_longer_middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]}


class _Run:
    def __init__(self, algorithm, policy, devices):
        self.engine = fdg.compile(algorithm, policy, devices)
        self.state, metrics = self.engine.run(self.engine.init(0), ITERATIONS)
        jax.block_until_ready(metrics)

    def seconds(self):
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

    def seconds(programs):
        arguments = [jax.tree.map(_filled, program.arguments) for program in programs]
        jax.block_until_ready(arguments)
        begun = time.perf_counter()
        jax.block_until_ready([p.compiled(*a) for p, a in zip(programs, arguments, strict=True)])
        return time.perf_counter() - begun

    def measure():
        medians = [
            statistics.median(seconds(programs) for _ in range(ITERATIONS // 2))
            for programs in (*([part] for part in parts), parts)
        ]
        return medians[-1] / max(medians[:-1])

    return measure


def _filled(shape):
    """An array of ones, or keys, of a shape with sharding."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        key = jax.random.key(0)
        return jax.device_put(jax.random.split(key, shape.shape) if shape.shape else key, shape.sharding)
    return jax.device_put(jnp.ones(shape.shape, shape.dtype), shape.sharding)


if __name__ == "__main__":
    print(json.dumps(main()))
