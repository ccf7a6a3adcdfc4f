"""Distribution policies of RLHF: their groups, and equality with plain JAX."""

import functools

import jax
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from policies import Colocated, Split, Standalone
from tests.conformance import dialogue
from tests.conformance.comparison import assert_same, copied, plain
from tests.conformance.dialogue import Dialogue

ITERATIONS = 3
SETUPS = {  # policy, devices; real algorithms: tests/rlhf/synchronous.py, in float64
    "hybrid": (Colocated(model_parallel=4, generation_parallel=2), 8),
    "split, both sharded": (Split(actors=4, learners=4, model_parallel=2, generation_parallel=2), 8),
    "standalone": (Standalone(actors=2, learners=2, references=1, critics=1, rewards=1), 7),
}


@functools.cache
def reference():
    """Initial state, and the results of plain JAX."""
    algorithm = Dialogue()
    state = jax.jit(algorithm.init)(jax.random.key(3))
    return state, plain(algorithm, copied(state), ITERATIONS)


def test_all_rlhf_policies_are_tested():
    assert {type(policy) for policy, _ in SETUPS.values()} == {
        policies.get(name) for name in dialogue.POLICIES
    }


@pytest.mark.parametrize("count", [1, 2, 4])
def test_separate_generation_group_needs_two_devices(count):
    devices = [f"cpu:{i}" for i in range(count)]
    placed = Colocated(model_parallel=count, generation_parallel=1).place(devices)
    names = {group.name for group in placed.values()}
    assert names == ({"all"} if count == 1 else {"training", "generation"})
    assert {group.model for group in placed.values()} == {1, count}


@pytest.mark.parametrize("setup", SETUPS)
def test_matches_plain_jax(setup, devices):
    policy, count = SETUPS[setup]
    engine = fdg.compile(Dialogue(), policy, devices[:count])
    state, expected = reference()
    actual = engine.run(copied(state), ITERATIONS)
    assert_same(expected, actual)
    np.testing.assert_array_equal(actual[1]["tokens"], expected[1]["tokens"])
    assert not engine.unexplained()


def test_devices_without_a_fragment_are_idle():
    """PPO has no reference model: the plan reports its device as idle."""
    plan = fdg.place(algos.PPO(env=envs.make("CartPole-v1"), num_envs=12), Standalone(), 4)
    assert plan.idle == (2,) and [group.devices for group in plan.groups] == [(0, 1), (3,)]
    assert "idle: 2 (Standalone places no fragment there)" in str(plan)
