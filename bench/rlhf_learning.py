"""How far GRPO gets beyond imitation: curves and samples of `docs/results.md`.

    python -m bench.rlhf_learning addition                       # 5 seeds, one after the other
    python -m bench.rlhf_learning addition --first-seed 5        # others than settings were chosen on
    python -m bench.rlhf_learning addition --reward random       # a reward that knows nothing
    python -m bench.rlhf_learning sorting --seeds 1 --scale 0.1  # a tenth of the steps, to try it

Settings are those of `--algo sft` and `--algo grpo` on these tasks (`algos/presets/language.py`). Each seed
first imitates right answers until `start` of the held-out problems are right, with the most likely tokens,
and goes on from there by rewards alone. `runs/rlhf/TASK-REWARD.json` has the share of 512 held-out problems
that are right at the start and at the end, with the most likely tokens and with sampled ones, seconds of work
of all cores, compilation included, and the target. `runs/rlhf/TASK-REWARD.png` has the curves. Started again,
it continues with the seeds that are missing.
"""

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
from bench.harness import parser
from fdg.training.curves import compare

RUNS = Path("runs/rlhf")
EPISODES = 512


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One task.

    Attributes:
      env: with its parameters.
      start: the share of right answers at which imitation ends.
      every: iterations from one look at it to the next.
      sft, grpo: numbers of steps that are not those of the presets.
      at_least: target of the share of right answers at the end; or of its ratio to that at the start.
    """

    env: str
    start: float
    every: int
    sft: dict[str, Any]
    grpo: dict[str, Any]
    at_least: float
    as_ratio: bool = False


def _addition(more: str) -> Experiment:
    return Experiment(f"text:addition?{more}max_response=4", 0.25, 5, {"total_steps": 128_000}, {}, 0.98)


EXPERIMENTS = {
    "sorting": Experiment(
        "text:sorting?max_response=10", 0.25, 3, {"total_steps": 25_600}, {"total_steps": 102_400}, 0.95
    ),
    "addition": _addition(""),
    "addition-of-two-digits": _addition("smallest=10&"),
    "countdown": Experiment("text:countdown", 0.2, 10, {"total_steps": 64_000}, {}, 2.0, as_ratio=True),
}


def at_random(prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
    """A reward that has nothing to do with the answer: a bit of a hash of the text."""
    texts = (f"{prompt}|{response}" for prompt, response in zip(prompts, responses, strict=True))
    return [float(zlib.crc32(text.encode()) >> 7 & 1) for text in texts]


def one_seed(name: str, seed: int, reward: str, scale: float) -> dict[str, Any]:
    """Trains one seed, and says what share of held-out problems it has right before and after."""
    chosen, begun = EXPERIMENTS[name], time.process_time()
    task, parameters = envs.parse(chosen.env)
    env = envs.make(task, **parameters)
    folder = _folder(name, seed, reward)
    shutil.rmtree(folder, ignore_errors=True)
    common: dict[str, Any] = {"seed": seed, "devices": 1, "eval_episodes": EPISODES}
    imitation = imitate(chosen, env, scale, out=folder / "sft", **common)
    judged = env.with_reward(at_random) if reward == "random" else env
    grpo = made("grpo", judged, chosen.grpo, scale)
    learned = fdg.fit(grpo, out=folder / "grpo", start_from=folder / "sft", **common)
    row = {
        f"{when}{'' if greedy else '_sampled'}": _right(run, env, greedy)
        for when, run in (("start", imitation), ("end", learned))
        for greedy in (True, False)
    }
    return {"seed": seed, **row, "cpu_s": round(time.process_time() - begun)}


def imitate(chosen: Experiment, env: Any, scale: float, **common: Any) -> fdg.Run:
    """Imitation until the share of right answers is there; returns have what else is paid for in them too."""
    learner = made("sft", env, chosen.sft, scale)
    returned = chosen.start
    while True:
        run = fdg.fit(learner, eval_every=chosen.every, stop_at=returned, resume=True, **common)
        missing = chosen.start - _right(run, env, greedy=True)
        if missing <= 0 or run.iteration * learner.steps_per_iteration >= learner.total_steps:
            return run
        returned += missing


def _right(run: fdg.Run, env: Any, greedy: bool) -> float:
    """The share of held-out problems that it has right; what else a task pays for does not count."""
    returns = run.evaluate(EPISODES, env=env, greedy=greedy).returns
    assert returns is not None
    return float((returns >= 1).mean())


def _folder(name: str, seed: int, reward: str) -> Path:
    return RUNS / f"{name}-{reward}-{seed}"


def made(algo: str, env: Any, fields: dict[str, Any], scale: float) -> Any:
    learner = algos.make(algo, env, **fields)
    return dataclasses.replace(learner, total_steps=int(learner.total_steps * scale))


def main() -> None:
    """Trains the seeds that are missing."""
    command = parser("bench.rlhf_learning", __doc__)
    command.add_argument("task", choices=EXPERIMENTS)
    command.add_argument("--reward", choices=("task", "random"), default="task")
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--scale", type=float, default=1.0, help="of all numbers of steps")
    args = command.parse_args()
    chosen = EXPERIMENTS[args.task]
    target = f"{'ratio to the start' if chosen.as_ratio else 'share'} >= {chosen.at_least:g}"
    settings = {"task": chosen.env, "reward": args.reward, "scale": args.scale, "target": target}
    fdg.keep_programs()  # the second seed compiles nothing, in this process or another
    kept = f"{args.task}-{args.reward}{'' if args.scale == 1 else f'-{args.scale:g}'}"
    path = RUNS / f"{kept}.json"
    rows = json.loads(path.read_text())["seeds"] if path.exists() else []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        if all(row["seed"] != seed for row in rows):
            rows.append(one_seed(args.task, seed, args.reward, args.scale))
            print(rows[-1], flush=True)
            path.write_text(json.dumps({**settings, "seeds": rows}, indent=1) + "\n")
    if args.reward == "task":  # of another, nobody knows in training what is right
        folders = [_folder(args.task, row["seed"], args.reward) / "grpo" for row in rows]
        figure, _ = compare([folder for folder in folders if folder.exists()], metric="reward_correct")
        figure.savefig(RUNS / f"{kept}.png", dpi=110)


if __name__ == "__main__":
    main()
