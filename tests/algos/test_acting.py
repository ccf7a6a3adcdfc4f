"""The actor of every algorithm, and evaluation with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.evaluation import evaluate


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
