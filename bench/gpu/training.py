"""Measures training: steps per second, and seconds until a return is reached."""

import itertools
import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

import fdg
from bench.gpu import ceilings
from bench.gpu.measuring import Figures, Measurement, Settings
from bench.peers.drivers.ours import compile_job
from bench.peers.serve import Stopwatch

_ROUND_S = 0.5  # approximate seconds of a round of iterations; the clock is read after each round

# Flags of each environment, and the return at which it counts as solved (None: no such return).
TASKS: dict[str, tuple[str, float | None]] = {
    "CartPole-v1": ("--learning-rate 1e-3", 475.0),  # Gymnasium's threshold
    "Breakout-MinAtar": ("", 28.0),  # gymnax-blines' PPO
    "Craftax-Classic-Symbolic-v1": ("", None),
}
NUM_ENVS = (4096, 16384, 65536)
_STEPS = {"CartPole-v1": 32, "Breakout-MinAtar": 32, "Craftax-Classic-Symbolic-v1": 16}  # of a rollout


def flags_of(env: str, num_envs: int, total_steps: int = 200_000_000) -> list[str]:
    """Flags of training on one device, with minibatches of about 8,192 samples, at most 64 of them."""
    steps = _STEPS[env]
    minibatches = min(64, max(1, num_envs * steps // 8192))
    return [
        *("--env", env, *TASKS[env][0].split(), "--num-steps", str(steps), "--devices", "1"),
        *f"--num-envs {num_envs} --num-minibatches {minibatches} --total-steps {total_steps}".split(),
    ]


def machine_and_training(settings: Settings) -> list[Measurement]:
    """Measurements of the machine and its highest rates, then of training, with ever more environments."""
    result = ceilings.measurements(settings)
    for num_envs, env in itertools.product(settings.full_or_tiny(NUM_ENVS, (8,)), TASKS):
        if settings.tiny and env == "Craftax-Classic-Symbolic-v1":
            continue  # a minute of compiling
        measure = partial(
            measure_training, flags_of(env, num_envs, settings.full_or_tiny(200_000_000, 2048)), TASKS[env][1]
        )
        measure = partial(measure, seconds=settings.full_or_tiny(12.0, 1.0))
        row = f"PPO, {env}, {num_envs:,} environments"
        result.append(Measurement("Training", row, measure, seconds=30, limit=90))
    return result


def larger_tasks(settings: Settings) -> list[Measurement]:
    """Longer runs, with the presets of their environments."""
    tasks: list[tuple[str, str, float | None, float]] = [  # environment, flags, return to reach, seconds
        ("brax:ant", "--num-envs 4096 --total-steps 25000000", None, 240),
        ("Craftax-Symbolic-v1", "--num-envs 1024 --total-steps 100000000", None, 150),
        ("playground:CartpoleBalance", "--num-envs 2048 --total-steps 20000000", None, 90),
        ("playground:CheetahRun", "--num-envs 2048 --total-steps 60000000", None, 120),
        ("playground:WalkerWalk", "--num-envs 2048 --total-steps 60000000", None, 120),
    ]
    if settings.tiny:
        tasks = [
            ("CartPole-v1", "--num-envs 8 --num-steps 16 --num-minibatches 1 --total-steps 2048", 475, 1)
        ]
    return [
        Measurement(
            "Larger tasks",
            f"PPO, {env}",
            partial(
                measure_training, ["--env", env, *flags.split(), "--devices", "1"], target, seconds=seconds
            ),
            seconds=min(60, seconds),
            limit=seconds + 120,
        )
        for env, flags, target, seconds in tasks
    ]


def measure_training(flags: Sequence[str], solved_return: float | None, seconds: float) -> Figures:
    """Trains until all steps are done, time is up, or `solved_return` is reached and four rounds are timed.

    The return is the mean over the episodes that ended in an iteration. Seconds to solve start with the first
    iteration, without compilation. `curve` has seconds, steps and return of each round.
    """
    warnings.simplefilter("ignore", fdg.FdgWarning)
    with Stopwatch() as compilation:
        job, engine, state = compile_job(flags)
    num_done, total_seconds, rates, curve = 0, 0.0, [], []
    seconds_to_solve: float | None = None
    iterations = 1
    while (
        num_done < job.num_iterations
        and (not rates or total_seconds < seconds)
        and (seconds_to_solve is None or len(rates) < 4)
    ):
        iterations = min(iterations, job.num_iterations - num_done)
        begun = time.perf_counter()
        state, metrics = engine.run(state, iterations)
        jax.block_until_ready((state, metrics))
        round_seconds = time.perf_counter() - begun
        returns = np.asarray(metrics["episode_return"])
        if seconds_to_solve is None and solved_return is not None and (returns >= solved_return).any():
            seconds_to_solve = (
                total_seconds + round_seconds * (int(np.argmax(returns >= solved_return)) + 1) / iterations
            )
        num_done, total_seconds = num_done + iterations, total_seconds + round_seconds
        ended = returns[~np.isnan(returns)]
        mean_return = float(ended.mean()) if len(ended) else None
        curve.append((total_seconds, num_done * job.steps_per_iteration, mean_return))
        rates.append(iterations * job.steps_per_iteration / round_seconds)
        iterations = max(1, round(_ROUND_S / round_seconds * iterations))
    last = next((value for *_, value in reversed(curve) if value is not None), None)
    return {
        "steps/s": statistics.median(rates[1:] or rates),
        "compile s": compilation.seconds,
        "steps": num_done * job.steps_per_iteration,
        "s": total_seconds,
        "return": last,
        "solved at": solved_return,
        "s to solve": seconds_to_solve,
        **memory_of(engine),
        "flags": list(flags),
        "curve": curve,
    }


def memory_of(engine: fdg.Engine) -> Figures:
    """Memory per device of the largest group: the plan's estimate, and XLA's peak."""
    return {
        "estimated MiB": max(size for _, size in engine.plan.memory) / 2**20,
        "XLA's MiB": max(engine.memory().values()) / 2**20,
    }
