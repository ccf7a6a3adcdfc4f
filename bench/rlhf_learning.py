"""How far GRPO gets beyond imitation: curves and samples of `docs/results.md`.

    python -m bench.rlhf_learning addition                       # 5 seeds, one after the other
    python -m bench.rlhf_learning addition --first-seed 5        # others than settings were chosen on
    python -m bench.rlhf_learning addition --reward random       # a reward that knows nothing
    python -m bench.rlhf_learning addition --reward model        # a reward model of the start's pairs
    python -m bench.rlhf_learning sorting --seeds 1 --scale 0.1  # a tenth of the steps, to try it
    python -m bench.rlhf_learning text:subtraction               # any other task, of which nothing is asked

Settings are those of `--algo sft` and `--algo grpo` on these tasks (`algos/presets/language.py`). Each seed
first imitates right answers until `start` of the held-out problems are right, with the most likely tokens,
and goes on from there by rewards alone. `runs/rlhf/TASK-REWARD.json` has the share of 512 held-out problems
that are right at the start and at the end, with the most likely tokens and with sampled ones, seconds of work
of all cores, compilation included, and what was asked of it; of a reward model, also the share of held-out
pairs that it ranks right. `runs/rlhf/TASK-REWARD.png` has the curves. Started again, it goes on with the
seeds that are missing.
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
from fdg.training.curves import compare

RUNS = Path("runs/rlhf")
EPISODES = 512


_JUDGE = {"num_prompts": 64, "group_size": 4, "warmup": 20, "total_steps": 51_200}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One task.

    Attributes:
      env: with its parameters.
      start: the share of right answers at which imitation ends.
      every: iterations from one look at it to the next.
      sft, grpo: hyperparameters that are not those of the preset.
      at_least: what is asked of the share of right answers at the end; or of its ratio to that at the start.
      judge: those of a reward model.
    """

    env: str
    start: float
    every: int
    sft: dict[str, Any]
    grpo: dict[str, Any]
    at_least: float
    as_ratio: bool = False
    judge: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_JUDGE))


_SMALLER = {"hidden_size": 48}

EXPERIMENTS = {
    "sorting": Experiment(
        "text:sorting?max_response=10", 0.25, 3, {"total_steps": 25_600}, {"total_steps": 102_400}, 0.95
    ),
    "addition": Experiment("text:addition?max_response=4", 0.25, 5, {"total_steps": 128_000}, {}, 0.98),
    "addition-of-two-digits": Experiment(
        "text:addition?smallest=10&max_response=4", 0.25, 5, {"total_steps": 128_000}, {}, 0.98
    ),
    "countdown": Experiment("text:countdown", 0.2, 10, {"total_steps": 64_000}, {}, 2.0, as_ratio=True),
    # Small enough to see it learn within a minute.
    "small": Experiment(
        "text:addition?digits=1&max_response=3", 0.3, 10,
        {**_SMALLER, "total_steps": 38_400},
        {**_SMALLER, "total_steps": 25_600, "learning_rate": 1e-3, "temperature": 0.6},
        0.95,
    ),
}  # fmt: skip


def experiment(name: str) -> Experiment:
    """The one of a name; of another task, one that asks for nothing but to start from a quarter."""
    if name.startswith("text:"):
        return Experiment(name, 0.25, 5, {}, {}, 0.0)
    return EXPERIMENTS[name]


