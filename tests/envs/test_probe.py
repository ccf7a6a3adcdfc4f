"""Probe environments give the rewards that their docstrings state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import probe
from tests.envs.conformance import assert_conforms


def play(env, policy, num_envs=64, steps=12):
    """Observations and time steps `[T, B, ...]` of `policy(observation [B, ...], t)`."""
    keys = jax.random.split(jax.random.key(0), (steps + 1, num_envs))
    state, observation = env.reset(keys[0])
    observations, steps_taken = [], []
    for t in range(steps):
        observations.append(observation)
        state, step = env.step(keys[t + 1], state, policy(observation, t))
        observation = step.observation
        steps_taken.append(step)
    observations = jax.tree.map(lambda *leaves: np.stack(leaves), *observations)
    return observations, jax.tree.map(lambda *leaves: np.stack(leaves), *steps_taken)


def zeros(observation, t):
    return jnp.zeros(64, jnp.int32)


@pytest.mark.parametrize("name", sorted(probe.factories()))
def test_probes_conform(name):
    assert_conforms(envs.make(name))


def test_value():
    _, step = play(envs.make("probe:value"), zeros)
    assert (step.reward == 1).all() and step.terminated.all()


def test_value_of_observation():
    observations, step = play(envs.make("probe:value_of_observation"), zeros)
    np.testing.assert_array_equal(step.reward, observations[..., 0])
    assert set(np.unique(observations)) == {-1, 1} and step.terminated.all()
    assert abs(observations.mean()) < 0.15


def test_policy():
    env = envs.make("probe:policy")
    assert (play(env, zeros)[1].reward == -1).all()
    assert (play(env, lambda observation, t: zeros(observation, t) + 1)[1].reward == 1).all()


def test_policy_of_observation():
    env = envs.make("probe:policy_of_observation")
    _, step = play(env, lambda observation, t: (observation[:, 0] > 0).astype(jnp.int32))
    assert (step.reward == env.single.optimal_return).all() and step.terminated.all()
    assert abs(play(env, zeros)[1].reward.mean()) < 0.15


def test_memory():
    env = envs.make("probe:memory", delay=3)
    cue = {}

    def remember(observation, t):
        if t % 4 == 0:
            cue["action"] = (observation[:, 0] > 0).astype(jnp.int32)
        return cue["action"]

    observations, step = play(env, remember)
    assert (step.episode_return[3::4] == 1).all() and (step.episode_length[3::4] == 4).all()
    assert not (step.reward[0::4] + step.reward[1::4] + step.reward[2::4]).any()
    # At the rewarded step the observation does not depend on the cue: the task needs memory.
    assert (
        (observations[3::4] == [0, 1]).all()
        and (observations[1::4] == 0).all()
        and set(np.unique(observations[0::4, :, 0])) == {-1, 1}
    )
    assert abs(play(env, zeros)[1].episode_return[3::4].mean()) < 0.25


def test_multi_discrete():
    env = envs.make("probe:multi_discrete")

    def copy(observation, t):
        return jnp.stack([observation[:, :2].argmax(-1), observation[:, 2:].argmax(-1)], axis=-1)

    assert (play(env, copy)[1].reward == 1).all()
    uniform = play(
        env,
        lambda observation, t: jax.vmap(env.action_space.sample)(
            jax.random.split(jax.random.key(100 + t), len(observation))
        ),
    )[1]
    assert abs(uniform.reward.mean() - (1 / 2 + 1 / 3) / 2) < 0.05


def test_continuous():
    env = envs.make("probe:continuous", size=2)
    assert (play(env, lambda observation, t: observation)[1].reward == 0).all()
    np.testing.assert_allclose(play(env, lambda observation, t: observation + 0.5)[1].reward, -0.5, rtol=1e-5)


def test_agents():
    env = envs.make("probe:agents", num_agents=3, delay=1)
    cue = {}

    def remember(observation, t):
        if t % 2 == 0:
            cue["action"] = (observation[..., 0] > 0).astype(jnp.int32)
        return cue["action"]

    observations, step = play(env, remember)
    assert observations.shape == (12, 64, 3, 2) and step.reward.shape == (12, 64, 3)
    assert (step.reward[1::2] == env.single.optimal_return).all() and not step.reward[0::2].any()
    assert (step.episode_return[1::2] == 1).all() and step.terminated[1::2].all()
    assert (observations[1::2] == [0, 1]).all() and set(np.unique(observations[0::2])) == {-1, 0, 1}
    # Only the agent with the wrong action loses reward.
    wrong = play(env, lambda observation, t: remember(observation, t).at[:, 1].add(1) % 2)[1]
    assert (wrong.reward[1] == [1, -1, 1]).all()
    assert wrong.episode_return[1] == pytest.approx(np.full(64, 1 / 3))


def test_continuous_agents():
    env = envs.make("probe:agents", continuous=True)
    step = play(env, lambda observation, t: observation[..., :1] + jnp.array([0.0, 0.5])[None, :, None])[1]
    np.testing.assert_allclose(step.reward[0], np.tile([[0.0, -0.25]], (64, 1)), atol=1e-6)


def test_team():
    env = envs.make("probe:team", num_agents=3)
    observations, step = play(env, lambda observation, t: jnp.zeros((64, 3), jnp.int32))
    np.testing.assert_array_equal(step.reward, np.roll(observations[..., 0], -1, axis=-1))
