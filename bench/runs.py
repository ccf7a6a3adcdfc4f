"""Trains with `fdg.train` into run directories, and formats their evaluation returns as cells of a table."""

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fdg.training.statistics import interquartile_mean, interval


def train(flags: Sequence[str], out: Path) -> Path:
    """Trains into a run directory; resumes an interrupted run, and does nothing if the run has ended."""
    if not (out / "summary.json").exists():
        flags = ["--resume", str(out)] if (out / "config.json").exists() else [*flags, "--out", str(out)]
        print("python -m fdg.train", shlex.join(flags), flush=True)
        subprocess.run([sys.executable, "-m", "fdg.train", *flags], check=True)
    return out


def train_seeds(flags: Sequence[str], out: Path, first: int, count: int, together: bool) -> list[Path]:
    """Trains `count` seeds, in one program or one after the other; returns the run directories."""
    if together:
        return [train([*flags, "--num-seeds", str(count), "--seed", str(first)], out)]
    return [train([*flags, "--seed", str(i)], out / f"seed-{i}") for i in range(first, first + count)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Evaluation returns of all seeds, environment steps of one seed, and seconds of all seeds together.

    >>> Outcome(np.array([0.0, 2.0, 4.0, 100.0]), 1000, 2.0).cells[:2]
    ('4', '26.5')
    """

    returns: np.ndarray
    steps: int
    wall_s: float

    @classmethod
    def of(cls, runs: Sequence[Path]) -> "Outcome":
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
        returns = [value for x in summaries for value in x.get("eval_returns", [x["eval_return"]])]
        return cls(np.array(returns), summaries[0]["env_steps"], sum(x["wall_s"] for x in summaries))

    @property
    def cells(self) -> tuple[str, ...]:
        """Seeds, mean, interquartile mean with its interval, lowest and highest, wall time."""
        low, high = interval(self.returns, interquartile_mean)
        return (
            str(len(self.returns)),
            f"{self.returns.mean():.1f}",
            f"{float(interquartile_mean(self.returns)):.1f} [{low:.1f}, {high:.1f}]",
            f"{self.returns.min():.1f}, {self.returns.max():.1f}",
            f"{self.wall_s:,.0f} s",
        )
