"""The default number of host devices and of their threads."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from fdg import jaxprs
from fdg.commands.parse import parse
from fdg.cores import usable_cores
from fdg.running.host_devices import thread_count, threads_for
from fdg.training.settling import prepare

PPO = "--env probe:discount --policy gpu_only --total-steps 100000000"


def choose_count(words, cores):
    """The number of devices of a job that may choose it, up to `cores`, and the reason."""
    settled = prepare(dataclasses.replace(parse(words.split(), "", ""), max_host_devices=cores))
    assert settled.job.devices_chosen == len(settled.devices)
    return len(settled.devices), settled.devices_reason


def test_few_environments_use_one_device():
    few, many = (choose_count(f"{PPO} --num-envs {number}", 2) for number in (4, 8192))
    assert few[0] == 1 and re.match(r"GPUOnly\(\) on 1 device: .* ms per iteration predicted, ", few[1])
    assert many[0] == 2 and "x as fast as GPUOnly() on 1 device" in many[1]


@pytest.mark.parametrize(
    ("words", "cores", "count"),
    [
        # Agents do not communicate: all cores that divide them are used.
        (f"{PPO} --num-envs 512 --num-seeds 4", 2, 2),
        (f"{PPO} --num-envs 512 --num-seeds 3", 2, 1),
        (f"{PPO} --num-envs 512 --num-seeds 1", 8, 1),
        # 8192 environments are not divisible by 3: one of three devices would be idle.
        (f"{PPO} --num-envs 8192", 3, 2),
        # FSDP gathers parameters for each matmul, at a cost that is known only after compilation.
        (f"{PPO} --num-envs 8192 --parameters fsdp", 2, 1),
        # Programs and transfers of every step cost more than they save.
        (f"{PPO.replace('gpu_only', 'single_learner_fine')} --num-envs 64", 2, 1),
    ],
)
def test_device_count(words, cores, count):
    assert choose_count(words, cores)[0] == count


def test_thread_count():
    """One thread for small operations on one device; several devices have `threads_for` threads."""
    few, many = (
        fdg.trace(algos.PPO(env=envs.make("probe:discount"), num_envs=number)) for number in (4, 8192)
    )
    together, apart = policies.GPUOnly(), policies.SingleLearnerCoarse()
    assert thread_count(few, None, together, 1) == 1
    assert thread_count(many, None, together, 1) == thread_count(few, 10_000, together, 1) == usable_cores()
    for n in (2, 8):
        assert thread_count(few, None, together, n) == threads_for(n, in_order=True)
        for policy in (apart, policies.GPUOnly(parameters="fsdp")):
            assert thread_count(few, None, policy, n) == threads_for(n)


def test_largest_cost_by_hand():
    def program(x, w):  # costs: 12,000 for tanh of 6 x 20; 7,200 for a 6 x 20 x 30 matmul
        y = jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=1000)[0]
        return y @ w

    traced = jax.make_jaxpr(jax.jit(program))
    assert jaxprs.largest_cost(traced(jnp.zeros((6, 20)), jnp.zeros((20, 30))).jaxpr) == 12_000
    assert jaxprs.largest_cost(traced(jnp.zeros((6, 20)), jnp.zeros((20, 80))).jaxpr) == 19_200
