"""What a sweep of 3 x 16 agents takes, beside the runs of their own that it stands for.

make bench ARGS="-k sweep -s"            # 3 x 16 agents, a few of the separate runs
make bench ARGS="-k sweep -s --thorough" # all of the separate runs
"""

import time

import numpy as np
import pytest

import algos
import envs
import fdg

POINTS, SEEDS, STEPS = (1e-4, 3e-4, 1e-3), 16, 100_000
AT_MOST = 1 / 5
CLOSE = 1e-5


@pytest.mark.parametrize("each", [1, pytest.param(SEEDS, marks=pytest.mark.thorough)])
def test_sweep_cost(benchmark, record, tmp_path, each):
    """Seconds from call to run directory, compiling, training, evaluation and files included.

    Args:
      each: separate runs that are timed of each point; their mean stands for the others.
    """
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), total_steps=STEPS)
    swept_s, swept = _timed(
        lambda: fdg.sweep(
            algorithm, {"learning_rate": POINTS}, num_seeds=SEEDS, out=tmp_path / "sweep", progress=False
        )
    )
    seconds, differences = [], []
    for point, learning_rate in enumerate(POINTS):
        for seed in range(each):
            own = algos.PPO(env=algorithm.env, total_steps=STEPS, learning_rate=learning_rate)
            out = tmp_path / f"{point}-{seed}"
            alone_s, run = _timed(
                lambda own=own, seed=seed, out=out: fdg.fit(own, seed=seed, out=out, progress=False)
            )
            seconds.append(alone_s)
            first = run.metrics[0]
            together = swept.metrics[0]["episode_return_per_seed"][point * SEEDS + seed]
            differences.append(
                abs(together - first["episode_return"]) / max(1.0, abs(first["episode_return"]))
            )
    benchmark.pedantic(lambda: None, rounds=1)
    apart = float(np.mean(seconds)) * len(POINTS) * SEEDS
    figures = {
        "agents": len(POINTS) * SEEDS,
        "sweep_seconds": swept_s,
        "separate_seconds": apart,
        "separate_runs_timed": len(seconds),
        "ratio": swept_s / apart,
        "ratio_middle_half": [swept_s / apart] * 2,  # one measurement
        "at_most": AT_MOST,
    }
    benchmark.extra_info.update(figures)
    record("a sweep of 3 x 16 agents beside separate runs", figures)
    print(
        f"\n{figures['agents']} agents in {swept_s:.1f} s, apart {apart:.1f} s: {figures['ratio']:.3f} of it"
    )
    assert max(differences) <= CLOSE
    assert figures["ratio"] <= AT_MOST


def _timed(call):
    begun = time.perf_counter()
    found = call()
    return time.perf_counter() - begun, found
