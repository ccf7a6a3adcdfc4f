"""Trains the experiments of `docs/results.md` with several seeds each; prints a row of its table for each.

    python -m bench.learning --list            # lists the experiments
    python -m bench.learning a2c-CartPole-v1   # trains into runs/learning/, if not done yet
    python -m bench.learning --all --pictures  # trains all; learning curves go to docs/images/learning/

All seeds run in one program, or one after the other if the environments live on the host. An interrupted run
continues.
"""

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import harness
from fdg.training.curves import plot_runs
from fdg.training.statistics import interquartile_mean, interval

RUNS = Path("runs/learning")
PICTURES = Path("docs/images/learning")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment: a row of the table.

    Attributes:
      algo, env: names for the command line.
      total_steps: environment steps of each seed.
      at_least: target of the evaluation return.
      of: the statistic over seeds that is compared with the target.
      num_seeds: the number of seeds.
      together: whether all seeds run in one program, split over the devices.
      flags: further flags.
      label: its name; if empty, the algorithm and the environment.
    """

    algo: str
    env: str
    total_steps: int
    at_least: float
    of: str = "mean"
    num_seeds: int = 6  # an even number, which two devices can share equally
    together: bool = True
    flags: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or f"{self.algo}-{self.env}".replace(":", "-")

    @property
    def train_flags(self) -> list[str]:
        """Flags of `fdg.train`, without seeds."""
        flags = ["--algo", self.algo, "--env", self.env, "--total-steps", str(self.total_steps)]
        flags += self.flags.split()
        devices = 1 + (self.num_seeds % 2 == 0)
        return [*flags, "--devices", str(devices)] if self.together else flags


EXPERIMENTS = (
    Experiment("a2c", "CartPole-v1", 1_000_000, 475),
    Experiment("a3c", "CartPole-v1", 1_000_000, 475),
    Experiment("impala", "CartPole-v1", 1_000_000, 475),
    Experiment("dqn", "CartPole-v1", 500_000, 450),
    Experiment("pqn", "CartPole-v1", 500_000, 475),
    Experiment("sac", "Pendulum-v1", 100_000, -160),
    Experiment("td3", "Pendulum-v1", 100_000, -200),
    Experiment("qr_dqn", "CartPole-v1", 500_000, 450),
    Experiment("c51", "CartPole-v1", 500_000, 450),
    Experiment("crossq", "Pendulum-v1", 50_000, -200),
    *(Experiment(algo, "Pendulum-v1", 1_000_000, -200, num_seeds=10) for algo in ("a2c", "a3c", "impala")),
    *(Experiment(algo, "Acrobot-v1", 500_000, -100, num_seeds=10) for algo in ("impala", "pqn")),
    Experiment("dqn", "MountainCar-v0", 250_000, -115, num_seeds=10),
    *(
        Experiment(algo, f"{game}-MinAtar", 10_000_000, target, of="interquartile mean", num_seeds=10)
        for algo, breakout in (("ppo", 70), ("pqn", 60))
        for game, target in {"Breakout": breakout, "Asterix": 24, "Freeway": 60, "SpaceInvaders": 180}.items()
    ),
    Experiment("ippo", "MPE_simple_spread_v3", 10_000_000, -20.0),
    Experiment("mappo", "MPE_simple_spread_v3", 600_000, -17.3),
    Experiment("vdn", "MPE_simple_spread_v3", 500_000, -21.0),
    Experiment("qmix", "MPE_simple_spread_v3", 1_000_000, -21.0),
    Experiment("recurrent_ppo", "probe:memory", 100_000, 0.95, flags="--learning-rate 1e-3 --memory-size 32"),
    # One path in 65,536 has a reward; without `--rnd true` all seeds stay at zero.
    Experiment(
        "ppo",
        "DeepSea-bsuite?size=16",
        400_000,
        0.9,
        flags="--rnd true --num-envs 32 --num-steps 64 --num-minibatches 4 --learning-rate 1e-3"
        " --anneal-learning-rate false",
        label="rnd-DeepSea-bsuite",
    ),
    Experiment("ppo", "brax:inverted_pendulum", 2_000_000, 950),
    *(
        Experiment("ppo", f"envpool:{task}-v4", 1_000_000, target, num_seeds=5, together=False)
        for task, target in (("HalfCheetah", 2_500), ("Hopper", 2_800), ("Walker2d", 2_288))
    ),
    Experiment("td3", "envpool:HalfCheetah-v4", 300_000, 5_000, num_seeds=5, together=False),
)


def train_seeds(experiment: Experiment, out: Path, first: int) -> list[Path]:
    """Trains all seeds from `first` on, in one program or one by one; returns the run directories."""
    flags, count = experiment.train_flags, experiment.num_seeds
    if experiment.together:
        return [_train([*flags, "--num-seeds", str(count), "--seed", str(first)], out)]
    return [_train([*flags, "--seed", str(i)], out / f"seed-{i}") for i in range(first, first + count)]


def _train(flags: Sequence[str], out: Path) -> Path:
    """Trains into a run directory; resumes an interrupted run, and does nothing if the run has ended."""
    if not (out / "summary.json").exists():
        flags = ["--resume", str(out)] if (out / "config.json").exists() else [*flags, "--out", str(out)]
        print("python -m fdg.train", shlex.join(flags), flush=True)
        subprocess.run([sys.executable, "-m", "fdg.train", *flags], check=True)
    return out


def row(experiment: Experiment, runs: Sequence[Path]) -> str:
    """The experiment's line of the table in `docs/results.md`, from its run directories."""
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    returns = np.array([value for x in summaries for value in x.get("eval_returns", [x["eval_return"]])])
    low, high = interval(returns, interquartile_mean)
    statistic = interquartile_mean if experiment.of == "interquartile mean" else np.mean
    verdict = "met" if statistic(returns) >= experiment.at_least else "not met"
    cells = (
        experiment.env,
        experiment.algo,
        f"{summaries[0]['env_steps']:,}",
        str(len(returns)),
        f"{returns.mean():.1f}",
        f"{float(interquartile_mean(returns)):.1f} [{low:.1f}, {high:.1f}]",
        f"{returns.min():.1f}, {returns.max():.1f}",
        f"{sum(x['wall_s'] for x in summaries):,.0f} s",
        f"{experiment.of} {experiment.at_least:g}: {verdict}",
    )
    return f"| {' | '.join(cells)} |"


