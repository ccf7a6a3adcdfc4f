"""What JaxMARL's own baselines reach at the same number of environment steps, seed by seed.

    python -m bench.beside_jaxmarl --checkout PATH                             # what there is
    python -m bench.beside_jaxmarl --checkout PATH overcooked --steps 1000000
    python -m bench.beside_jaxmarl --checkout PATH smax --steps 500000 --seeds 3

Both act with drawn actions. Theirs is the mean over the last eight updates of the episodes that ended in
them; ours is the return of 128 episodes after training. Overcooked is trained with rewards for the way to a
soup, each in its own way, and judged by soups alone. Environments of peers: `python -m bench.peers`.
"""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import envs
import fdg
from bench.peers.alternate import Driver
from bench.peers.peers import PEERS

RUNS = Path("runs/beside_jaxmarl")

_COMMON: dict[str, Any] = {
    "NUM_STEPS": 128,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "ANNEAL_LR": True,
}


@dataclasses.dataclass(frozen=True)
class Beside:
    """A task that both are trained on.

    Attributes:
      algo, env: of ours, which has its preset.
      judged: environment that ours is judged in.
      script, config: of theirs, as in the checkout's `baselines/*/config/`.
      horizon: whether rewards for the way there fade over half of the run.
    """

    algo: str
    env: str
    judged: str
    script: str
    config: dict[str, Any]
    horizon: bool = False


TASKS = {
    "overcooked": Beside(
        "ippo",
        "overcooked?layout=cramped_room",
        "overcooked?layout=cramped_room&shaping=0",
        "IPPO/ippo_ff_overcooked",
        {
            **_COMMON,
            "LR": 2.5e-4,
            "NUM_ENVS": 16,
            "CLIP_EPS": 0.2,
            "MAX_GRAD_NORM": 0.5,
            "ACTIVATION": "tanh",
            "ENV_NAME": "overcooked",
            "ENV_KWARGS": {"layout": "cramped_room"},
        },
        horizon=True,
    ),
    "smax": Beside(
        "ippo",
        "HeuristicEnemySMAX?map=3m",
        "HeuristicEnemySMAX?map=3m",
        "IPPO/ippo_rnn_smax",
        {
            **_COMMON,
            "LR": 4e-3,
            "NUM_ENVS": 128,
            "GRU_HIDDEN_DIM": 128,
            "FC_DIM_SIZE": 128,
            "CLIP_EPS": 0.05,
            "SCALE_CLIP_EPS": False,
            "MAX_GRAD_NORM": 0.25,
            "ACTIVATION": "relu",
            "ENV_NAME": "HeuristicEnemySMAX",
            "MAP_NAME": "3m",
            "ENV_KWARGS": {
                "see_enemy_actions": True,
                "walls_cause_death": True,
                "attack_mode": "closest",
            },
        },
    ),
}


def theirs(task: Beside, checkout: Path, steps: int, seeds: list[int]) -> list[float]:
    """Returns of JaxMARL's script, by seed."""
    config = {**task.config, "SEED": 0, "TOTAL_TIMESTEPS": steps}
    if task.horizon:
        config["REW_SHAPING_HORIZON"] = steps / 2
    driver = Driver(
        PEERS["jaxmarl"].python,
        "jaxmarl",
        {"checkout": str(checkout), "script": task.script, "config": config},
    )
    try:
        return [driver.round(seed)["return"] for seed in seeds]
    finally:
        driver.close()


def ours(kept_as: str, task: Beside, steps: int, seeds: list[int]) -> list[float]:
    """Returns of ours, all seeds in one program."""
    out = RUNS / f"{kept_as}-{steps}-from-{seeds[0]}"
    if not (out / "summary.json").exists():
        words = ["-m", "fdg.train", "--algo", task.algo, "--env", task.env, "--total-steps", str(steps)]
        words += [
            "--num-seeds",
            str(len(seeds)),
            "--seed",
            str(seeds[0]),
            "--devices",
            "1",
            "--out",
            str(out),
        ]
        print("python", *words, flush=True)
        subprocess.run([sys.executable, *words], check=True)
    name, overrides = envs.parse(task.judged)
    played = fdg.load(out).evaluate(128, greedy=False, env=envs.make(name, **overrides))
    return [float(mean) for mean in played.means]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="?", choices=sorted(TASKS))
    parser.add_argument("--checkout", type=Path, required=True, help="of github.com/FLAIROX/JaxMARL")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=100, help="the first")
    given = parser.parse_args()
    if given.task is None:
        for name, task in TASKS.items():
            print(f"{name}: {task.algo} on {task.env}, beside {task.script}")
        return
    task, seeds = TASKS[given.task], list(range(given.seed, given.seed + given.seeds))
    found = {
        "ours": ours(given.task, task, given.steps, seeds),
        "theirs": theirs(task, given.checkout.resolve(), given.steps, seeds),
    }
    for who, returns in found.items():
        listed = ", ".join(f"{value:.2f}" for value in returns)
        print(f"{who}: mean {np.mean(returns):.2f} ({listed}) after {given.steps:,} steps", flush=True)


if __name__ == "__main__":
    main()
