"""Measures how much GRPO improves on imitation: curves and shares of solved problems in `docs/results.md`.

    python -m bench.rlhf_learning addition                       # 5 seeds, one after the other
    python -m bench.rlhf_learning addition --first-seed 5        # seeds on which no setting was chosen
    python -m bench.rlhf_learning addition --reward random       # a reward that ignores the answer
    python -m bench.rlhf_learning sorting --seeds 1 --scale 0.1  # a tenth of the steps, to try it

Settings are the presets of `--algo sft` and `--algo grpo` on these tasks (`algos/presets/language.py`). Each
seed first imitates right answers until it solves the share `start` of held-out problems greedily; then GRPO
learns from rewards alone. `runs/rlhf/TASK-REWARD.json` has the shares of 512 held-out problems solved at the
start and at the end, greedily and by sampling, CPU seconds with compilation, and the target.
`runs/rlhf/TASK-REWARD.png` has the curves. A second start continues with the missing seeds.
"""

import dataclasses
import json
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import algos
import fdg
from bench.harness import environment, parser
from fdg.training.curves import compare

RUNS = Path("runs/rlhf")
EPISODES = 512


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One task.

    Attributes:
      env: the environment, with its parameters.
      start: the share of solved problems at which imitation ends.
      every: iterations between evaluations in imitation.
      sft, grpo: settings that differ from the presets.
      at_least: target of the share of solved problems at the end.
      as_ratio: whether `at_least` is a ratio to the share at the start.
    """

    env: str
    start: float
    every: int
    sft: dict[str, Any]
    grpo: dict[str, Any]
    at_least: float
    as_ratio: bool = False


def _addition(options: str) -> Experiment:
    return Experiment(f"text:addition?{options}max_response=4", 0.25, 5, {"total_steps": 128_000}, {}, 0.98)


EXPERIMENTS = {
    "sorting": Experiment(
        "text:sorting?max_response=10", 0.25, 3, {"total_steps": 25_600}, {"total_steps": 102_400}, 0.95
    ),
    "addition": _addition(""),
    "addition-of-two-digits": _addition("smallest=10&"),
    "countdown": Experiment("text:countdown", 0.2, 10, {"total_steps": 64_000}, {}, 2.0, as_ratio=True),
}


def random_reward(prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
    """A reward that ignores the answer: a bit of a hash of prompt and response."""
    texts = (f"{prompt}|{response}" for prompt, response in zip(prompts, responses, strict=True))
    return [float(zlib.crc32(text.encode()) >> 7 & 1) for text in texts]


def train_seed(name: str, seed: int, reward: str, scale: float) -> dict[str, Any]:
    """Trains one seed; returns its shares of solved held-out problems before and after GRPO."""
    experiment, begun = EXPERIMENTS[name], time.process_time()
    env = environment(experiment.env)
    folder = _folder(name, seed, reward)
    shutil.rmtree(folder, ignore_errors=True)
    common: dict[str, Any] = {"seed": seed, "devices": 1, "eval_episodes": EPISODES}
    imitation = imitate(experiment, env, scale, out=folder / "sft", **common)
    reward_env = env.with_reward(random_reward) if reward == "random" else env
    grpo = make_scaled("grpo", reward_env, experiment.grpo, scale)
    grpo_run = fdg.fit(grpo, out=folder / "grpo", start_from=folder / "sft", **common)
    row = {
        f"{when}{'' if greedy else '_sampled'}": _solved_share(run, env, greedy)
        for when, run in (("start", imitation), ("end", grpo_run))
        for greedy in (True, False)
    }
    return {"seed": seed, **row, "cpu_s": round(time.process_time() - begun)}


def imitate(experiment: Experiment, env: Any, scale: float, **common: Any) -> fdg.Run:
    """Trains by imitation until the share `start` is solved, or for all `total_steps`.

    The target return is raised step by step, because a return also contains rewards of partly right answers.
    """
    learner = make_scaled("sft", env, experiment.sft, scale)
    target_return = experiment.start
    while True:
        run = fdg.fit(learner, eval_every=experiment.every, stop_at=target_return, resume=True, **common)
        missing_share = experiment.start - _solved_share(run, env, greedy=True)
        if missing_share <= 0 or run.iteration * learner.steps_per_iteration >= learner.total_steps:
            return run
        target_return += missing_share


def _solved_share(run: fdg.Run, env: Any, greedy: bool) -> float:
    """The share of solved held-out problems, without partial rewards."""
    returns = run.evaluate(EPISODES, env=env, greedy=greedy).returns
    assert returns is not None
    return float((returns >= 1).mean())


def _folder(name: str, seed: int, reward: str) -> Path:
    return RUNS / f"{name}-{reward}-{seed}"


def make_scaled(algo: str, env: Any, fields: dict[str, Any], scale: float) -> Any:
    """The algorithm with its number of steps multiplied by `scale`."""
    learner = algos.make(algo, env, **fields)
    return dataclasses.replace(learner, total_steps=int(learner.total_steps * scale))


def main() -> None:
    command = parser("bench.rlhf_learning", __doc__)
    command.add_argument("task", choices=EXPERIMENTS)
    command.add_argument("--reward", choices=("task", "random"), default="task")
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--scale", type=float, default=1.0, help="factor for all numbers of steps")
    args = command.parse_args()
    experiment = EXPERIMENTS[args.task]
    target = f"{'ratio to the start' if experiment.as_ratio else 'share'} >= {experiment.at_least:g}"
    settings = {"task": experiment.env, "reward": args.reward, "scale": args.scale, "target": target}
    fdg.keep_programs()  # so that later seeds and processes do not compile again
    name = f"{args.task}-{args.reward}{'' if args.scale == 1 else f'-{args.scale:g}'}"
    path = RUNS / f"{name}.json"
    rows = json.loads(path.read_text())["seeds"] if path.exists() else []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        if all(row["seed"] != seed for row in rows):
            rows.append(train_seed(args.task, seed, args.reward, args.scale))
            print(rows[-1], flush=True)
            path.write_text(json.dumps({**settings, "seeds": rows}, indent=1) + "\n")
    if args.reward == "task":  # with a random reward, training does not record `reward_correct`
        folders = [_folder(args.task, row["seed"], args.reward) / "grpo" for row in rows]
        figure, _ = compare([folder for folder in folders if folder.exists()], metric="reward_correct")
        figure.savefig(RUNS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