def at_random(prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
    """A reward that has nothing to do with the answer: a bit of a hash of the text."""
    texts = (f"{prompt}|{response}" for prompt, response in zip(prompts, responses, strict=True))
    return [float(zlib.crc32(text.encode()) >> 7 & 1) for text in texts]


def one_seed(name: str, seed: int, reward: str, scale: float) -> dict[str, Any]:
    """Trains one seed, and says what share of held-out problems it has right before and after."""
    chosen, begun = experiment(name), time.process_time()
    task, parameters = envs.parse(chosen.env)
    env = envs.make(task, **parameters)
    folder = _folder(name, seed, reward)
    shutil.rmtree(folder, ignore_errors=True)
    common: dict[str, Any] = {"seed": seed, "devices": 1, "eval_episodes": EPISODES}
    imitation = _imitate(chosen, env, scale, out=folder / "sft", **common)
    common["start_from"] = folder / "sft"
    said, judged, judge = {}, env, None
    if reward == "random":
        judged = env.with_reward(at_random)
    if reward == "model":
        judging = _made("reward_model", env, chosen.judge, scale)
        judging = fdg.fit(judging, out=folder / "judge", **common)
        said["pairs_ranked_right"] = judging.evaluate(EPISODES).mean
        judge = str(judging.export(folder / "reward"))
    learned = fdg.fit(
        _made("grpo", judged, chosen.grpo, scale, reward_model=judge),
        out=folder / "grpo",
        **common,
    )
    for when, run in (("start", imitation), ("end", learned)):
        for how, greedy in (("", True), ("_sampled", False)):
            said[when + how] = _right(run, env, greedy)
    return {"seed": seed, **said, "cpu_s": round(time.process_time() - begun)}


def _imitate(chosen: Experiment, env: Any, scale: float, **common: Any) -> fdg.Run:
    """Imitation until the share of right answers is there; returns have what else is paid for in them too."""
    learner = _made("sft", env, chosen.sft, scale)
    returned = chosen.start
    while True:
        run = fdg.fit(learner, eval_every=chosen.every, stop_at=returned, resume=True, **common)
        missing = chosen.start - _right(run, env, greedy=True)
        if missing <= 0 or run.iteration * learner.steps_per_iteration >= learner.total_steps:
            return run
        returned += missing


def draw(name: str, seeds: list[int], reward: str) -> None:
    """The share of right answers in training, mean and interval over seeds: `runs/rlhf/TASK-REWARD.png`."""
    folders = [_folder(name, seed, reward) / "grpo" for seed in seeds]
    figure, _ = compare([folder for folder in folders if folder.exists()], metric="reward_correct")
    figure.savefig(RUNS / f"{_word(name)}-{reward}.png", dpi=110)


def _right(run: fdg.Run, env: Any, greedy: bool) -> float:
    """The share of held-out problems that it has right; what else a task pays for does not count."""
    returns = run.evaluate(EPISODES, env=env, greedy=greedy).returns
    assert returns is not None
    return float((returns >= 1).mean())


def _folder(name: str, seed: int, reward: str) -> Path:
    return RUNS / f"{_word(name)}-{reward}-{seed}"


def _word(name: str) -> str:
    """As a part of a file's name."""
    return name.removeprefix("text:").translate(str.maketrans("?=&", "---"))


def _made(algo: str, env: Any, fields: dict[str, Any], scale: float, **more: Any) -> Any:
    learner = algos.make(algo, env, **fields, **more)
    return dataclasses.replace(learner, total_steps=int(learner.total_steps * scale))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", help=f"{', '.join(EXPERIMENTS)}, or text:NAME?parameters")
    parser.add_argument("--reward", choices=("task", "random", "model"), default="task")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of steps")
    given = parser.parse_args()
    if given.task not in EXPERIMENTS and not given.task.startswith("text:"):
        parser.error(f"task {given.task!r}: give one of {', '.join(EXPERIMENTS)}, or text:NAME")
    chosen = experiment(given.task)
    asked = f"{'ratio to the start' if chosen.as_ratio else 'share'} >= {chosen.at_least:g}"
    said = {"task": chosen.env, "reward": given.reward, "scale": given.scale, "asked": asked}
    fdg.keep_programs()  # the second seed compiles nothing, in this process or another
    path = RUNS / f"{_word(given.task)}-{given.reward}{'' if given.scale == 1 else f'-{given.scale:g}'}.json"
    rows = json.loads(path.read_text())["seeds"] if path.exists() else []
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        if any(row["seed"] == seed for row in rows):
            continue
        rows.append(one_seed(given.task, seed, given.reward, given.scale))
        print(rows[-1], flush=True)
        path.write_text(json.dumps({**said, "seeds": rows}, indent=1) + "\n")
    if given.reward != "random":  # of which nobody knows in training what is right
        draw(given.task, [row["seed"] for row in rows], given.reward)


if __name__ == "__main__":
    main()
