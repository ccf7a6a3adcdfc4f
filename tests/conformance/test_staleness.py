"""Staleness: actors that use parameters k iterations old, with the same numbers on any devices.

The oracle is plain Python: a list of past parameters, and the algorithm's own pieces called with them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from tests.conformance.comparison import assert_same, leaves, reference, start
from tests.user_algorithm import Gardener, Walker

Coarse, Central = policies.SingleLearnerCoarse, policies.Central


class Recorder:
    """Its metrics say which parameters the actor had: after iteration t the learner's are t + 1."""

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
    "central 3+1": (Central, {"workers": 3}, 4),
    "central 4+2": (Central, {"workers": 4, "servers": 2}, 8),
}


def engine(algorithm, setup, staleness, devices):
    policy, fields, count = POLICIES[setup]
    return fdg.compile(algorithm, policy(**fields, staleness=staleness), devices[:count])


@pytest.mark.parametrize("setup", ["coarse 1", "coarse 2", "coarse 8", "central 4+2"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_the_actor_uses_the_parameters_of_k_iterations_ago(staleness, setup, devices):
    """By value: version v is what v updates made; before there are old ones, the first are used."""
    compiled = engine(Recorder(), setup, staleness, devices)
    _, metrics = compiled.run(compiled.init(0), 7)
    used = [max(0, t - staleness) for t in range(7)]
    np.testing.assert_array_equal(metrics["used"], used)
    np.testing.assert_array_equal(metrics["walks"], np.cumsum(used))
    np.testing.assert_array_equal(metrics["version"], np.arange(1, 8))


# --- Walker against a history list; its iteration, written out with two weights ---


class LateWalker(Walker):
    """`iterate` of Walker, whose two actor calls get another weight than its learner."""

    def iterate_late(self, state, acting, slopes_too):
        """(state, metrics), acting with `acting` and updating `state.weight`.

        Gradients are taken at the weight that is updated. With `slopes_too` they belong to the group that
        acts: the first of an iteration is taken at `acting`, as what comes next is made within the iteration.
        """
        late, metrics = Walker.iterate(self, state._replace(weight=acting))
        # Neither what the environments did nor the metrics depend on the weight that is learned from.
        weight, momentum = self.learn_only(state, acting, acting if slopes_too else state.weight)
        return late._replace(weight=weight, momentum=momentum), metrics

    def learn_only(self, state, acting, seen):
        from tests import user_algorithm as parts

        def one(carry, keys):
            position, age, alive = carry
            action = parts.act(acting, position, keys)
            after, age, alive, reward = parts.step(position, age, alive, action)
            return (after, age, alive), (position, reward)

        keys = jax.random.split(jax.random.split(state.key)[1], (parts.T, self.num_envs))
        _, (positions, rewards) = jax.lax.scan(one, (state.position, state.age, state.alive), keys)
        samples = positions.swapaxes(0, 1).reshape(-1, parts.FEATURES)
        scores = parts.judge(rewards).swapaxes(0, 1).reshape(-1)
        weight, momentum = state.weight, state.momentum
        for _ in range(3):
            weight, momentum = parts.update(weight, momentum, parts.gradient(seen, samples, scores))
            seen = weight
        return weight, momentum


@functools.cache
def walker_oracle(staleness, iterations, slopes_too):
    walker = LateWalker(48)
    step = jax.jit(functools.partial(walker.iterate_late, slopes_too=slopes_too))
    state, metrics = start("walker 48"), []
    history = [state.weight] * (staleness + 1)  # oldest first, the present one last
    for _ in range(iterations):
        state, one = step(state, history[0])
        history = [*history[1:], state.weight]
        metrics.append(one)
    return state, history[:-1], jax.tree.map(lambda *m: jnp.stack(m), *metrics)


@pytest.mark.parametrize(
    ("setup", "staleness"),
    [("coarse 1", k) for k in (1, 2, 4)]
    + [("coarse 2", 2), ("coarse 3+2", 1), ("coarse 8", 4), ("central 3+1", 1), ("central 4+2", 2)],
)
def test_walker_against_plain_python(staleness, setup, devices):
    """Two runs are as one: 3 + 5 iterations are 8. Under Central the workers' gradients are late too."""
    compiled = engine(Walker(48), setup, staleness, devices)
    state, history, metrics = walker_oracle(staleness, 8, setup.startswith("central"))
    ours, first = compiled.run(compiled.plan.delayed.start(start("walker 48")), 3)
    ours, second = compiled.run(ours, 5)
    assert_same(state, compiled.algorithm_state(ours))
    assert_same([(w,) for w in history], list(ours.history))
    assert_same(metrics, {name: jnp.concatenate([first[name], second[name]]) for name in first})
    assert not np.allclose(
        reference("walker 48")[1]["reward"], metrics["reward"][:5], rtol=1e-4
    )  # it matters


def test_none_is_the_synchronous_program(devices):
    compiled = engine(Walker(48), "coarse 3+2", 0, devices)
    assert compiled.plan.delayed is None
    assert_same(reference("walker 48"), compiled.run(start("walker 48"), 5))


def test_an_engines_first_state_has_as_many_pasts(devices):
    compiled = engine(Walker(48), "coarse 2", 3, devices)
    state = compiled.init(3)
    assert [len(row) for row in state.history] == [1, 1, 1]
    assert_same(start("walker 48"), compiled.algorithm_state(state), 1e-6)
    assert_same([state.weight] * 3, [row[0] for row in state.history])
    assert jax.tree.structure(state) == jax.tree.structure(compiled.state_shape)


def test_actor_and_learner_that_take_turns_cannot_be_delayed(devices):
    """Gardener learns within its season, and acts on it in the same."""
    with pytest.raises(fdg.PlanError) as error:
        fdg.compile(Gardener(12), Coarse(actors=2, staleness=2), devices[:3])
    for word in ("staleness=2", "'pour' (actors)", "'tend' (learners)", "take turns", "use staleness=0"):
        assert word in str(error.value), str(error.value)


def test_what_is_late_is_what_the_actor_waits_for(devices):
    """The weight that the learner makes; not the positions, which the actors' own group makes."""
    plan = fdg.place(Walker(48), Coarse(actors=3, staleness=2), 4)
    paths = list(leaves(start("walker 48")))
    assert [paths[i] for i in plan.delayed.leaves] == [".weight"]
    # It comes from the iteration before, so the next one's actors need not wait for this one's learner.
    (late,) = [m for m in plan.movements if m.how == "transfer" and m.delay == "iteration"]
    assert late.bytes_per_iteration == 3 * 4 * 3  # float32[3], on each of the three actors
