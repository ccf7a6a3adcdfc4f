"""The policy of a job that names none: predicted, kept, and no less simple than it has to be."""

import dataclasses
import json
import types

import pytest

import fdg
import policies
from bench import costs
from fdg.commands.parse import parse as parsed
from fdg.costs.choosing import Candidate
from fdg.costs.machine import REFERENCE
from fdg.errors import FdgError
from fdg.training import settling
from fdg.training.settling import prepare, settle

PUPIL = "--algo tests.tiny:Pupil --num-envs 64 --total-steps 512"


def parse(line):
    return parsed(line.split(), "", "")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where programs, and choices, are kept."""
    monkeypatch.setattr(settling, "cache_directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def looked(monkeypatch):
    """How often candidates were looked at."""
    calls = []
    auto = policies.auto
    monkeypatch.setattr(settling.policies, "auto", lambda *args, **how: calls.append(1) or auto(*args, **how))
    return calls


def test_what_was_chosen_is_kept_for_the_next_start(directory, looked):
    job = parse(f"{PUPIL} --devices 2")
    graph = fdg.trace(job.algorithm)
    first, second = settle(job, graph), settle(job, graph)
    assert len(looked) == 1 and first.message == second.message and first.message.startswith("policy: ")
    assert first.job.policy == second.job.policy
    assert first.job.config["policy_asked"] == "auto"
    (kept,) = (directory / "choices").iterdir()
    assert policies.get(json.loads(kept.read_text())["policy"]) is type(first.job.policy)
    other = parse(f"{PUPIL} --devices 4")
    settle(other, fdg.trace(other.algorithm))
    assert len(looked) == 2


@pytest.mark.parametrize(
    "content", ["", "{}", '{"policy": "gpu_onyl", "fields": {}, "devices": 2, "reason": ""}']
)
def test_a_file_that_cannot_be_read_is_written_anew(directory, looked, content):
    job = parse(f"{PUPIL} --devices 2")
    graph = fdg.trace(job.algorithm)
    first = settle(job, graph)
    (kept,) = (directory / "choices").iterdir()
    kept.write_text(content)
    assert settle(job, graph).job.policy == first.job.policy and len(looked) == 2
    assert json.loads(kept.read_text())["devices"] == 2


def test_who_asks_for_it_gets_the_table(directory, looked):
    job = parse(f"{PUPIL} --devices 2 --policy auto")
    graph = fdg.trace(job.algorithm)
    assert "chosen: " in settle(job, graph).message and "chosen: " in settle(job, graph).message
    assert len(looked) == 2 and not list(directory.iterdir())


def test_one_device_leaves_no_choice(looked):
    job = parse(f"{PUPIL} --devices 1")
    settled = settle(job, fdg.trace(job.algorithm))
    assert settled.job.policy == policies.GPUOnly() and not looked and not settled.message


def rows_of(*seconds):
    """A choice among candidates that take so long."""
    rows = tuple(
        types.SimpleNamespace(candidate=candidate, prediction=True, seconds=taken)
        for candidate, taken in sorted(seconds, key=lambda one: one[1])
    )
    best = rows[0]
    return types.SimpleNamespace(
        rows=rows, candidate=best.candidate, policy=best.candidate.policy, devices=best.candidate.devices,
        seconds=best.seconds, reason="it is quickest",
    )  # fmt: skip


def test_another_policy_has_to_promise_more_than_predictions_are_off_by():
    plain, other = policies.GPUOnly(), policies.SingleLearnerCoarse()
    near = rows_of((Candidate(plain, 2), 1.0), (Candidate(other, 2), 0.8))
    far = rows_of((Candidate(plain, 2), 1.0), (Candidate(other, 2), 0.7))
    assert settling._best_or_default(near) == (
        plain,
        2,
        f"{plain}: no other is predicted to be 1.3 times as quick",
    )
    assert settling._best_or_default(far) == (other, 2, "it is quickest")
    best = rows_of((Candidate(plain, 2), 1.0), (Candidate(other, 2), 1.5))
    assert (
        settling._best_or_default(best)[2]
        == f"{plain}: predicted to be 1.50 times as quick as {other}, the next"
    )
    alone = rows_of((Candidate(plain, 2), 1.0))
    assert settling._best_or_default(alone)[2] == f"{plain}: nothing else can be carried out"


def test_where_one_device_is_quickest_no_other_policy_is_looked_at(directory, looked):
    few = parse("--algo tests.tiny:Pupil --num-envs 4 --total-steps 512")
    settled = settle(dataclasses.replace(few, cores=2), fdg.trace(few.algorithm))
    assert settled.job.policy == policies.GPUOnly() and settled.job.devices_chosen == 1 and len(looked) == 1
    assert settled.message.startswith("policy: GPUOnly() on 1 device: ")
    assert settle(dataclasses.replace(few, cores=2), fdg.trace(few.algorithm)).job.devices_chosen == 1
    assert len(looked) == 1  # it was kept


def test_without_rates_it_is_gpu_only(monkeypatch):
    def unknown(*args, **how):
        raise FdgError("no rates are known for devices of kind 'abacus'")

    monkeypatch.setattr(settling.policies, "auto", unknown)
    job = parse(f"{PUPIL} --devices 2 --program-cache off")
    settled = settle(job, fdg.trace(job.algorithm))
    assert settled.job.policy == policies.GPUOnly() and settled.message == ""


def test_environments_on_the_host_are_not_predicted(looked):
    job = parse("--env gymnasium:CartPole-v1 --num-envs 2 --devices 2")
    settled = settle(job, fdg.trace(job.algorithm))
    assert settled.job.policy == policies.GPUOnly() and not looked


def test_rates_of_nobody_are_those_of_the_cells():
    """Where a machine has no calibration, rates are about those that the model was fitted with."""
    kept = json.loads(costs.Machine("intel-xeon-6a7678").calibration_file.read_text())["figures"]
    for name, figure in kept.items():
        assert REFERENCE.rate(name) == pytest.approx(figure["value"], rel=0.05), name


def test_a_job_that_has_a_policy_keeps_it():
    job = parse(f"{PUPIL} --policy gpu_only")
    graph = fdg.trace(job.algorithm)
    assert settle(job, graph).job is job


@pytest.mark.parametrize("words", ["", " --policy auto --may-change shuffle"])
def test_of_several_processes_the_first_one_decides(directory, monkeypatch, words):
    """What they exchange goes through JSON, policies and fields of the algorithm too."""
    coarse = policies.SingleLearnerCoarse(actors=3, learners=1)

    def exchange(value):
        """What process 0 found in place of what this one did."""
        found = json.loads(json.dumps(value))
        other = {"policy": "SingleLearnerCoarse", "fields": {"actors": 3, "learners": 1}}
        other |= {"devices": 4, "reason": "quick"}
        return [[{**found[0], **other}, {"shuffle": "time"}] if isinstance(found, list) else other, found]

    monkeypatch.setattr(settling.distributed, "exchange", exchange)
    job = parse(f"--env probe:value --num-envs 12 --devices 4 --total-steps 4096{words}")
    settled = settle(job, fdg.trace(job.algorithm)).job
    assert settled.policy == coarse and settled.config["policy"] == "single_learner_coarse"
    if words:
        assert settled.algorithm.shuffle == settled.config["hyperparameters"]["shuffle"] == "time"


def test_a_lag_that_is_asked_for_is_a_number_in_the_configuration():
    """So that a run's numbers follow from its file, and not from the machine."""
    job = parse(f"{PUPIL} --policy single_learner_coarse --lag auto --devices 2")
    assert job.described["lag"] == "auto"
    settled = prepare(job, plans_only=True)
    lag = settled.job.policy.lag
    assert type(lag) is int and settled.job.config["lag"] == lag and lag in range(5)
    assert f"lag: {lag} of 2 micro-batches per iteration" in settled.message
    again = prepare(settled.job, plans_only=True)
    assert (again.job.policy, again.message) == (settled.job.policy, "")


def test_a_lag_is_not_chosen_where_there_is_a_staleness():
    job = parse(f"{PUPIL} --policy single_learner_coarse --devices 2 --staleness 1 --lag auto")
    with pytest.raises(
        FdgError, match="--lag auto and --staleness 1: both set the age of actors' parameters"
    ):
        prepare(job, plans_only=True)
