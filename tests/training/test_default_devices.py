"""How many host devices a job gets that names no number, and that a run keeps to it."""

import dataclasses
import json
import subprocess
import sys

import pytest

import algos
import envs
import fdg
import policies
from fdg.errors import PlanError
from fdg.training import default_devices
from fdg.training.default_devices import choose, iteration_seconds
from tests.tiny import Walk


@pytest.fixture(scope="module")
def ppo():
    """The graph of PPO of a number of environments."""
    made = {}

    def graph(num_envs):
        if num_envs not in made:
            environment = envs.make("probe:discount")
            made[num_envs] = fdg.trace(algos.PPO(env=environment, num_envs=num_envs, total_steps=10**8))
        return made[num_envs]

    return graph


def test_few_environments_stay_on_one_device_and_many_are_split(ppo):
    few, many = choose(ppo(4), policies.GPUOnly(), 2), choose(ppo(8192), policies.GPUOnly(), 2)
    assert few.devices == 1 and few.reason.startswith("1 of 2 cores: an iteration is predicted to take ")
    assert many.devices == 2 and many.reason.endswith(" on 1")


def test_the_prediction_by_hand(ppo):
    graph = ppo(64)
    plan = fdg.place(graph, policies.GPUOnly(), 2)
    gradient, update, learn = map(graph.fragment, ("gradient", "update", "learn"))
    act, step = map(graph.fragment, ("act", "step"))
    whole = learn.flops_per_call + act.calls_per_iteration * (act.flops_per_call + step.flops_per_call)
    copied = update.calls_per_iteration * update.flops_per_call  # without a batch: on both devices
    assert gradient.flops_per_call * gradient.calls_per_iteration > 10 * copied
    exchanges = plan.programs[0].collectives
    number, size = sum(c.calls for c in exchanges), sum(c.calls * c.bytes for c in exchanges)
    expected = ((whole - copied) / 2 + copied) / default_devices.FLOPS_PER_S + default_devices.MARGIN * (
        number * default_devices.EXCHANGE_S + size / default_devices.BYTES_PER_S
    )
    assert iteration_seconds(plan) == pytest.approx(expected, rel=1e-6)
    one = iteration_seconds(fdg.place(graph, policies.GPUOnly(), 1))
    assert one == pytest.approx(whole / default_devices.FLOPS_PER_S, rel=1e-6)


@pytest.mark.parametrize(("num_seeds", "cores", "devices"), [(4, 2, 2), (3, 2, 1), (6, 4, 3), (1, 8, 1)])
def test_agents_never_talk_so_all_cores_that_divide_them_are_used(num_seeds, cores, devices):
    assert choose(fdg.trace(Walk()), policies.GPUOnly(), cores, num_seeds).devices == devices


def test_a_batch_that_does_not_divide(ppo):
    choice = choose(ppo(8192), policies.GPUOnly(), 3)
    assert choice.devices == 2  # three would leave one idle


def test_a_policy_that_cannot_have_what_it_asks_for_says_so(ppo):
    with pytest.raises(PlanError, match="split"):
        choose(ppo(64), policies.GPUOnly(parameters="fsdp"), 2, num_seeds=2)


def test_a_policy_of_several_groups_pays_for_each_program_and_move(ppo):
    plan = fdg.place(ppo(64), policies.SingleLearnerFine(), 2)
    assert iteration_seconds(plan) > 2 * 128 * default_devices.STEP_S * default_devices.MARGIN
    assert choose(ppo(64), policies.SingleLearnerFine(), 2).devices == 1


def test_of_many_cores_not_every_number_is_looked_at():
    assert list(default_devices._candidates(4)) == [1, 2, 3, 4]
    assert list(default_devices._candidates(40)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]


def test_a_run_keeps_to_its_choice(tmp_path):
    def train(*words):
        words = [sys.executable, "-m", "fdg.train", *words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = str(tmp_path / "run")
    words = "--algo tests.tiny:Walk --num-seeds 2 --total-steps 64 --eval-episodes 0"
    said = train(*words.split(), "--out", run)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["devices"] is None and f"devices: {config['devices_chosen']} of " in said
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "devices_chosen": 1}))
    (tmp_path / "run" / "summary.json").unlink()
    assert "on 1 device, 2 agents" in train("--resume", run, "--trust")


def test_a_plan_of_nothing_but_one_device_says_so():
    assert choose(fdg.trace(Walk()), policies.GPUOnly(), 1).reason == "1 of 1 core"
    assert dataclasses.is_dataclass(default_devices.Choice)
