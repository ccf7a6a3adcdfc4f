"""The default distribution policy: chosen by predicted time, cached, and GPUOnly if nearly as fast."""

import dataclasses
import json
import types

import pytest

import policies
from bench import costs
from fdg.commands.parse import parse as parsed
from fdg.costs.choosing import Candidate
from fdg.costs.machine import UNCALIBRATED_CPU
from fdg.errors import FdgError
from fdg.training import settling
from fdg.training.settling import prepare

PUPIL = "--algo tests.tiny:Pupil --num-envs 64 --total-steps 512"


def parse(line):
    return parsed(line.split(), "", "")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The directory in which programs and choices are cached."""
    monkeypatch.setattr(settling, "cache_directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def searches(monkeypatch):
    """The searches among candidates: one item per call of `policies.auto`."""
    calls = []
    auto = policies.auto
    monkeypatch.setattr(settling.policies, "auto", lambda *args, **how: calls.append(1) or auto(*args, **how))
    return calls


def test_choice_is_cached(folder, searches):
    job = parse(f"{PUPIL} --devices 2")
    first, second = prepare(job), prepare(job)
    assert len(searches) == 1 and first.message == second.message and first.message.startswith("policy: ")
    assert first.job.policy == second.job.policy
    assert first.job.config["policy_asked"] == "auto"
    (cached,) = (folder / "choices").iterdir()
    assert policies.get(json.loads(cached.read_text())["policy"]) is type(first.job.policy)
    prepare(parse(f"{PUPIL} --devices 4"))
    assert len(searches) == 2


@pytest.mark.parametrize(
    "content", ["", "{}", '{"policy": "gpu_onyl", "fields": {}, "devices": 2, "reason": ""}']
)
def test_unreadable_cache_file_is_rewritten(folder, searches, content):
    job = parse(f"{PUPIL} --devices 2")
    first = prepare(job)
    (cached,) = (folder / "choices").iterdir()
    cached.write_text(content)
    assert prepare(job).job.policy == first.job.policy and len(searches) == 2
    assert json.loads(cached.read_text())["devices"] == 2


def test_explicit_auto_prints_the_table(folder, searches):
    job = parse(f"{PUPIL} --devices 2 --policy auto")
    assert "chosen: " in prepare(job).message and "chosen: " in prepare(job).message
    assert len(searches) == 2 and not list(folder.iterdir())


def test_one_device_needs_no_search(searches):
    job = parse(f"{PUPIL} --devices 1")
    settled = prepare(job)
    assert settled.job.policy == policies.GPUOnly() and not searches and not settled.message


def ranking(*seconds):
    """A choice among candidates with these predicted seconds."""
    rows = tuple(
        types.SimpleNamespace(candidate=candidate, prediction=True, seconds=taken)
        for candidate, taken in sorted(seconds, key=lambda one: one[1])
    )
    best = rows[0]
    return types.SimpleNamespace(
        rows=rows, candidate=best.candidate, policy=best.candidate.policy, devices=best.candidate.devices,
        seconds=best.seconds, reason="it is quickest",
    )  # fmt: skip


def test_default_is_kept_within_the_prediction_error():
    plain, other = policies.GPUOnly(), policies.SingleLearnerCoarse()
    small_gain = ranking((Candidate(plain, 2), 1.0), (Candidate(other, 2), 0.8))
    large_gain = ranking((Candidate(plain, 2), 1.0), (Candidate(other, 2), 0.7))
    assert settling._best_or_default(small_gain) == (
        plain,
        2,
        f"{plain}: no other is predicted to be 1.3 times as quick",
    )
    assert settling._best_or_default(large_gain) == (other, 2, "it is quickest")
    default_best = ranking((Candidate(plain, 2), 1.0), (Candidate(other, 2), 1.5))
    assert (
        settling._best_or_default(default_best)[2]
        == f"{plain}: predicted to be 1.50 times as quick as {other}, the next"
    )
    single = ranking((Candidate(plain, 2), 1.0))
    assert settling._best_or_default(single)[2] == f"{plain}: nothing else can be carried out"


def test_one_device_is_chosen_and_cached(folder, searches):
    few = parse("--algo tests.tiny:Pupil --num-envs 4 --total-steps 512")
    settled = prepare(dataclasses.replace(few, max_host_devices=2))
    assert settled.job.policy == policies.GPUOnly() and settled.job.devices_chosen == 1 and len(searches) == 1
    assert settled.message.startswith("policy: GPUOnly() on 1 device: ")
    assert prepare(dataclasses.replace(few, max_host_devices=2)).job.devices_chosen == 1
    assert len(searches) == 1  # from the cache


def test_several_processes_use_all_devices(monkeypatch, devices):
    """One process started a run with a number of devices that fdg chose, and two processes resume it."""
    job = dataclasses.replace(parse(f"{PUPIL} --policy gpu_only"), devices_chosen=1)
    assert len(prepare(job).devices) == 1
    monkeypatch.setattr(settling.distributed, "count", lambda: 2)
    assert prepare(job).devices == devices


def test_cores_limit_only_host_devices(monkeypatch):
    """A machine may have more accelerators than cores."""
    kind = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "process_index": 0}
    gpus = [types.SimpleNamespace(**kind) for _ in range(4)]

    def auto(algorithm, devices, **how):
        raise FdgError(f"a choice among {len(devices)} devices")

    monkeypatch.setattr(settling, "available_devices", lambda count: gpus[:count])
    monkeypatch.setattr(settling.policies, "auto", auto)
    with pytest.raises(FdgError, match="among 4 devices"):
        prepare(dataclasses.replace(parse(f"{PUPIL} --policy auto"), max_host_devices=2))


def test_devices_of_an_earlier_resume_are_kept(tmp_path):
    """A resume with `--devices` stores that number beside the number that the run chose when it started."""
    config = {**parse(PUPIL).config, "devices": 1, "devices_chosen": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(prepare(parse(f"--resume {tmp_path} --trust")).devices) == 1


def test_unknown_device_rates_give_gpu_only(monkeypatch):
    def unknown(*args, **how):
        raise FdgError("no rates are known for devices of kind 'abacus'")

    monkeypatch.setattr(settling.policies, "auto", unknown)
    job = parse(f"{PUPIL} --devices 2 --program-cache off")
    settled = prepare(job)
    assert settled.job.policy == policies.GPUOnly() and settled.message == ""


def test_host_environments_need_no_search(searches):
    job = parse("--env gymnasium:CartPole-v1 --num-envs 2 --devices 2")
    settled = prepare(job)
    assert settled.job.policy == policies.GPUOnly() and not searches


def test_reference_rates_match_the_calibration():
    """The rates used without a calibration are within 5% of those of the fitted machine."""
    figures = json.loads(costs.Machine("intel-xeon-6a7678").calibration_file.read_text())["figures"]
    for name, figure in figures.items():
        assert UNCALIBRATED_CPU.rate(name) == pytest.approx(figure["value"], rel=0.05), name


def test_explicit_policy_is_kept():
    job = parse(f"{PUPIL} --policy gpu_only --devices 2")
    assert prepare(job).job == job


@pytest.mark.parametrize("words", ["", " --policy auto --may-change shuffle"])
def test_process_0_chooses(folder, monkeypatch, words):
    """Processes exchange JSON, including policies and fields of the algorithm."""
    coarse = policies.SingleLearnerCoarse(actors=1, learners=1)

    def exchange(value):
        """The choices of process 0 and of this process."""
        found = json.loads(json.dumps(value))
        other = {"policy": "SingleLearnerCoarse", "fields": {"actors": 1, "learners": 1}, "devices": 2}
        return [{**found, **other, "changes": {"shuffle": "time"} if words else {}}, found]

    monkeypatch.setattr(settling.distributed, "exchange", exchange)
    few = "--env probe:value --num-envs 12 --total-steps 4096" if words else PUPIL
    job = parse(f"{few} --devices 2{words}")
    settled = prepare(job).job
    assert settled.policy == coarse and settled.config["policy"] == "single_learner_coarse"
    if words:
        assert settled.algorithm.shuffle == settled.config["hyperparameters"]["shuffle"] == "time"


def test_auto_lag_is_stored_as_a_number():
    """The results then depend on the configuration file, not on the machine."""
    job = parse(f"{PUPIL} --policy single_learner_coarse --lag auto --devices 2")
    assert job.described["lag"] == "auto"
    settled = prepare(job, plans_only=True)
    lag = settled.job.policy.lag
    assert type(lag) is int and settled.job.config["lag"] == lag and lag in range(5)
    assert f"lag: {lag} of 2 micro-batches per iteration" in settled.message
    again = prepare(settled.job, plans_only=True)
    assert (again.job.policy, again.message) == (settled.job.policy, "")


@dataclasses.dataclass(frozen=True)
class OnlyLag:
    """A policy with a lag and without a staleness."""

    lag: int = 0

    def place(self, devices):
        return policies.Split(lag=self.lag).place(devices)


def test_auto_lag_of_a_policy_without_staleness():
    job = parse(f"{PUPIL} --policy {__name__}:OnlyLag --devices 2 --lag auto")
    assert prepare(job, plans_only=True).job.policy.lag in range(5)


def test_auto_lag_with_staleness_is_refused():
    job = parse(f"{PUPIL} --policy single_learner_coarse --devices 2 --staleness 1 --lag auto")
    with pytest.raises(
        FdgError, match="--lag auto and --staleness 1: both set the age of actors' parameters"
    ):
        prepare(job, plans_only=True)
