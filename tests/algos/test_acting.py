"""The actor of every algorithm, and evaluation with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.evaluation import evaluate
from tests.conformance.test_algorithms import SMALL


@pytest.mark.parametrize("name", algos.names("environments"))
def test_actor(name):
    algorithm = SMALL[name]()
    state = jax.jit(algorithm.init)(jax.random.key(0))
    env, actor, keys = algorithm.env, algorithm.actor(state), jax.random.split(jax.random.key(1), 6)
    _, observation = jax.jit(env.reset)(keys)
    memory, start = actor.memory(6), jnp.ones(6, bool)
    agents = () if envs.num_agents(env) is None else (envs.num_agents(env),)
    act = jax.jit(actor.act, static_argnums=4)
    actions = []
    for greedy in (True, False):
        action, after = act(memory, observation, start, keys, greedy)
        assert (
            action.shape == (6, *agents, *env.action_space.shape) and action.dtype == env.action_space.dtype
        )
        each = action.reshape(-1, *env.action_space.shape)
        assert all(env.action_space.contains(one) for one in each)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, memory)
        # Each environment samples only with its key.
        flipped, _ = act(memory, jax.tree.map(lambda x: x[::-1], observation), start, keys[::-1], greedy)
        np.testing.assert_allclose(flipped[::-1], action, rtol=1e-5, atol=1e-6)
        actions.append(action)
    other_keys, _ = act(memory, observation, start, jax.random.split(jax.random.key(2), 6), True)
    np.testing.assert_array_equal(other_keys, actions[0])  # greedy actions do not depend on keys


def test_evaluate_matches_loop():
    """Returns match a loop over steps without `scan`."""
    env = envs.make("probe:policy_of_observation")
    algorithm = algos.PPO(env=env, num_envs=4, num_steps=4, num_minibatches=2, hidden=(8,))
    state = jax.jit(algorithm.init)(jax.random.key(0))
    actor, key = algorithm.actor(state), jax.random.key(3)
    act, step_of = jax.jit(actor.act, static_argnums=4), jax.jit(env.step)
    reset = jax.jit(env.reset)
    for greedy in (True, False):
        found = evaluate(env, actor, key, 5, greedy, max_steps=12)
        reset_key, run_key = jax.random.split(key)
        env_state, observation = reset(jax.random.split(reset_key, 5))
        memory, start = actor.memory(5), jnp.ones(5, bool)
        total, length, playing = np.zeros(5), np.zeros(5, int), np.ones(5, bool)
        for time in range(env.max_episode_steps or 12):
            keys = jax.random.split(jax.random.fold_in(run_key, time), (2, 5))
            action, memory = act(memory, observation, start, keys[0], greedy)
            env_state, step = step_of(keys[1], env_state, action)
            observation, start = step.observation, step.done
            total += np.where(playing, step.reward, 0)
            length += playing
            playing &= ~np.asarray(step.done)
        np.testing.assert_allclose(found["returns"], total, rtol=1e-5)
        np.testing.assert_array_equal(found["lengths"], length)
        assert float(found["return"]) == pytest.approx(total.mean(), rel=1e-5)
        np.testing.assert_array_equal(found["returns"], algorithm.evaluate(state, key, 5, greedy)["returns"])
