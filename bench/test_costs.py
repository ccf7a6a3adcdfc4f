"""Measures what a run costs besides its steps (start, memory, evaluation, files), and large runs and sweeps.

make bench ARGS="-k test_costs -s"       # all of this file
make bench ARGS="-k sweep -s"            # 3 x 16 agents, compared with a few separate runs
make bench ARGS="-k sweep -s --thorough" # compared with all separate runs
make bench ARGS="-k while_training -s"   # whole runs of some ten seconds, in turns
"""

import functools
import os
import re
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

import algos
import envs
import fdg
from bench.harness import ROOT, Spread, in_turns
from bench.peers.alternate import ours, speeds

_PROGRESS = re.compile(r"\s*\d+% ")
_ROUNDS = 5  # timings of each side
_NOISE = 4 * 2**20  # bytes that a process may grow by without a leak


def test_costs_first_progress_line(benchmark, record, tmp_path):
    """Seconds from a process's start to its first line of progress, of a first run and of later ones."""
    first_seconds = _seconds_to_progress(tmp_path, "first")
    later_seconds = [_seconds_to_progress(tmp_path, str(i)) for i in range(3)]
    benchmark.pedantic(lambda: None, rounds=1)  # timed above, because the process runs beyond the first line
    figures = {
        "first_seconds": first_seconds,
        "again_seconds": statistics.median(later_seconds),
        "at_most": 4.0,
    }
    benchmark.extra_info.update(figures)
    record("first progress line", figures)
    print(
        f"\nfirst progress line after {first_seconds:.1f} s; if it ran before,"
        f" after {figures['again_seconds']:.1f} s"
    )


def _seconds_to_progress(directory, name):
    """Seconds to the first line of progress of a run with defaults; its program cache is in the directory."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fdg.train", "--seed", "1", "--out", str(directory / name)],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(directory / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if _PROGRESS.match(line):
                return time.perf_counter() - begun
        raise AssertionError(f"the run ended with status {process.wait()}, without a line of progress")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_costs_memory_over_a_thousand_iterations(benchmark, record):
    """Growth of a process's peak memory between 100 iterations and 1,100."""
    with ours("--total-steps 51200", keeps_state=True) as driver:
        driver.round(0)
        before = driver.round(1)["peak_bytes"]
        results = []
        benchmark.pedantic(lambda: results.append(driver.round(2)), rounds=10, iterations=1)
    growth = results[-1]["peak_bytes"] - before
    figures = {"before_bytes": before, "growth_bytes": growth, "at_most": _NOISE}
    record("memory over 1,000 iterations", figures)
    print(
        f"\npeak memory {before / 2**20:,.0f} MiB, and {growth / 2**20:+,.1f} MiB after 1,000 more iterations"
    )
    assert growth <= _NOISE


def test_costs_step_of_many_environments(benchmark, record):
    """Seconds per step with 16,384 environments, relative to 1,024 environments."""
    many_flags, few_flags = "--num-envs 16384 --total-steps 2097152", "--num-envs 1024 --total-steps 1048576"
    _record_ratio(
        "a step of 16,384 environments by one of 1,024", many_flags, few_flags, 1.0, benchmark, record
    )


def test_costs_agent_of_many_seeds(benchmark, record):
    """Seconds per agent of 256 agents in one program, relative to a single agent."""
    many_flags, single_flags = "--num-seeds 256 --total-steps 10240", "--total-steps 102400"
    _record_ratio("an agent of 256 by one alone", many_flags, single_flags, 1 / 20, benchmark, record)


def _record_ratio(name, flags, reference_flags, at_most, benchmark, record):
    """Records the seconds per step with `flags`, relative to those with `reference_flags`."""
    with ours(flags) as driver, ours(reference_flags) as other:
        rounds = in_turns({"flags": driver.round, "reference": other.round}, _ROUNDS)
    benchmark.pedantic(lambda: None, rounds=1)
    ratio = Spread.ratio(speeds(rounds["reference"]), speeds(rounds["flags"]))
    record(name, {"flags": flags, "of_flags": reference_flags, "at_most": at_most, **ratio.figures})
    print(f"\n{name}: {ratio:.3f} of at most {at_most:g}")


