"""What evaluation, metrics, TensorBoard and checkpoints cost a run: whole runs, one after the other in pairs.

make bench ARGS="-k while_training -s"
"""

import statistics

import algos
import envs
import fdg
from bench.peers.alternate import middle_half

PAIRS, STEPS = 5, 5_000_000  # some ten seconds a run
AT_MOST = 0.05


def test_while_training_cost(benchmark, record, tmp_path):
    """Seconds of training, all on (ten evaluations, checkpoints by default) against all off; one process."""
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=64, total_steps=STEPS)
    every = algorithm.num_iterations // 10
    settings = {
        "off": {"checkpoint_every": algorithm.num_iterations},
        "on": {"eval_every": every, "tensorboard": True},
    }
    seconds = {name: [] for name in settings}
    for pair in range(PAIRS + 1):
        order = list(settings) if pair % 2 else list(reversed(settings))
        for name in order:
            out = tmp_path / f"{name}-{pair}"
            run = fdg.fit(algorithm, out=out, seed=pair, progress=False, eval_episodes=0, **settings[name])
            if pair:  # the first compiles
                seconds[name].append(run.summary["wall_s"])
    benchmark.pedantic(lambda: None, rounds=1)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    low, high = middle_half(ratios)
    figures = {
        "off_seconds": statistics.median(seconds["off"]),
        "on_seconds": statistics.median(seconds["on"]),
        "ratio": statistics.median(ratios),
        "ratio_middle_half": [low, high],
        "at_most": 1 + AT_MOST,
    }
    benchmark.extra_info.update(figures)
    record("evaluation, metrics, TensorBoard and checkpoints while training", figures)
    print(f"\nall on takes {figures['ratio']:.3f} ({low:.3f} to {high:.3f}) of the time of all off")
    assert figures["ratio"] <= 1 + AT_MOST
