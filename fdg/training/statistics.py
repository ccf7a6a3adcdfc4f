"""Statistics of a few runs: bootstrap intervals and the interquartile mean.

Both are as in Agarwal et al. 2021 ("Deep Reinforcement Learning at the Edge of the Statistical Precipice",
arXiv 2108.13264, sections 4.1 and 4.3) and their library `rliable`.
"""

import math
from collections.abc import Callable

import numpy as np

RESAMPLES = 2_000
CONFIDENCE = 0.95


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of `[..., n]`."""
    return np.mean(values, axis=axis)


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half of `[..., n]`: as robust as a median, and with less variance.

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
    1.5
    """
    from scipy.stats import trim_mean  # here, because the import takes half a second

    return trim_mean(values, 0.25, axis=axis)


STATISTICS: dict[str, Callable[..., np.ndarray]] = {"mean": mean, "iqm": interquartile_mean}


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


def interval(values: np.ndarray, statistic: Callable[..., np.ndarray] = mean) -> tuple[float, float]:
    """95% confidence interval of a statistic of `[n]` independent values, by the percentile bootstrap.

    The same values always give the same interval.

    >>> low, high = interval(np.array([1.0, 2.0, 3.0, 4.0]))
    >>> 1.0 <= low < 2.5 < high <= 4.0
    True
    """
    low, high = intervals(np.asarray(values, float)[..., None], statistic)
    return low.item(), high.item()


def intervals(
    values: np.ndarray, statistic: Callable[..., np.ndarray] = mean
) -> tuple[np.ndarray, np.ndarray]:
    """`interval` for every column of `[n, points]`: each is `[points]`. Resamples whole rows (runs)."""
    rng = np.random.default_rng(0)
    count = len(values)
    drawn = rng.integers(count, size=(RESAMPLES, count))
    of_resamples = np.stack([statistic(values[rows], axis=0) for rows in drawn])
    edge = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(of_resamples, [edge, 100 - edge], axis=0)
    return low, high
