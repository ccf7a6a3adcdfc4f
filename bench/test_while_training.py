"""What evaluation, metrics, TensorBoard and checkpoints cost a run: whole runs, one after the other in pairs.

make bench ARGS="-k while_training -s"
"""

import functools

import algos
import envs
import fdg
from bench.harness import Spread, in_turns

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

    def trained(number, name):
        out = tmp_path / f"{name}-{number}"
        run = fdg.fit(algorithm, out=out, seed=number, progress=False, eval_episodes=0, **settings[name])
        return run.summary["wall_s"]

    seconds = in_turns({name: functools.partial(trained, name=name) for name in settings}, PAIRS)
    benchmark.pedantic(lambda: None, rounds=1)
    ratio = Spread.ratio(seconds["on"], seconds["off"])
    medians = {f"{name}_seconds": Spread.of(each).median for name, each in seconds.items()}
    figures = {**medians, **ratio.figures, "at_most": 1 + AT_MOST}
    benchmark.extra_info.update(figures)
    record("evaluation, metrics, TensorBoard and checkpoints while training", figures)
    print(f"\nall on takes {ratio:.3f} of the time of all off")
    assert ratio.median <= 1 + AT_MOST