def draw(experiment: Experiment, runs: Sequence[Path]) -> None:
    """Writes the learning curve, of one run or the mean of several, into the docs."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{experiment.name}.png"
    if len(runs) == 1:
        shutil.copy(runs[0] / "learning_curve.png", picture)
    else:
        plot_runs(runs)[0].savefig(picture, dpi=150)


def main() -> None:
    by_name = {experiment.name: experiment for experiment in EXPERIMENTS}
    parser = harness.parser("bench.learning", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; see --list")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--all", action="store_true", help="train all experiments")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--num-seeds", type=int, default=None, help="number of seeds, in place of the experiment's"
    )
    parser.add_argument("--pictures", action="store_true", help=f"copy learning curves to {PICTURES}")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in by_name]
    if unknown or not (args.names or args.all or args.list):
        parser.error(
            f"{'unknown: ' + unknown[0] if unknown else 'name experiments, or give --all'}; there are"
            f" {', '.join(by_name)}"
        )
    chosen = [e for e in EXPERIMENTS if args.all or args.list or e.name in args.names]
    if args.num_seeds is not None:
        chosen = [dataclasses.replace(e, num_seeds=args.num_seeds) for e in chosen]
    for experiment in chosen:
        if args.list:
            seeds = f"--num-seeds {experiment.num_seeds} " if experiment.together else ""
            flags = " ".join(experiment.train_flags)
            print(f"{experiment.name}: python -m fdg.train {flags} {seeds}--seed {args.seed}")
            continue
        out = RUNS / (experiment.name + f"-from-{args.seed}" * (args.seed != 0))
        runs = train_seeds(experiment, out, args.seed)
        if args.pictures:
            draw(experiment, runs)
        print(row(experiment, runs), flush=True)


if __name__ == "__main__":
    main()
