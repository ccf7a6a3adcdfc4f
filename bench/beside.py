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

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import envs
import fdg
from bench import harness
from bench.peers.alternate import Driver
from bench.peers.peers import PEERS
from bench.peers.settings import CRAFTAX, PLAYGROUND, PPO, PQN, PQN_MINATAR, SMAX, settings
from bench.runs import train_seeds

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


def _jaxmarl(
    algo: str, env: str, script: str, steps: int, *changed: str, judged: str | None = None, **more: Any
):
    config = {"script": script, "config": settings(PPO, *changed, **more)}
    return Beside(algo, env, "jaxmarl", config, steps, judged)


def _smax(algo: str, changed: str) -> Beside:
    more = {"ENV_KWARGS": {"see_enemy_actions": True, "walls_cause_death": True, "attack_mode": "closest"}}
    script = f"{algo.upper()}/{algo}_rnn_smax"
    return _jaxmarl(algo, "HeuristicEnemySMAX?map=3m", script, 2_000_000, SMAX, changed, **more)


def _pqn(game: str) -> Beside:
    test = "TEST_DURING_TRAINING=True TEST_INTERVAL=0.1 TEST_NUM_ENVS=128 EPS_TEST=0.0"
    config = settings(PQN, PQN_MINATAR, test, ENV_KWARGS={}, ENV_NAME=game)
    return Beside(
        "pqn", game, "purejaxql", {"script": "pqn_minatar", "config": config}, 10_000_000, greedy=True
    )


def _playground(task: str, discount: float) -> Beside:
    train = settings(PLAYGROUND, discounting=discount)
    return Beside("ppo", f"playground:{task}", "playground", {"env": task, "train": train}, 2_000_000)


_CLASSIC = "Craftax-Classic-Symbolic-v1"
TASKS = {
    "overcooked": _jaxmarl(
        "ippo",
        "overcooked?layout=cramped_room",
        "IPPO/ippo_ff_overcooked",
        1_000_000,
        "NUM_ENVS=16 ENV_NAME=overcooked",
        # Rewards for the way to a soup help both in training, each in its own way; soups alone count.
        judged="overcooked?layout=cramped_room&shaping=0",
        ENV_KWARGS={"layout": "cramped_room"},
    ),
    "smax-ippo": _smax("ippo", "LR=4e-3 CLIP_EPS=0.05"),
    "smax-mappo": _smax("mappo", "LR=2e-3 CLIP_EPS=0.2 ENT_COEF=0.0 OBS_WITH_AGENT_ID=True"),
    "craftax-classic": Beside(
        "ppo", _CLASSIC, "craftax_baselines", {"config": settings(CRAFTAX, ENV_NAME=_CLASSIC)}, 5_000_000
    ),
    **{
        f"pqn-{game}": _pqn(f"{game}-MinAtar") for game in ("Asterix", "Breakout", "Freeway", "SpaceInvaders")
    },
    "cartpole-balance": _playground("CartpoleBalance", 0.995),
    "ball-in-cup": _playground("BallInCup", 0.95),
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
    returns = []
    with Driver(PEERS[task.peer].python, task.peer, config) as driver:
        for seed in seeds:
            said = driver.round(seed)
            print(f"theirs, seed {seed}: {said['return']:.2f} in {said['seconds']:,.0f} s", flush=True)
            returns.append(said["return"])
    return returns


def ours(kept_as: str, task: Beside, steps: int, seeds: list[int], devices: int) -> list[float]:
    """Returns of ours, all seeds in one program."""
    words = ["--algo", task.algo, "--env", task.env, "--total-steps", str(steps), "--devices", str(devices)]
    out = RUNS / f"{kept_as}-{steps}-from-{seeds[0]}"
    train_seeds(words, out, seeds[0], len(seeds), together=True)
    name, overrides = envs.parse(task.judged or task.env)
    played = fdg.load(out).evaluate(128, greedy=task.greedy, env=envs.make(name, **overrides))
    return [float(mean) for mean in played.means]


def main() -> None:
    """The command line."""
    parser = harness.parser("bench.beside", __doc__)
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
