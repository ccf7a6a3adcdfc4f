"""Staleness: actors use parameters that are k iterations old, with the same numbers on any devices.

`tests/placing/test_staleness.py` compares programs with plain Python that keeps old parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from tests.conformance.comparison import assert_same, leaves, reference, start
from tests.refusing import refuses
from tests.user_algorithm import Gardener, Walker

Coarse, Central = policies.SingleLearnerCoarse, policies.Central


class Recorder:
    """Its metrics have the version of the actor's parameters; iteration t makes version t + 1."""

    def init(self, key):
        return {"version": jnp.float32(0), "walks": jnp.zeros(8), "seen": jnp.zeros(8)}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(version, walks):
            return jnp.zeros_like(walks) + version

        @fdg.fragment("environment")
        def step(walks, action):
            return walks + action

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(version, walks):
            return 1 + 0 * version * jnp.sum(walks)

        @fdg.fragment("update", in_axes=None, out_axes=None)
        def update(version, change):
            return version + change

        action = act(state["version"] * 1.0, state["walks"])
        walks = step(state["walks"], action)
        version = update(state["version"], learn(state["version"], walks))
        metrics = {"used": jnp.mean(action), "walks": jnp.mean(walks), "version": version}
        return {"version": version, "walks": walks, "seen": action}, metrics


POLICIES = {
    "coarse 1": (Coarse, {}, 1),
    "coarse 2": (Coarse, {}, 2),
    "coarse 3+2": (Coarse, {"learners": 2}, 5),
    "coarse 8": (Coarse, {}, 8),
    "central 4+2": (Central, {"workers": 4, "servers": 2}, 8),
}


def engine(algorithm, setup, staleness, devices):
    policy, fields, count = POLICIES[setup]
    return fdg.compile(algorithm, policy(**fields, staleness=staleness), devices[:count])


@pytest.mark.parametrize("setup", ["coarse 1", "coarse 2", "coarse 8", "central 4+2"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_actor_uses_parameters_k_iterations_old(staleness, setup, devices):
    """Version v is after v updates; the first k iterations use the initial parameters."""
    compiled = engine(Recorder(), setup, staleness, devices)
    _, metrics = compiled.run(compiled.init(0), 7)
    used = [max(0, t - staleness) for t in range(7)]
    np.testing.assert_array_equal(metrics["used"], used)
    np.testing.assert_array_equal(metrics["walks"], np.cumsum(used))
    np.testing.assert_array_equal(metrics["version"], np.arange(1, 8))


def test_zero_staleness_is_synchronous(devices):
    compiled = engine(Walker(48), "coarse 3+2", 0, devices)
    assert compiled.plan.delayed is None
    assert_same(reference("walker 48"), compiled.run(start("walker 48"), 5))


def test_initial_history(devices):
    compiled = engine(Walker(48), "coarse 2", 3, devices)
    state = compiled.init(3)
    assert [len(row) for row in state.history] == [1, 1, 1]
    assert_same(start("walker 48"), compiled.algorithm_state(state), 1e-6)
    assert_same([state.weight] * 3, [row[0] for row in state.history])
    assert jax.tree.structure(state) == jax.tree.structure(compiled.state_shape)


def test_alternating_actor_and_learner_are_refused(devices):
    """Gardener's actor and learner alternate in one loop."""
    with refuses(
        *("staleness=2", "'pour' (actors)", "'tend' (learners)", "in one loop", "use staleness=0"),
        kind=fdg.PlanError,
    ):
        fdg.compile(Gardener(12), Coarse(actors=2, staleness=2), devices[:3])


def test_delayed_leaves(devices):
    """Only the learner's weight is delayed, not the positions, which the actors' group makes."""
    plan = fdg.place(Walker(48), Coarse(actors=3, staleness=2), 4)
    paths = list(leaves(start("walker 48")))
    assert [paths[i] for i in plan.delayed.leaves] == [".weight"]
    # It is sent from the iteration before, so that actors do not wait for the learner.
    (movement,) = [m for m in plan.movements if m.how == "transfer" and m.delay == "iteration"]
    assert movement.bytes_per_iteration == 3 * 4 * 3  # float32[3], on each of the three actors
