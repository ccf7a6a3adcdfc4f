"""How many host devices a job gets that names no number, and that a run keeps to it."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from fdg import jaxprs
from fdg.cores import usable_cores
from fdg.errors import FdgError, PlanError
from fdg.running.host_devices import threads_for
from fdg.training import default_devices
from fdg.training import devices as fitting
from fdg.training.default_devices import choose, iteration_seconds
from tests.tiny import Walk

TRAIN_AND_TELL = """
import os, sys, jax
from fdg.train import main
status = main(sys.argv[1:])
print(f"threads {os.environ.get('PJRT_NPROC')}, devices {len(jax.devices())}")
sys.exit(status)
"""


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


def test_no_prediction_is_printed_with_an_exponent():
    printed = [default_devices.milliseconds(s) for s in (0.0098765, 0.09996, 0.1, 1.7)]
    assert printed == ["9.88", "100", "100", "1,700"]


def test_few_environments_stay_on_one_device_and_many_are_split(ppo):
    few, many = choose(ppo(4), policies.GPUOnly(), 2), choose(ppo(8192), policies.GPUOnly(), 2)
    assert few.devices == 1 and few.reason.startswith("1 of 2 cores: an iteration is predicted to take ")
    assert many.devices == 2 and many.reason.endswith(" on 1")


def test_the_prediction_by_hand(ppo):
    graph = ppo(64)
    plan = fdg.place(graph, policies.GPUOnly(), 2)
    gradient, update, learn = map(graph.fragment, ("gradient", "update", "learn"))
    act, step = map(graph.fragment, ("act", "step"))

    def seconds(fragment):
        elements = fragment.elements_per_call
        products = (fragment.flops_per_call - elements) / default_devices.FLOPS_PER_S
        return fragment.calls_per_iteration * (products + elements / default_devices.ELEMENTS_PER_S)

    whole = seconds(learn) + seconds(act) + seconds(step)
    copied = seconds(update)  # without a batch: on both devices
    assert gradient.flops_per_call * gradient.calls_per_iteration > 10 * copied
    exchanges = plan.programs[0].collectives
    number, size = sum(c.calls for c in exchanges), sum(c.calls * c.bytes for c in exchanges)
    expected = (
        (whole - copied) / 2
        + copied
        + default_devices.MARGIN * (number * default_devices.EXCHANGE_S + size / default_devices.BYTES_PER_S)
    )
    assert iteration_seconds(plan) == pytest.approx(expected, rel=1e-6)
    one = iteration_seconds(fdg.place(graph, policies.GPUOnly(), 1))
    assert one == pytest.approx(whole, rel=1e-6)


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


def test_groups_that_lag_work_at_the_same_time(ppo):
    """Of the same graph with and without staleness: the longer of both groups in place of their sum."""
    graph = ppo(64)
    both = fdg.place(graph, policies.SingleLearnerCoarse(), 2)
    lagging = fdg.place(graph, policies.SingleLearnerCoarse(staleness=1), 2)
    moves = [
        sum(m.crossings_per_iteration for m in plan.movements if m.how == "transfer")
        for plan in (both, lagging)
    ]
    assert moves[0] and moves[1]
    together, apart = iteration_seconds(lagging), iteration_seconds(both)
    learner = graph.fragment("learn").flops_per_call / default_devices.FLOPS_PER_S
    assert together < 0.95 * apart and together > learner


def test_of_many_cores_not_every_number_is_looked_at():
    assert list(default_devices._candidates(4)) == [1, 2, 3, 4]
    assert list(default_devices._candidates(40)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]


def test_one_thread_where_all_operations_are_small(ppo):
    few, many = ppo(4), ppo(8192)
    assert [default_devices.threads_of(few, n) for n in (1, 2, 8)] == [1, *map(threads_for, (2, 8))]
    assert default_devices.threads_of(many, 2, in_order=True) == max(2, os.cpu_count())
    assert default_devices.threads_of(many, 1) == usable_cores()
    assert default_devices.threads_of(few, 1, num_seeds=10_000) == usable_cores()


def test_the_largest_operation_by_hand():
    def program(x, w):  # a tanh of 6 x 20 counts as 12,000, a product of 6 x 20 x 30 as 7,200
        y = jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=1000)[0]
        return y @ w

    traced = jax.make_jaxpr(jax.jit(program))
    assert jaxprs.largest_operation(traced(jnp.zeros((6, 20)), jnp.zeros((20, 30))).jaxpr) == 12_000
    assert jaxprs.largest_operation(traced(jnp.zeros((6, 20)), jnp.zeros((20, 80))).jaxpr) == 19_200


def test_wide_products_by_hand():
    def program(x, w, narrow):
        y = jax.lax.fori_loop(0, 3, lambda _, x: x @ w, x)
        return jax.lax.cond(y[0, 0] > 0, lambda y: y @ w, lambda y: jnp.tanh(y), y) @ narrow

    jaxpr = jax.make_jaxpr(jax.jit(program))(jnp.zeros((20, 8)), jnp.zeros((8, 8)), jnp.zeros((8, 4))).jaxpr
    each = 2 * 20 * 8 * 8
    assert jaxprs.wide_product_flops(jaxpr, 8, 0) == 4 * each
    assert jaxprs.wide_product_flops(jaxpr, 4, 0) == 4 * each + each // 2
    assert jaxprs.wide_product_flops(jaxpr, 9, 0) == jaxprs.wide_product_flops(jaxpr, 8, each + 1) == 0


def test_elements_by_hand():
    def program(x, w):
        y = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]
        return jax.lax.cond(y[0, 0] > 0, lambda y: y @ w, lambda y: jnp.tanh(y) * 2, y)

    jaxpr = jax.make_jaxpr(jax.jit(program))(jnp.zeros((20, 8)), jnp.zeros((8, 8))).jaxpr
    loop, question, product, others = 3 * 160, 1, 2 * 20 * 8 * 8, 2 * 160
    assert jaxprs.elements_of(jaxpr) == loop + question + others  # each by the dearest branch
    assert jaxprs.flops_of(jaxpr) == loop + question + product


def test_where_one_device_uses_all_cores_it_stays_one():
    def chosen(width):
        algorithm = algos.PPO(
            env=envs.make("probe:discount"), num_envs=2048, hidden=(width, width), total_steps=10**8
        )
        return choose(fdg.trace(algorithm), policies.GPUOnly(), 2).devices

    assert (chosen(64), chosen(256)) == (2, 1)


def test_a_run_keeps_to_its_choice(tmp_path):
    def train(*words):
        words = [sys.executable, "-c", TRAIN_AND_TELL, *words]
        alone = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=alone)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = str(tmp_path / "run")
    words = "--algo tests.tiny:Walk --policy gpu_only --num-seeds 2 --total-steps 64 --eval-episodes 0"
    said = train(*words.split(), "--out", run)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["devices"] is None and f"devices: {config['devices_chosen']} of " in said
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "devices_chosen": 1}))
    (tmp_path / "run" / "summary.json").unlink()
    said = train("--resume", run, "--trust")
    assert "on 1 device, 2 agents" in said
    assert said.endswith("threads 1, devices 1\n")


def test_programs_of_several_groups_are_made_again_with_more_threads(tmp_path):
    """For no order holds between groups. Of the graph too, into which staleness has written its delays."""
    words = "--algo tests.tiny:Pupil --num-envs 12 --policy single_learner_coarse --devices 3 --staleness 1"
    alone = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_TELL, *words.split(), *"--total-steps 96 --eval-episodes 0".split(),
         "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=600, env=alone,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"threads {threads_for(3)}, devices 3\n"), done.stdout


def test_where_no_more_threads_can_be_had_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(fitting, "has_few_threads", lambda count: True)
    monkeypatch.setattr(fitting, "devices_of", lambda *_, **__: (jax.devices()[:2], None))
    engine = fdg.compile(Walk(), policies.GPUOnly(), jax.devices()[:2])
    monkeypatch.setattr(engine, "is_in_order", lambda: False)
    with pytest.raises(FdgError, match=f"--devices 2: .* set PJRT_NPROC={threads_for(2)}"):
        fitting.with_enough_threads(None, engine, fdg.trace(Walk()), begins=False)


def test_a_plan_of_nothing_but_one_device_says_so():
    assert choose(fdg.trace(Walk()), policies.GPUOnly(), 1).reason == "1 of 1 core"
    assert dataclasses.is_dataclass(default_devices.Choice)
