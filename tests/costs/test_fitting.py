"""`fit_overheads`: jobs are timed by a model with known parameters, so the right fit is known."""

import dataclasses
import types

import pytest

import fdg
from bench import costs
from fdg.costs import calibration, fitting
from fdg.costs.fitting import JobSample, fit_overheads
from fdg.costs.hardware import Figure
from fdg.costs.machine import SHARED_MEMORY, SOCKETS, UNCALIBRATED_CPU, Calibration, fingerprint
from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.costs.prediction import predict
from fdg.costs.program_time import SHARES_AFTER_FUSION
from fdg.training import reference_jobs as jobs
from fdg.training.reference_jobs import REFERENCE_JOBS, ReferenceJob

SMALL = tuple(
    ReferenceJob("PPO", env, (("num_envs", num_envs), ("num_steps", 8), ("hidden", (width, width))), *how)
    for env, num_envs, width, how in (
        ("CartPole-v1", 64, 32, ("GPUOnly", (), 1)),
        ("Acrobot-v1", 512, 32, ("GPUOnly", (), 1)),
        ("CartPole-v1", 256, 128, ("GPUOnly", (), 2)),
        ("CartPole-v1", 64, 64, ("SingleLearnerCoarse", (("staleness", 0),), 2)),
    )
)
UNSEEN = ReferenceJob("PPO", "CartPole-v1", (("num_envs", 256), ("num_steps", 16)), "GPUOnly", (), 1)
FRACTIONS = {**SHARES_AFTER_FUSION["cpu"], "elementwise": 1.5, "product": 0.9}
SLOW_START = dataclasses.replace(OVERHEADS["cpu"], start=4e-4)


@pytest.fixture(scope="module")
def plans():
    return {job: fdg.place(*job.build(), job.devices) for job in (*SMALL, UNSEEN)}


def calibrated():
    return Calibration(fingerprint("cpu"), UNCALIBRATED_CPU, SHARED_MEMORY, SOCKETS, 2)


def samples(plans, some=SMALL, scale=1.0):
    clusters = [calibrated().cluster(job.devices) for job in some]
    return [
        JobSample(plans[job], one, scale * seconds(JobSample(plans[job], one, 0.0), FRACTIONS, SLOW_START))
        for job, one in zip(some, clusters, strict=True)
    ]


def seconds(sample, shares, overheads):
    return predict(sample.plan, sample.cluster_with(shares, overheads)).seconds


def test_fit_predicts_an_unseen_job(plans):
    found = fit_overheads(samples(plans), prior_weight=1e-3)
    assert found.after < 0.02 < 0.2 < found.before
    (other,) = samples(plans, [UNSEEN])
    new = seconds(other, found.shares_after_fusion, found.overheads)
    old = seconds(other, SHARES_AFTER_FUSION["cpu"], OVERHEADS["cpu"])
    assert new == pytest.approx(other.seconds, rel=0.05) and old < 0.8 * other.seconds


def test_parameters_without_data_keep_their_values(plans):
    """No job has convolutions or sorts, and on one device there is no communication."""
    found = fit_overheads(samples(plans, SMALL[:2]))
    unused = ("convolution", "sort", "linear algebra", "host")
    same = {name: found.shares_after_fusion[name] for name in unused}
    assert same == {name: SHARES_AFTER_FUSION["cpu"][name] for name in same}
    kept = [getattr(found.overheads, name) for name in ("meetings", "array", "arrival", "start")]
    before = [getattr(OVERHEADS["cpu"], name) for name in ("meetings", "array", "arrival", "start")]
    assert kept == pytest.approx(before, rel=0.01)
    assert found.overheads.divided <= 1


def test_zero_overheads_stay_zero(plans, monkeypatch):
    monkeypatch.setattr(fitting, "OVERHEADS", {"cpu": Overheads(divided=0.5)})
    found = fit_overheads(samples(plans))
    fitted_overheads = [found.overheads.start, found.overheads.array, found.overheads.slowed]
    assert fitted_overheads == [0.0, 0.0, 0.0]


def test_fit_is_robust_to_an_outlier(plans):
    measured = samples(plans)
    measured[0] = measured[0]._replace(seconds=5 * measured[0].seconds)
    found = fit_overheads(measured, prior_weight=1e-3)
    predicted = [seconds(s, found.shares_after_fusion, found.overheads) for s in measured[1:]]
    assert predicted == pytest.approx([s.seconds for s in measured[1:]], rel=0.3)


# --- reference jobs ---


@pytest.mark.parametrize("job", REFERENCE_JOBS, ids=str)
def test_reference_jobs_are_not_those_of_reported_cells(job):
    """Each is a cell of the half that may be fitted, or no cell at all."""
    cell = costs.Cell.of_key(job.key)
    assert ReferenceJob.of_key(job.key) == job
    if job.algorithm == "GRPO":
        assert cell.job_name not in {other.job_name for cells in costs.KINDS.values() for other in cells()}
    else:
        assert cell.is_fitted and cell in costs.cells()


def test_child_process_that_does_not_start(devices, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    assert jobs.time_reference_jobs(REFERENCE_JOBS[:1], devices, print) == {}


def test_jobs_on_other_devices(monkeypatch):
    """Jobs that need more devices are skipped; each round measures every job once."""
    rounds = []

    class Iterations:
        def __init__(self, algorithm, policy, devices):
            self.seconds, self.name = float(len(devices)), (len(devices), len(rounds))

        def measure(self):
            rounds.append(self)

    monkeypatch.setattr(jobs, "iterations_of", Iterations)
    devices = [types.SimpleNamespace(platform="gpu")] * 2
    found = jobs.time_reference_jobs(REFERENCE_JOBS, devices, print)
    assert set(found) == {job for job in REFERENCE_JOBS if job.devices <= 2}
    assert all(seconds == job.devices for job, seconds in found.items())
    first = [one for one in rounds if one.seconds == 1.0]
    turn = first[: len(first) // jobs._ROUNDS]
    assert first == turn * jobs._ROUNDS and len(set(map(id, turn))) == len(turn)


def test_merge_keeps_the_better_figure():
    first = {"memory": Figure(1e9, 0.1), "trip": Figure(2e-6, 0.3), "special": Figure(5.0)}
    second = {"memory": Figure(2e9, 0.2), "trip": Figure(3e-6, 0.2)}
    assert calibration.merge_figures(first, second) == {
        "memory": Figure(2e9, 0.2), "trip": Figure(2e-6, 0.3), "special": Figure(5.0)
    }  # fmt: skip