_POINTS, _SEEDS, _STEPS = (1e-4, 3e-4, 1e-3), 16, 100_000  # learning rates; seeds of each; steps of an agent
_MAX_SWEEP_RATIO = 1 / 5


@pytest.mark.parametrize("runs_per_point", [1, pytest.param(_SEEDS, marks=pytest.mark.thorough)])
def test_sweep_cost(benchmark, record, tmp_path, runs_per_point):
    """Seconds of a sweep, with compilation, evaluation and files, relative to separate runs.

    The first returns of the sweep are those of the separate runs.

    Args:
      runs_per_point: number of separate runs of each point; their mean stands for all seeds.
    """
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), total_steps=_STEPS)
    swept_s, sweep_run = _timed(
        lambda: fdg.sweep(
            algorithm, {"learning_rate": _POINTS}, num_seeds=_SEEDS, out=tmp_path / "sweep", progress=False
        )
    )
    seconds, differences = [], []
    for point, learning_rate in enumerate(_POINTS):
        for seed in range(runs_per_point):
            single = algos.PPO(env=algorithm.env, total_steps=_STEPS, learning_rate=learning_rate)
            out = tmp_path / f"{point}-{seed}"
            alone_s, run = _timed(
                lambda single=single, seed=seed, out=out: fdg.fit(single, seed=seed, out=out, progress=False)
            )
            seconds.append(alone_s)
            first_metrics = run.metrics[0]
            swept_return = sweep_run.metrics[0]["episode_return_per_seed"][point * _SEEDS + seed]
            differences.append(
                abs(swept_return - first_metrics["episode_return"])
                / max(1.0, abs(first_metrics["episode_return"]))
            )
    benchmark.pedantic(lambda: None, rounds=1)
    separate_seconds = float(np.mean(seconds)) * len(_POINTS) * _SEEDS
    figures = {
        "agents": len(_POINTS) * _SEEDS,
        "sweep_seconds": swept_s,
        "separate_seconds": separate_seconds,
        "separate_runs_timed": len(seconds),
        "ratio": swept_s / separate_seconds,
        "ratio_middle_half": [swept_s / separate_seconds] * 2,  # one measurement
        "at_most": _MAX_SWEEP_RATIO,
    }
    benchmark.extra_info.update(figures)
    record("a sweep of 3 x 16 agents beside separate runs", figures)
    print(
        f"\n{figures['agents']} agents in {swept_s:.1f} s, separately {separate_seconds:.1f} s:"
        f" ratio {figures['ratio']:.3f}"
    )
    assert max(differences) <= 1e-5
    assert figures["ratio"] <= _MAX_SWEEP_RATIO


def _timed(call):
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


_MAX_OVERHEAD = 0.05  # of the time without evaluations and files


def test_while_training_cost(benchmark, record, tmp_path):
    """Seconds of training with ten evaluations, default checkpoints and TensorBoard, relative to none."""
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=64, total_steps=5_000_000)
    every = algorithm.num_iterations // 10
    settings = {
        "off": {"checkpoint_every": algorithm.num_iterations},
        "on": {"eval_every": every, "tensorboard": True},
    }

    def train_once(number, name):
        out = tmp_path / f"{name}-{number}"
        run = fdg.fit(algorithm, out=out, seed=number, progress=False, eval_episodes=0, **settings[name])
        return run.summary["wall_s"]

    seconds = in_turns({name: functools.partial(train_once, name=name) for name in settings}, _ROUNDS)
    benchmark.pedantic(lambda: None, rounds=1)
    ratio = Spread.ratio(seconds["on"], seconds["off"])
    medians = {f"{name}_seconds": Spread.of(times).median for name, times in seconds.items()}
    figures = {**medians, **ratio.figures, "at_most": 1 + _MAX_OVERHEAD}
    benchmark.extra_info.update(figures)
    record("evaluation, metrics, TensorBoard and checkpoints while training", figures)
    print(f"\nall on takes {ratio:.3f} of the time of all off")
    assert ratio.median <= 1 + _MAX_OVERHEAD
