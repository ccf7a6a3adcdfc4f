"""How far GRPO gets beyond imitation: curves and samples of `docs/results.md`.

    python -m bench.rlhf_learning addition                       # 5 seeds, one after the other
    python -m bench.rlhf_learning addition --first-seed 5        # others than settings were chosen on
    python -m bench.rlhf_learning addition --reward random       # a reward that knows nothing
    python -m bench.rlhf_learning addition --reward model        # a reward model of the start's pairs
    python -m bench.rlhf_learning sorting --seeds 1 --scale 0.1  # a tenth of the steps, to try it

Each seed first imitates right answers until `start` of the held-out problems (greedily) are right, and goes
on from there by rewards alone. `runs/rlhf/TASK-REWARD.json` has the return on 512 held-out problems at the
start and at the end, seconds of work of all cores, and what was asked of it; of a reward model, also the
share of held-out pairs that it ranks right. Started again, it goes on with the seeds that are missing.
"""

import argparse
import dataclasses
import json
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import algos
import envs
import fdg

RUNS = Path("runs/rlhf")
EPISODES = 512


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One task.

    Attributes:
      env: with its parameters.
      start: the share of right answers at which imitation ends.
      sft, grpo: hyperparameters.
      judge: those of a reward model.
      at_least: what is asked of the return at the end; or of its ratio to that at the start.
    """

    env: str
    start: float
    sft: dict[str, Any]
    grpo: dict[str, Any]
    at_least: float
    as_ratio: bool = False
    judge: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_JUDGE))


_NETWORK = {"hidden_size": 96, "num_layers": 3, "num_heads": 4}
_SMALL = {"hidden_size": 64, "num_layers": 2}
_SFT = {"num_prompts": 128, "learning_rate": 1e-3, "warmup": 20}
_GRPO = {
    "num_prompts": 32, "group_size": 8, "variant": "dr_grpo", "learning_rate": 3e-4, "warmup": 5,
    "entropy_coefficient": 0.01,
}  # fmt: skip
_JUDGE = {"num_prompts": 64, "group_size": 4, "learning_rate": 1e-3, "warmup": 20, "total_steps": 51_200}

EXPERIMENTS = {
    # Cooler than what it is drawn at, it is right ten times as often: at 1.0 the start is right in 3 of 100.
    "sorting": Experiment(
        "text:sorting?max_response=10",
        0.3,
        {**_SFT, **_SMALL, "learning_rate": 2e-3, "total_steps": 256_000},
        {
            **_GRPO,
            **_SMALL,
            "variant": "grpo",
            "num_prompts": 64,
            "num_minibatches": 4,
            "temperature": 0.8,
            "kl_coefficient": 0.03,
            "entropy_coefficient": 0.02,
            "clip_high": 0.28,
            "learning_rate": 7e-4,
            "warmup": 20,
            "total_steps": 512_000,
        },
        0.95,
    ),
    "addition": Experiment(
        "text:addition", 0.3, {**_SFT, "total_steps": 640_000}, {**_GRPO, "total_steps": 384_000}, 0.98
    ),
    "countdown": Experiment(
        "text:countdown", 0.2, {**_SFT, "total_steps": 640_000}, {**_GRPO, "total_steps": 384_000}, 2.0, True
    ),
    # Small enough to see it learn within a minute.
    "small": Experiment(
        "text:addition?digits=1",
        0.45,
        {**_SFT, "num_prompts": 64, "total_steps": 64_000, "hidden_size": 48, "num_layers": 2},
        {**_GRPO, "total_steps": 64_000, "hidden_size": 48, "num_layers": 2},
        0.95,
    ),
}


def at_random(prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
    """A reward that has nothing to do with the answer: a bit of a hash of the text."""
    texts = (f"{prompt}|{response}" for prompt, response in zip(prompts, responses, strict=True))
    return [float(zlib.crc32(text.encode()) >> 7 & 1) for text in texts]


def one_seed(name: str, seed: int, reward: str, scale: float) -> dict[str, Any]:
    """Trains one seed, and says what its held-out returns are before and after."""
    chosen, begun = EXPERIMENTS[name], time.process_time()
    task, parameters = envs.parse(chosen.env)
    env = envs.make(task, **parameters)
    folder = RUNS / f"{name}-{reward}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    common: dict[str, Any] = {"seed": seed, "devices": 1, "eval_episodes": EPISODES}
    imitation = fdg.fit(
        algos.SFT(env=env, **{**_NETWORK, **_scaled(chosen.sft, scale)}),
        out=folder / "sft",
        eval_every=10,
        stop_at=chosen.start,
        **common,
    )
    common["start_from"] = folder / "sft"
    said, judged, judge = {}, env, None
    if reward == "random":
        judged = env.with_reward(at_random)
    if reward == "model":
        fields = {**_NETWORK, **_network_of(chosen.sft), **_scaled(chosen.judge, scale)}
        judging = fdg.fit(algos.RewardModel(env=env, **fields), out=folder / "judge", **common)
        said["pairs_ranked_right"] = judging.evaluate(EPISODES).mean
        judge = str(judging.export(folder / "reward"))
    learned = fdg.fit(
        algos.GRPO(env=judged, reward_model=judge, **{**_NETWORK, **_scaled(chosen.grpo, scale)}),
        out=folder / "grpo",
        eval_every=50 if reward != "random" else None,
        **common,
    )
    said |= {"start": imitation.evaluate(EPISODES).mean}
    said["end"] = learned.evaluate(EPISODES, env=env).mean  # judged by the task, whatever it learned from
    return {"seed": seed, **said, "cpu_s": round(time.process_time() - begun)}


def _network_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in _NETWORK}


def _scaled(fields: dict[str, Any], scale: float) -> dict[str, Any]:
    return {**fields, "total_steps": int(fields["total_steps"] * scale)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=EXPERIMENTS)
    parser.add_argument("--reward", choices=("task", "random", "model"), default="task")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of steps")
    given = parser.parse_args()
    chosen = EXPERIMENTS[given.task]
    asked = f"{'ratio' if chosen.as_ratio else 'return'} >= {chosen.at_least:g}"
    said = {"task": chosen.env, "reward": given.reward, "scale": given.scale, "asked": asked}
    path = RUNS / f"{given.task}-{given.reward}{'' if given.scale == 1 else f'-{given.scale:g}'}.json"
    rows = json.loads(path.read_text())["seeds"] if path.exists() else []
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        if any(row["seed"] == seed for row in rows):
            continue
        rows.append(one_seed(given.task, seed, given.reward, given.scale))
        print(rows[-1], flush=True)
        path.write_text(json.dumps({**said, "seeds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
