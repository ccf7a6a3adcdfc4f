"""What other trainers reach at the same number of environment steps, seed by seed, each by its own settings.

    python -m bench.beside --list                                        # what there is
    python -m bench.beside overcooked --checkout build/jaxmarl --steps 1000000
    python -m bench.beside smax-ippo --checkout build/jaxmarl --seeds 3
    python -m bench.beside craftax-classic --checkout build/craftax_baselines
    python -m bench.beside pqn-Asterix --checkout build/purejaxql
    python -m bench.beside cartpole-balance                              # of Playground, by brax's trainer

Ours trains with default flags. Both act alike when they are judged: with drawn actions, or with the best ones
where the peer tests itself so. What a peer's return is an average of, its driver says
(`bench/peers/drivers/`); ours is that of 128 whole episodes after training. Environments of peers are made as
`python -m bench.peers` makes them.
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

RUNS = Path("runs/beside")


@dataclasses.dataclass(frozen=True)
class Beside:
    """A task that both are trained on.

    Attributes:
      algo, env: of ours, which has its preset.
      peer: as `PEERS` has it; its driver has the same name.
      config: of the driver; settings are those of the peer's own configuration files.
      steps: environment steps, unless the command line says other.
      judged: environment that ours is judged in, if it is not `env`.
      greedy: whether both are judged with the best actions.
    """

    algo: str
    env: str
    peer: str
    config: dict[str, Any]
    steps: int
    judged: str | None = None
    greedy: bool = False


_JAXMARL: dict[str, Any] = {
    "NUM_STEPS": 128,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "ANNEAL_LR": True,
}
_SMAX: dict[str, Any] = {
    **_JAXMARL,
    "NUM_ENVS": 128,
    "GRU_HIDDEN_DIM": 128,
    "FC_DIM_SIZE": 128,
    "SCALE_CLIP_EPS": False,
    "MAX_GRAD_NORM": 0.25,
    "ACTIVATION": "relu",
    "ENV_NAME": "HeuristicEnemySMAX",
    "MAP_NAME": "3m",
    "ENV_KWARGS": {"see_enemy_actions": True, "walls_cause_death": True, "attack_mode": "closest"},
}
_OVERCOOKED: dict[str, Any] = {
    **_JAXMARL,
    "LR": 2.5e-4,
    "NUM_ENVS": 16,
    "CLIP_EPS": 0.2,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "overcooked",
    "ENV_KWARGS": {"layout": "cramped_room"},
}
_CRAFTAX: dict[str, Any] = {
    "ENV_NAME": "Craftax-Classic-Symbolic-v1",
    "NUM_ENVS": 1024,
    "NUM_STEPS": 64,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 8,
    "LR": 2e-4,
    "ANNEAL_LR": True,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.8,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 1.0,
    "ACTIVATION": "tanh",
    "LAYER_SIZE": 512,
    "USE_OPTIMISTIC_RESETS": True,
    "OPTIMISTIC_RESET_RATIO": 16,
    "TRAIN_ICM": False,
    "USE_E3B": False,
    "EXPLORATION_UPDATE_EPOCHS": 4,
    "NUM_REPEATS": 1,
}
_PQN_MINATAR: dict[str, Any] = {
    "NUM_ENVS": 128,
    "NUM_STEPS": 32,
    "EPS_START": 1.0,
    "EPS_FINISH": 0.05,
    "EPS_DECAY": 0.1,
    "NUM_MINIBATCHES": 32,
    "NUM_EPOCHS": 2,
    "NORM_TYPE": "layer_norm",
    "LR": 5e-4,
    "MAX_GRAD_NORM": 10,
    "LR_LINEAR_DECAY": True,
    "GAMMA": 0.99,
    "LAMBDA": 0.65,
    "ENV_KWARGS": {},
    "TEST_DURING_TRAINING": True,
    "TEST_INTERVAL": 0.1,
    "TEST_NUM_ENVS": 128,
    "EPS_TEST": 0.0,
}
# Of its `brax_ppo_config`; what it does not set is as brax's trainer has it.
_PLAYGROUND: dict[str, Any] = {
    "reward_scaling": 10.0,
    "episode_length": 1000,
    "normalize_observations": True,
    "action_repeat": 1,
    "unroll_length": 30,
    "num_minibatches": 32,
    "num_updates_per_batch": 16,
    "discounting": 0.995,
    "learning_rate": 1e-3,
    "entropy_cost": 1e-2,
    "num_envs": 2048,
    "batch_size": 1024,
}


def _jaxmarl(script: str, settings: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"script": script, "config": {**settings, **changed}}


TASKS = {
    "overcooked": Beside(
        "ippo",
        "overcooked?layout=cramped_room",
        "jaxmarl",
        _jaxmarl("IPPO/ippo_ff_overcooked", _OVERCOOKED),
        1_000_000,
        # Rewards for the way to a soup help both in training, each in its own way; soups alone count.
        judged="overcooked?layout=cramped_room&shaping=0",
    ),
    "smax-ippo": Beside(
        "ippo",
        "HeuristicEnemySMAX?map=3m",
        "jaxmarl",
        _jaxmarl("IPPO/ippo_rnn_smax", _SMAX, LR=4e-3, CLIP_EPS=0.05),
        2_000_000,
    ),
    "smax-mappo": Beside(
        "mappo",
        "HeuristicEnemySMAX?map=3m",
        "jaxmarl",
        _jaxmarl("MAPPO/mappo_rnn_smax", _SMAX, LR=2e-3, CLIP_EPS=0.2, ENT_COEF=0.0, OBS_WITH_AGENT_ID=True),
        2_000_000,
    ),
    "craftax-classic": Beside(
        "ppo", "Craftax-Classic-Symbolic-v1", "craftax_baselines", {"config": _CRAFTAX}, 5_000_000
    ),
    **{
        f"pqn-{game}": Beside(
            "pqn",
            f"{game}-MinAtar",
            "purejaxql",
            {"script": "pqn_minatar", "config": {**_PQN_MINATAR, "ENV_NAME": f"{game}-MinAtar"}},
            10_000_000,
            greedy=True,
        )
        for game in ("Asterix", "Breakout", "Freeway", "SpaceInvaders")
    },
    **{
        name: Beside(
            "ppo",
            f"playground:{task}",
            "playground",
            {"env": task, "train": {**_PLAYGROUND, "discounting": discount}},
            2_000_000,
        )
        for name, task, discount in (
            ("cartpole-balance", "CartpoleBalance", 0.995),
            ("ball-in-cup", "BallInCup", 0.95),
        )
    },
}


def theirs(task: Beside, checkout: Path | None, steps: int, seeds: list[int]) -> list[float]:
    """Returns of the peer, by seed."""
    config = {**task.config, **({"checkout": str(checkout)} if checkout else {})}
    if task.peer == "playground":
        config["steps"] = steps
    else:
        settings = {**task.config["config"], "SEED": 0, "TOTAL_TIMESTEPS": steps}
        if task.judged is not None:  # rewards for the way there fade over half of the run
            settings["REW_SHAPING_HORIZON"] = steps / 2
        if task.peer == "purejaxql":
            settings["TOTAL_TIMESTEPS_DECAY"] = steps
        config["config"] = settings
    driver = Driver(PEERS[task.peer].python, task.peer, config)
    returns = []
    try:
        for seed in seeds:
            said = driver.round(seed)
            print(f"theirs, seed {seed}: {said['return']:.2f} in {said['seconds']:,.0f} s", flush=True)
            returns.append(said["return"])
    finally:
        driver.close()
    return returns


def ours(kept_as: str, task: Beside, steps: int, seeds: list[int], devices: int) -> list[float]:
    """Returns of ours, all seeds in one program."""
    out = RUNS / f"{kept_as}-{steps}-from-{seeds[0]}"
    if not (out / "summary.json").exists():
        words = ["-m", "fdg.train", "--algo", task.algo, "--env", task.env, "--total-steps", str(steps)]
        words += ["--num-seeds", str(len(seeds)), "--seed", str(seeds[0])]
        words += ["--devices", str(devices), "--out", str(out)]
        print("python", *words, flush=True)
        subprocess.run([sys.executable, *words], check=True)
    name, overrides = envs.parse(task.judged or task.env)
    played = fdg.load(out).evaluate(128, greedy=task.greedy, env=envs.make(name, **overrides))
    return [float(mean) for mean in played.means]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="?", choices=sorted(TASKS))
    parser.add_argument("--list", action="store_true", help="print the tasks and run nothing")
    parser.add_argument("--checkout", type=Path, help="of the peer, where it is on no registry")
    parser.add_argument("--steps", type=int, help="of each seed (the task's)")
    parser.add_argument("--seeds", type=int, default=2, help="how many (2)")
    parser.add_argument("--seed", type=int, default=100, help="the first (100)")
    parser.add_argument("--devices", type=int, default=1, help="of ours, over which seeds are spread (1)")
    parser.add_argument("--only", choices=("ours", "theirs"), help="train one of both")
    given = parser.parse_args()
    if given.task is None:
        for name, task in TASKS.items():
            peer = PEERS[task.peer]
            print(f"{name:20} {task.algo} on {task.env}, {task.steps:,} steps, beside {peer.source}")
        return
    task, seeds = TASKS[given.task], list(range(given.seed, given.seed + given.seeds))
    peer = PEERS[task.peer]
    if peer.is_checkout and given.checkout is None:
        parser.error(f"{given.task} takes --checkout PATH, of {peer.source}")
    steps = given.steps or task.steps
    found = {}
    if given.only != "theirs":
        found["ours"] = ours(given.task, task, steps, seeds, given.devices)
    if given.only != "ours":
        peer.install()
        found["theirs"] = theirs(task, given.checkout and given.checkout.resolve(), steps, seeds)
    for who, returns in found.items():
        listed = ", ".join(f"{value:.2f}" for value in returns)
        print(f"{who}: mean {np.mean(returns):.2f} ({listed}) after {steps:,} steps", flush=True)


if __name__ == "__main__":
    main()
