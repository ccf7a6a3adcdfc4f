"""`python -m bench.summarize RUN [RUN ...]`: a run, of several seeds mostly, as one row of `docs/results.md`.

Mean, interquartile mean (the mean of the middle half) and its 95% bootstrap interval over the seeds, as
recommended by Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(arXiv 2108.13264).
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

RESAMPLES = 10_000


def interquartile_mean(returns: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean without the lowest and the highest quarter of the values, rounded down to whole values.

    >>> float(interquartile_mean(np.array([0.0, 2.0, 4.0, 100.0])))
    3.0
    """
    return stats.trim_mean(returns, 0.25, axis=axis)


def bootstrap_interval(returns: np.ndarray, statistic=interquartile_mean) -> tuple[float, float]:
    """95% percentile interval of a statistic over seeds drawn with replacement; the draw is fixed."""
    draws = np.random.default_rng(0).choice(returns, (RESAMPLES, len(returns)))
    low, high = np.percentile(statistic(draws, axis=-1), [2.5, 97.5])
    return float(low), float(high)


def row(directory: Path) -> str:
    """`| environment | algorithm | steps | seeds | mean | IQM [interval] | lowest, highest | wall time |`"""
    try:
        config, summary = (json.loads((directory / f"{n}.json").read_text()) for n in ("config", "summary"))
    except FileNotFoundError as error:
        why = "not a run directory, or its training has not ended"
        raise SystemExit(f"{error.filename} is missing: {why}") from None
    if "eval_return" not in summary:
        raise SystemExit(f"{directory}: nothing was evaluated at its end (--eval-episodes 0)")
    returns = np.asarray(summary.get("eval_returns", [summary["eval_return"]]))  # a seed each
    low, high = bootstrap_interval(returns)
    return (
        f"| {config['env']} | {config['algo']} | {summary['env_steps']:,} | {len(returns)} "
        f"| {returns.mean():.1f} | {interquartile_mean(returns):.1f} [{low:.1f}, {high:.1f}] "
        f"| {returns.min():.1f}, {returns.max():.1f} | {summary['wall_s']:.0f} s |"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m bench.summarize RUN [RUN ...]: run directories")
    for name in sys.argv[1:]:
        print(row(Path(name)))
