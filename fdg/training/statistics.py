"""Metrics that must be finite, and statistics of a few runs: bootstrap intervals and the interquartile mean.

Source: Agarwal et al. 2021 ("Deep Reinforcement Learning at the Edge of the Statistical Precipice",
arXiv 2108.13264, sections 4.1 and 4.3) and their library `rliable`.
"""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2_000  # bootstrap resamples
_LOW_PERCENTILE = 100 * (1 - 0.95) / 2  # percentile at which a 95% interval begins
_VITAL = re.compile(r"loss|grad(?![aeu])")  # metrics that must be finite; not "graduated" or "grade"


def is_vital(name: str) -> bool:
    """Whether a metric is a loss, or describes gradients: these must be finite."""
    return _VITAL.search(name) is not None


def finite_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the finite elements along an axis; NaN if there are none."""
    is_finite = np.isfinite(values)
    total = np.where(is_finite, values, 0.0).sum(axis)
    return np.where(is_finite.any(axis), total / np.maximum(is_finite.sum(axis), 1), np.nan)


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean over `n` of `[..., n]` without the floor(n / 4) largest and smallest values: `[...]`.

    It is as robust as a median, and has less variance. NaN if a value is NaN.

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
    1.5
    """
    from scipy.stats import trim_mean  # imported here, since the import takes 0.5 s

    return trim_mean(values, 0.25, axis=axis)


STATISTICS: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "iqm": interquartile_mean}


def format_numbers(*values: float) -> list[str]:
    """Formats numbers with the same decimals: 1 if the largest is at least 10, 2 if at least 1, else 3.

    >>> format_numbers(0.953, 0.9), format_numbers(9.5, -3.0)
    (['0.953', '0.900'], ['9.50', '-3.00'])
    >>> format_numbers(499.62), format_numbers(0.0), format_numbers(float("nan"))
    (['499.6'], ['0.0'], ['nan'])
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    decimals = 1 if largest >= 10 or not largest else 2 if largest >= 1 else 3
    return [f"{value:.{decimals}f}" for value in values]


def estimate_text(value: float, ends: Sequence[float] | None, form: str = " [{}, {}]") -> str:
    """A number as text, followed by the ends of its interval, formatted by `form`, if it has one.

    >>> estimate_text(0.5, (0.25, 1.0)), estimate_text(12.0, None)
    ('0.50 [0.25, 1.00]', '12.0')
    """
    number, *end_texts = format_numbers(value, *(ends or ()))
    return number + (form.format(*end_texts) if end_texts else "")


def interval(values: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> tuple[float, float]:
    """95% confidence interval of a statistic of `[n]` independent values, by the percentile bootstrap.

    The same values always give the same interval.

    >>> low, high = interval(np.array([1.0, 2.0, 3.0, 4.0]))
    >>> 1.0 <= low < 2.5 < high <= 4.0
    True
    """
    low, high = intervals(np.asarray(values, float)[..., None], statistic)
    return low.item(), high.item()


def interval_of_returns(returns: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """`interval` of the mean of agents' returns; None for one agent, or if a return is unknown."""
    values = np.asarray(returns, float)
    return interval(values) if len(values) > 1 and np.isfinite(values).all() else None


def intervals(
    values: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of `interval` for every column of `[n, points]`: two `[points]`. Resamples rows (runs)."""
    rng = np.random.default_rng(0)
    count = len(values)
    resamples = rng.integers(count, size=(RESAMPLES, count))
    estimates = np.stack([statistic(values[rows], axis=0) for rows in resamples])
    low, high = np.percentile(estimates, [_LOW_PERCENTILE, 100 - _LOW_PERCENTILE], axis=0)
    return low, high


def stratified_interval(
    groups: Sequence[np.ndarray], statistic: Callable[..., np.ndarray]
) -> tuple[float, float]:
    """95% interval of a statistic of several groups of values, `[n_i]` each, by the stratified bootstrap.

    Values are resampled within each group (Agarwal et al. 2021, section 4.1); a group has the seeds of one
    environment. A value may be -inf (a failed seed), and so may the ends of the interval.

    Args:
      groups: for each environment, independent values `[n_i]`.
      statistic: a function of `[resamples, n]` that reduces the last axis; `n` is the sum of all `n_i`.
    """
    rng = np.random.default_rng(0)
    resamples = [group[rng.integers(len(group), size=(RESAMPLES, len(group)))] for group in groups]
    return _interval_ends(statistic(np.concatenate(resamples, axis=1), axis=-1))


def probability_of_improvement(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[float, tuple[float, float]]:
    """The probability that a seed of one side is better than a seed of the other, and its 95% interval.

    In an environment this is the Mann-Whitney statistic, `P(X > Y) + P(X = Y) / 2` over all pairs of seeds;
    over environments, the mean (Agarwal et al. 2021, section 4.3 and equation A.4; `rliable`).

    Args:
      pairs: for each environment, the values `[n]` of one side and `[m]` of the other.

    >>> probability_of_improvement([(np.array([1.0, 3.0]), np.array([2.0, 2.0]))])[0]
    0.5
    """
    rng = np.random.default_rng(0)
    means, resampled = [], []
    for x, y in pairs:
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
        means.append(wins.mean())
        win_counts = _draw_counts(rng, len(x)) @ wins  # [RESAMPLES, m]: wins against each value of y
        resampled.append((win_counts * _draw_counts(rng, len(y))).sum(axis=1) / wins.size)
    return float(np.mean(means)), _interval_ends(np.mean(resampled, axis=0))


def _draw_counts(rng: np.random.Generator, count: int) -> np.ndarray:
    """The number of occurrences of each of `count` values in each resample: `[RESAMPLES, count]`."""
    return rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)


def _interval_ends(resamples: np.ndarray) -> tuple[float, float]:
    with np.errstate(invalid="ignore"):  # NumPy gives nan between -inf and a number
        low, high = np.percentile(resamples, [_LOW_PERCENTILE, 100 - _LOW_PERCENTILE])
    low, high = np.nan_to_num([low, high], nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return float(low), float(high)
