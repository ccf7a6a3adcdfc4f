"""Every algorithm says how it acts, and whatever is derived from that gives the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.evaluation import evaluate
from tests.algos.offline.data import random_steps

SMALL = {"num_envs": 4, "num_steps": 4, "hidden": (8,)}
CASES = {
    "ppo": ("probe:policy_of_observation", {"num_minibatches": 2}),
    "recurrent_ppo": ("probe:memory", {"num_minibatches": 2, "memory_size": 8}),
    "ippo": ("probe:agents", {"num_minibatches": 2, "memory_size": 8, "recurrent": True}),
    "mappo": ("probe:agents", {"num_minibatches": 2}),
    "a2c": ("probe:multi_discrete", {}),
    "a3c": ("probe:policy_of_observation", {"num_workers": 2}),
    "impala": ("probe:continuous", {}),
    "dqn": (
        "probe:masked",
        {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64, "learning_starts": 0},
    ),
    "pqn": ("probe:masked", {}),
    "sac": ("probe:continuous", {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64}),
    "crossq": ("probe:continuous", {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64}),
    "redq": ("probe:continuous", {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64}),
    "droq": ("probe:continuous", {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64}),
    "tqc": (
        "probe:continuous",
        {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64, "critic_hidden": (8,)},
    ),
    "fast_td3": (
        "probe:continuous",
        {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64, "critic_hidden": (8,)},
    ),
    "td3": ("probe:continuous", {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64}),
    "qr_dqn": (
        "probe:masked",
        {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64, "learning_starts": 0, "quantiles": 3},
    ),
    "c51": (
        "probe:masked",
        {"updates_per_step": 0.25, "batch_size": 8, "buffer_size": 64, "learning_starts": 0, "atoms": 3},
    ),
    "bc": ("probe:masked", {"dataset": random_steps("probe:masked"), "batch_size": 8}),
    **dict.fromkeys(("iql", "td3_bc", "rebrac", "cql"), ("probe:continuous", {"batch_size": 8})),
    "vdn": ("probe:unlike", {}),
    "qmix": ("probe:agents", {"memory": "gru", "memory_size": 8}),
    "alphazero": ("game:tic_tac_toe", {"num_minibatches": 2, "num_simulations": 2}),
    "muzero": ("probe:masked", {"num_simulations": 2, "latent_size": 8}),
}


def made(name):
    env_name, fields = CASES[name]
    algorithm = algos.get(name)(env=envs.make(env_name), **{**SMALL, **fields})
    return algorithm, jax.jit(algorithm.init)(jax.random.key(0))


def test_all_algorithms_are_here():
    assert set(CASES) == set(algos.names("environments"))


@pytest.mark.parametrize("name", CASES)
def test_an_actor(name):
    algorithm, state = made(name)
    env, actor, keys = algorithm.env, algorithm.actor(state), jax.random.split(jax.random.key(1), 6)
    _, observation = jax.jit(env.reset)(keys)
    memory, start = actor.memory(6), jnp.ones(6, bool)
    agents = () if envs.num_agents(env) is None else (envs.num_agents(env),)
    act = jax.jit(actor.act, static_argnums=4)
    drawn = []
    for greedy in (True, False):
        action, after = act(memory, observation, start, keys, greedy)
        assert (
            action.shape == (6, *agents, *env.action_space.shape) and action.dtype == env.action_space.dtype
        )
        each = action.reshape(-1, *env.action_space.shape)
        assert all(env.action_space.contains(one) for one in each)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, memory)
        # Each environment draws from its own key and from nothing else.
        turned, _ = act(memory, jax.tree.map(lambda x: x[::-1], observation), start, keys[::-1], greedy)
        np.testing.assert_allclose(turned[::-1], action, rtol=1e-5, atol=1e-6)
        drawn.append(action)
    others, _ = act(memory, observation, start, jax.random.split(jax.random.key(2), 6), True)
    np.testing.assert_array_equal(others, drawn[0])  # greedy actions draw nothing


def test_an_episode_begins_with_an_empty_memory():
    algorithm, state = made("recurrent_ppo")
    actor, keys = algorithm.actor(state), jax.random.split(jax.random.key(1), 2)
    observation = jnp.ones((2, *algorithm.env.observation_space.shape))
    first = actor.act(actor.memory(2), observation, jnp.ones(2, bool), keys, True)
    full = jax.tree.map(lambda x: x + 3.0, actor.memory(2))
    again = actor.act(full, observation, jnp.asarray([True, False]), keys, True)
    for before, after in zip(jax.tree.leaves(first[1]), jax.tree.leaves(again[1]), strict=True):
        np.testing.assert_array_equal(before[0], after[0])
        assert not np.allclose(before[1], after[1])


def test_evaluate_is_a_loop_over_the_actor():
    """Written out step by step, without the scan: the same returns."""
    algorithm, state = made("ppo")
    env, actor, key = algorithm.env, algorithm.actor(state), jax.random.key(3)
    act, step_of = jax.jit(actor.act, static_argnums=4), jax.jit(env.step)
    for greedy in (True, False):
        found = evaluate(env, actor, key, 5, greedy, max_steps=12)
        reset_key, run_key = jax.random.split(key)
        env_state, observation = jax.jit(env.reset)(jax.random.split(reset_key, 5))
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
