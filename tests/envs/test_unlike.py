"""Teams of different agents: observations and actions worked by hand, and errors."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from algos import distributions
from envs import Box, Discrete, MultiDiscrete, probe
from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Team(probe.Unlike):
    """Defined outside `envs.probe`, so that `vectorize` wraps it in `Alike`."""


def test_probe_step_by_hand():
    env = envs.vectorize(Team())
    assert isinstance(env.single, envs.Alike) and env.action_space == Discrete(3)
    assert env.observation_space == envs.Dict(
        {"agent": Box(0.0, 1.0, (2,)), "seen_0": Discrete(3), "seen_1": Box(-1.0, 1.0, (2,))}
    )
    state, observation = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 8))
    category, numbers = state.inner
    np.testing.assert_array_equal(observation.observation["agent"], np.tile(np.eye(2), (8, 1, 1)))
    np.testing.assert_array_equal(observation.observation["seen_0"], np.stack([category, 0 * category], 1))
    np.testing.assert_array_equal(observation.observation["seen_1"][:, 0], np.zeros((8, 2)))
    np.testing.assert_array_equal(observation.observation["seen_1"][:, 1], numbers)
    assert observation.action_mask[0].tolist() == [[True, True, True], [True, True, False]]
    right = jnp.stack([category, (numbers[:, 0] > 0).astype(jnp.int32)], 1)
    _, step = jax.jit(env.step)(jax.random.split(jax.random.key(1), 8), state, right.at[0, 0].add(1) % 3)
    assert step.reward[0].tolist() == [0, 1] and step.reward[1:].min() == 1 and step.terminated.all()


def test_continuous_actions_by_hand():
    env = envs.vectorize(Team(continuous=True))
    assert env.action_space == Box((-1.0, -1.0), (1.0, 1.0), (2,))
    first, second = env.single.split(jnp.array([[0.5, 9.0], [-2.0, 0.25]]))
    assert first.tolist() == [1.5] and second.tolist() == [-1.0, 0.25]
    # An action component that an agent lacks does not count.
    one = distributions.Normal(jnp.zeros((2, 2)), jnp.zeros((2, 2)))
    both = distributions.masked(one, jnp.array([[True, False], [True, True]]))
    alone = distributions.Normal(jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    assert float(both.log_prob(jnp.ones((2, 2)))[0]) == pytest.approx(
        float(alone.log_prob(jnp.ones((1, 1)))[0])
    )
    assert both.entropy().tolist() == pytest.approx([1.418939, 2.837877], abs=1e-5)


def team(*acting, observed=None):
    observed = envs.Tuple((Box(0.0, 1.0, (1,)),) * len(acting)) if observed is None else observed
    spaces = {"observation_space": observed, "action_space": envs.Tuple(acting), "num_agents": len(acting)}
    return envs.Alike(types.SimpleNamespace(name="team", max_episode_steps=None, **spaces))


def test_discrete_actions_of_different_sizes():
    alike = team(MultiDiscrete((2, 4)), Discrete(3))
    assert alike.action_space == MultiDiscrete((3, 4))
    masks = alike.together((jnp.zeros(1), jnp.zeros(1))).action_mask
    assert masks.tolist() == [
        [True, True, False, True, True, True, True],
        [True] * 3 + [True, False, False, False],
    ]
    first, second = alike.split(jnp.array([[1, 3], [2, 0]]))
    assert first.tolist() == [1, 3] and int(second) == 2
    # Equal observation spaces give one part, and equal action spaces no mask.
    same = team(Discrete(2), Discrete(2))
    assert same.together((jnp.zeros(1), jnp.ones(1))).keys() == {"agent", "seen"}
    masked = envs.MaskedObservation(jnp.zeros(1), jnp.array([False, True, False]))
    assert (
        alike.together((jnp.zeros(1), masked)).action_mask[1].tolist()
        == [False, True, False, True] + [False] * 3
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: team(Discrete(2), Box(0.0, 1.0, (1,))).action_space,
            "some of its agents act by choices, others by",
        ),
        (
            lambda: team(Discrete(2), observed=Box(0.0, 1.0, ())).action_space,
            "observation_space must be an envs.Tuple",
        ),
        (lambda: team(Discrete(2)).together(jnp.zeros((1, 1))), "give a tuple of 1 observations"),
        (lambda: team(Discrete(2)).together((jnp.zeros(3),)), r"agent 0 an observation of shape \(3,\)"),
    ],
)
def test_invalid_teams_are_refused(make, message):
    with pytest.raises(FdgError, match=f"environment 'team': .*{message}"):
        make()
