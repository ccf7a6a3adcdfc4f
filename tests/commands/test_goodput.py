"""Checkpoint intervals: formulas against failures that are drawn."""

import itertools
import math

import numpy as np
import pytest

from fdg.commands.cluster_report import (
    FailureModel,
    best_interval,
    daly_interval,
    expected_goodput,
    simulate,
    young_interval,
)
from fdg.errors import FdgError

JOB = FailureModel(between=10_000.0, save=50.0, restart=100.0)


def test_nothing_fails_and_saving_costs_its_share():
    never = FailureModel(math.inf, 10.0, 100.0)
    assert simulate(never, 90.0, 90.0 * 100) == pytest.approx(0.9, abs=2e-3)
    assert daly_interval(never) == math.inf and expected_goodput(never, 90.0) == pytest.approx(0.9)


def test_the_simulation_keeps_what_the_formula_says():
    for interval in (300.0, daly_interval(JOB), 4000.0):
        drawn = sum(simulate(JOB, interval, 3e6, seed) for seed in range(4)) / 4
        assert drawn == pytest.approx(expected_goodput(JOB, interval), rel=0.02)


def test_the_best_interval_is_near_dalys():
    tried = [daly_interval(JOB) * by for by in (0.2, 0.5, 1.0, 2.0, 5.0)]
    best, kept = best_interval(JOB, tried, 1e6)
    assert best in tried[1:4] and kept > simulate(JOB, tried[0], 1e6)
    assert young_interval(JOB) == pytest.approx(1000.0)


def test_saving_that_never_ends_keeps_nothing():
    assert expected_goodput(FailureModel(1.0, 1e6, 1.0), 1.0) == 0.0
    assert simulate(FailureModel(1.0, 1e3, 1e3), 1e3, 1e4) < 1e-3


def test_bad_numbers_say_so():
    with pytest.raises(FdgError, match="between = 0"):
        FailureModel(0.0, 1.0, 1.0)


def one_by_one(job, interval, work, seed):
    """What `simulate` says, interval by interval."""
    random = np.random.default_rng(seed)
    now = done = 0.0
    failure = random.exponential(job.between)
    while done < work:
        left = min(interval, work - done)
        end = now + left + (job.save if done + left < work else 0.0)
        if end <= failure:
            now, done = end, done + left
            continue
        now = failure
        while (failure := now + random.exponential(job.between)) <= now + job.restart:
            now = failure
        now += job.restart
    return work / now


@pytest.mark.parametrize("save", [0.0, 0.5, 7.0])
def test_whole_intervals_at_once_are_intervals_one_by_one(save):
    job = FailureModel(between=100.0, save=save, restart=5.0)
    for seed, interval in itertools.product(range(5), (0.7, 3.0, 40.0)):
        assert simulate(job, interval, 500.0, seed) == pytest.approx(one_by_one(job, interval, 500.0, seed))
