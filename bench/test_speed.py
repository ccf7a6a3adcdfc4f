"""Measures training speed by size, seeds, devices, policy, algorithm and source of environments.

Each case is a command line of `python -m fdg.train`, which runs in a new process (by the driver `ours`), so
that cases share no devices and no memory. A few cases run by default; `--thorough` runs all:

    make bench ARGS="-k speed"
    make bench ARGS="-k 'speed and policy' --thorough --record"
"""

import dataclasses
import statistics

import pytest

from bench.peers.alternate import ours, speeds

ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line: the property that varies, its value, all flags, and whether it runs by default."""

    group: str
    value: str | int
    flags: str
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.group}-{self.value}"


_STEPS = 128  # steps of PPO's rollout


def _cases():
    for size in (4, 16, 64, 256, 1024, 4096, 16_384):
        steps = max(262_144, size * _STEPS)
        yield Case("environments", size, f"--num-envs {size} --total-steps {steps}", size in (4, 64, 1024))
    for seeds in (1, 4, 16, 64, 256):
        yield Case("seeds", seeds, f"--num-seeds {seeds} --total-steps 10240", seeds in (1, 16))
    for devices in (1, 2):
        yield Case("devices", devices, f"--devices {devices} --num-envs 1024 --total-steps 262144", True)
    for policy in ("gpu_only", "multi_learner", "single_learner_coarse", "single_learner_fine",
                   "environments", "central"):  # fmt: skip
        yield Case("policy", policy, f"--policy {policy} --devices 2 --num-envs 64 --total-steps 32768")
    for algo, flags in {
        "ppo": "--total-steps 131072",
        "recurrent_ppo": "--total-steps 16384",
        "a2c": "--total-steps 131072",
        "a3c": "--total-steps 131072",
        "impala": "--total-steps 131072",
        "dqn": "--total-steps 65536",
        "pqn": "--total-steps 131072",
        "sac": "--env Pendulum-v1 --total-steps 10240",
        "ippo": "--env MPE_simple_spread_v3 --total-steps 65536",
        "mappo": "--env MPE_simple_spread_v3 --total-steps 8192",
    }.items():
        yield Case("algorithm", algo, f"--algo {algo} {flags}", algo in ("dqn", "sac"))
    for env, steps in {
        "Breakout-MinAtar": 131_072,
        "Asterix-MinAtar": 20_480,
        "Pendulum-v1": 65_536,
        "brax:inverted_pendulum": 65_536,
        "envpool:HalfCheetah-v4": 8_192,
    }.items():
        yield Case("env", env, f"--env {env} --total-steps {steps}", env == "Breakout-MinAtar")


CASES = tuple(_cases())


@pytest.mark.parametrize(
    "case", [pytest.param(x, id=x.name, marks=() if x.quick else pytest.mark.thorough) for x in CASES]
)
def test_speed(case, benchmark, record):
    with ours(case.flags) as driver:
        results = []
        benchmark.pedantic(
            lambda: results.append(driver.round(len(results))), rounds=ROUNDS, warmup_rounds=1, iterations=1
        )
        steps_per_s = statistics.median(speeds(results[1:]))
        figures = {
            "steps_per_s": steps_per_s,
            "compile_seconds": driver.facts["compile_seconds"],
            "start_seconds": driver.facts["start_seconds"],
            "devices": driver.facts["devices"],
            "peak_bytes": results[-1]["peak_bytes"],
        }
    benchmark.extra_info.update(figures)
    record(case.name, {**dataclasses.asdict(case), **figures})
    print(
        f"\n{case.name}: {steps_per_s:,.0f} steps/s on {figures['devices']} device(s), compiled in "
        f"{figures['compile_seconds']:.1f} s, {figures['peak_bytes'] / 2**20:,.0f} MiB"
    )
