"""Measures how much stale parameters slow down learning, and how much corrections help GRPO on two tasks.

    python -m bench.corrections sorting                 # five seeds in one program, eta 0, 1, 4, 16
    python -m bench.corrections countdown --scale 0.1   # a tenth of the steps, to try it
    python -m bench.corrections sorting --only decoupled --eta 0 --eta 4

Responses are sampled with parameters that are `eta` iterations old (`Split(staleness=eta)`). All seeds start
from one network that was trained by imitation, as in `bench.rlhf_learning`, and train on equally many
samples. A cell is a method and an eta; it takes a minute on two cores, because problems and networks are
small. Step sizes and numbers of steps were chosen on seeds 100 to 104. Generation and learning have a device
each; they overlap if `eta` is above 0. `runs/corrections/TASK.json` has the share of 512 held-out problems
that each seed solves at the end, greedily and by sampling, and the rewards and seconds of every iteration. A
second start runs only the missing cells. Intervals are Student's 95% intervals; `seconds to half` is the time
until the mean reward of 10 iterations reaches half of that of the last 10 iterations with eta = 0.
"""

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import scipy  # imports `stats` on first use

import fdg
import policies
from bench.harness import environment, parser, table
from bench.rlhf_learning import EPISODES, Experiment, imitate, make_scaled

RUNS = Path("runs/corrections")
_SMALL = {"hidden_size": 32}
EXPERIMENTS = {
    "sorting": Experiment(
        "text:sorting?length=4&max_response=8",
        start=0.25,
        every=2,
        sft={**_SMALL, "num_prompts": 64, "total_steps": 25_600},
        grpo={**_SMALL, "num_prompts": 32, "learning_rate": 1e-3, "total_steps": 76_800},
        at_least=0.9,
    ),
    "countdown": Experiment(
        "text:countdown?count=2&largest=40&target=200",
        start=0.25,
        every=4,
        sft={**_SMALL, "num_prompts": 64, "total_steps": 64_000},
        grpo={**_SMALL, "num_prompts": 16, "learning_rate": 6e-4, "total_steps": 102_400},
        at_least=2.0,
        as_ratio=True,
    ),
}
ETAS = (0, 1, 4, 16)
METHODS: dict[str, dict[str, Any]] = {
    "naive": {"old_log_prob": "actor"},
    "decoupled": {"old_log_prob": "learner", "correction": "decoupled"},
    "interpolated": {"old_log_prob": "learner", "correction": "decoupled", "proximal": "interpolate"},
    "tis": {"old_log_prob": "learner", "correction": "truncate_token"},
    "mis": {"old_log_prob": "learner", "correction": "mask_token"},
}
WITHOUT_STALENESS = ("naive", "decoupled")  # run with eta = 0, where all other methods equal "decoupled"


def train_cell(task: str, method: str, eta: int, start: Path, seeds: int, scale: float) -> dict[str, Any]:
    """Trains all seeds with one method and one eta, from the imitation run in `start`."""
    begun, experiment = time.process_time(), EXPERIMENTS[task]
    learner = make_scaled("grpo", environment(experiment.env), experiment.grpo, scale)
    learner = dataclasses.replace(learner, **METHODS[method])
    out = RUNS / f"{start.name}-{method}-{eta}"
    run = fdg.fit(
        learner,
        policies.Split(staleness=eta),
        devices=2,
        num_seeds=seeds,
        start_from=start,
        out=out,
        resume=True,
        eval_episodes=0,
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    results = {
        name: (run.evaluate(EPISODES, greedy=greedy).returns >= 1).reshape(seeds, -1).mean(1).tolist()
        for name, greedy in (("greedy", True), ("sampled", False))
    }
    return {
        "method": method,
        "eta": eta,
        **results,
        "reward": [row["episode_return_per_seed"] for row in rows],
        "wall_s": [row["wall_s"] for row in rows],
        "cpu_s": round(time.process_time() - begun),
    }


def results_table(cells: list[dict[str, Any]]) -> str:
    """A table of cells: solved problems in %, and the difference from training with eta = 0."""
    means = {(cell["method"], cell["eta"]): statistics.mean(cell["greedy"]) for cell in cells}
    half_reward = next(
        (statistics.mean(map(statistics.mean, x["reward"][-10:])) / 2 for x in cells if not x["eta"]), 0.0
    )
    rows = []
    for cell in cells:
        values = [100 * x for x in cell["greedy"]]
        quantile = scipy.stats.t.ppf(0.975, len(values) - 1)
        spread = quantile * statistics.stdev(values) / len(values) ** 0.5
        baseline = means.get((cell["method"] if (cell["method"], 0) in means else "decoupled", 0))
        difference = "" if baseline is None else f"{statistics.mean(values) - 100 * baseline:+.1f}"
        solved = f"{statistics.mean(values):.1f} ± {spread:.1f}"
        sampled = f"{100 * statistics.mean(cell['sampled']):.1f}"
        seconds = _seconds_until(half_reward, cell), f"{cell['wall_s'][-1]:.0f}"
        rows.append((cell["method"], cell["eta"], solved, difference, sampled, *seconds))
    heads = ("method", "eta", "right, %", "from eta = 0", "sampled, %", "seconds to half", "seconds in all")
    return table(heads, rows)


def _seconds_until(goal: float, cell: dict[str, Any]) -> str:
    """Seconds of training until the mean reward of 10 iterations is at least `goal`."""
    means = [
        statistics.mean(map(statistics.mean, cell["reward"][i - 10 : i]))
        for i in range(10, len(cell["reward"]) + 1)
    ]
    return next((f"{cell['wall_s'][i + 9]:.0f}" for i, mean in enumerate(means) if mean >= goal), "never")


def main() -> None:
    command = parser("bench.corrections", __doc__)
    command.add_argument("task", choices=("sorting", "countdown"))
    command.add_argument("--only", choices=METHODS, action="append")
    command.add_argument("--eta", type=int, action="append")
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--scale", type=float, default=1.0, help="factor for all numbers of steps")
    args = command.parse_args()
    fdg.host_devices(2)
    fdg.keep_programs()
    name = f"{args.task}{'' if args.scale == 1 else f'-{args.scale:g}'}"
    start, path = RUNS / name, RUNS / f"{name}.json"
    experiment = EXPERIMENTS[args.task]
    env = environment(experiment.env)
    imitate(experiment, env, 1.0, out=start, seed=0, devices=1, eval_episodes=EPISODES)
    cells = json.loads(path.read_text()) if path.exists() else []
    for eta in args.eta or ETAS:
        for method in args.only or METHODS:
            is_done = any((cell["method"], cell["eta"]) == (method, eta) for cell in cells)
            if not is_done and (eta or method in WITHOUT_STALENESS):
                cells.append(train_cell(args.task, method, eta, start, args.seeds, args.scale))
                path.write_text(json.dumps(cells) + "\n")
                print({key: x for key, x in cells[-1].items() if key not in ("reward", "wall_s")}, flush=True)
    print(results_table(cells))


if __name__ == "__main__":
    main()
