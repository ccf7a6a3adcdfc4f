"""Checkpoint intervals: the formulas of Young and Daly against simulated failures."""

import itertools
import math

import numpy as np
import pytest

import fdg
import policies
from fdg.commands.cluster_file import cluster_from
from fdg.commands.cluster_report import (
    FailureModel,
    best_interval,
    daly_interval,
    expected_goodput,
    predict_point,
    simulate,
    young_interval,
)
from fdg.errors import FdgError
from tests.tiny import Pupil

JOB = FailureModel(seconds_between=10_000.0, save=50.0, restart=100.0)


def test_goodput_without_failures():
    never = FailureModel(math.inf, 10.0, 100.0)
    assert simulate(never, 90.0, 90.0 * 100) == pytest.approx(0.9, abs=2e-3)
    assert daly_interval(never) == math.inf and expected_goodput(never, 90.0) == pytest.approx(0.9)


def test_simulation_matches_expected_goodput():
    for interval in (300.0, daly_interval(JOB), 4000.0):
        simulated = sum(simulate(JOB, interval, 3e6, seed) for seed in range(4)) / 4
        assert simulated == pytest.approx(expected_goodput(JOB, interval), rel=0.02)


def test_best_interval_is_near_daly():
    tried = [daly_interval(JOB) * factor for factor in (0.2, 0.5, 1.0, 2.0, 5.0)]
    best, goodput = best_interval(JOB, tried, 1e6)
    assert best in tried[1:4] and goodput > simulate(JOB, tried[0], 1e6)
    assert young_interval(JOB) == pytest.approx(1000.0)


def test_very_slow_saves_leave_no_goodput():
    assert expected_goodput(FailureModel(1.0, 1e6, 1.0), 1.0) == 0.0
    assert simulate(FailureModel(1.0, 1e3, 1e3), 1e3, 1e4) < 1e-3
    assert simulate(FailureModel(1.0, 1e9, 1.0), 1.0, 200.0) == 0.0  # at once


@pytest.mark.parametrize(("failures", "goodput"), [(50.0, 0.0), (1e-300, 1.0)])
def test_clusters_that_fail_always_or_never(failures, goodput):
    file = {"hosts": 1, "kind": "H100", "price": 2.5, "failures_per_device_hour": failures}
    point = predict_point(fdg.place(Pupil(), policies.GPUOnly(), 8), cluster_from(file), 1)
    assert point.goodput == pytest.approx((goodput, goodput), abs=1e-9)
    assert math.isinf(point.price_per_million) == (goodput == 0)


def test_failures_are_those_of_the_used_devices():
    """Four of eight cores act, which never fail, and the two GPUs after them learn."""
    cores = {"hosts": 1, "devices_per_host": 8, "kind": "CPU core"}
    gpus = {"devices": 2, "kind": "A100", "between": "Ethernet 25", "failures_per_device_hour": 0.5}
    cluster = cluster_from({**gpus, "first": cores})
    plan = fdg.place(Pupil(num_envs=4), policies.SingleLearnerCoarse(learners=2), cluster.to_place(10))
    assert predict_point(plan, cluster, 1).failures.seconds_between == pytest.approx(3600)


def test_invalid_numbers():
    with pytest.raises(FdgError, match="between = 0"):
        FailureModel(0.0, 1.0, 1.0)


def reference(job, interval, work, seed):
    """Simulates one interval at a time, as a reference for `simulate`."""
    random = np.random.default_rng(seed)
    now = done = 0.0
    failure = random.exponential(job.seconds_between)
    while done < work:
        left = min(interval, work - done)
        end = now + left + (job.save if done + left < work else 0.0)
        if end <= failure:
            now, done = end, done + left
            continue
        now = failure
        while (failure := now + random.exponential(job.seconds_between)) <= now + job.restart:
            now = failure
        now += job.restart
    return work / now


@pytest.mark.parametrize("save", [0.0, 0.5, 7.0])
def test_simulate_matches_reference(save):
    job = FailureModel(seconds_between=100.0, save=save, restart=5.0)
    for seed, interval in itertools.product(range(5), (0.7, 3.0, 40.0)):
        assert simulate(job, interval, 500.0, seed) == pytest.approx(reference(job, interval, 500.0, seed))
