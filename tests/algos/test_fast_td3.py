"""FastTD3: noise per environment, the actor's loss and an update by hand, n-step replay, default sizes.

Seo et al. 2025 (arXiv 2505.22642), section 2, and the authors' code (github.com/younggyoseo/FastTD3).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.replay import Transition
from algos.td3 import Learned, Parameters
from tests.algos.by_hand import CRITICS, MEAN


class ScalarFastTD3(algos.FastTD3):
    """The actor's action is the tanh of its parameter; critic i returns `c_i * action`."""

    _actor, _critics = MEAN, CRITICS


def scalar_fast_td3(**fields):
    settings = {"num_envs": 4, "batch_size": 4, "updates_per_step": 0.25, "atoms": None}
    return ScalarFastTD3(env=envs.make("probe:continuous"), **{**settings, **fields})


def test_exploration_noise_per_environment():
    """Standard deviations 0.01, 0.155 and 0.3 about the action 0; 2,000 samples of each."""
    algorithm = scalar_fast_td3(
        num_envs=3, batch_size=3, updates_per_step=1 / 3, smallest_noise=0.01, exploration_noise=0.3,
        normalize_observation=False,
    )  # fmt: skip
    act = jax.jit(lambda key: algorithm.act(
        jnp.float32(0.0), None, jnp.bool_(True), None, jnp.zeros((3, 1)), None,
        jax.random.split(key, 3),
    )[0])  # fmt: skip
    actions = jax.vmap(act)(jax.random.split(jax.random.key(0), 2000))[..., 0]
    np.testing.assert_allclose(jnp.std(actions, axis=0), [0.01, 0.155, 0.3], rtol=0.06)


def test_exploration_noise_of_a_single_environment():
    """It is the largest deviation, not the smallest, with which one environment would hardly explore."""
    algorithm = scalar_fast_td3(
        num_envs=1, batch_size=1, updates_per_step=1.0, smallest_noise=0.001, exploration_noise=0.3,
        normalize_observation=False,
    )  # fmt: skip
    act = jax.jit(lambda key: algorithm.act(
        jnp.float32(0.0), None, jnp.bool_(True), None, jnp.zeros((1, 1)), None, key[None]
    )[0])  # fmt: skip
    actions = jax.vmap(act)(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(jnp.std(actions), 0.3, rtol=0.06)


def test_actor_uses_lower_critic():
    """TD3 uses the first critic. Here: `-2 * tanh(parameter)`, whose slope is `-2 * (1 - 1/4)`."""
    half, c = jnp.float32(math.atanh(0.5)), jnp.array([3.0, 2.0])
    zeros = jnp.zeros((2, 1))
    transition = Transition(zeros, zeros, jnp.zeros(2), jnp.zeros(2), zeros)
    slope = jax.grad(scalar_fast_td3()._actor_loss)(half, c, transition)
    assert float(slope) == pytest.approx(-1.5, rel=1e-5)


def test_update_by_hand():
    """AdamW's first step: the learning rate times the sign, and decay by learning rate times weight decay.

    Target critics move 1/4 of the way at every update; the target actor equals the actor.
    """
    algorithm = scalar_fast_td3(learning_rate=0.5, weight_decay=0.1, target_rate=0.25)
    parameters = Parameters(jnp.float32(2.0), jnp.array([8.0, 8.0]))
    states = Parameters(*map(algorithm._optimizer.init, parameters))
    first = Learned(parameters, parameters, states, jnp.int32(0))
    gradient = Parameters(jnp.float32(-2.0), jnp.array([3.0, 0.0]))
    after = algorithm.update(gradient, first, False)
    moved = [8.0 - 0.5 - 0.5 * 0.1 * 8.0, 8.0 - 0.5 * 0.1 * 8.0]
    np.testing.assert_allclose(after.parameters.critics, moved, rtol=1e-5)
    np.testing.assert_allclose(after.targets.critics, [8.0 + 0.25 * (x - 8.0) for x in moved], rtol=1e-5)
    assert float(after.parameters.actor) == float(after.targets.actor) == 2.0 and int(after.updates) == 1
    due = algorithm.update(gradient, after, True)
    np.testing.assert_allclose(due.parameters.actor, 2.0 + 0.5 - 0.5 * 0.1 * 2.0, rtol=1e-5)
    assert float(due.targets.actor) == float(due.parameters.actor)


def test_n_step_replay():
    algorithm = scalar_fast_td3(n_step=3, discount=0.5)
    assert (algorithm.buffer.n_step, algorithm.buffer.discount) == (3, 0.5)


def test_default_sizes():
    algorithm = algos.FastTD3(env=envs.make("Pendulum-v1"))
    assert algorithm.updates_per_iteration == 2 and algorithm.buffer.batch_size == 2 * 32_768
    assert algorithm.grid.critic_kind.outputs == 101
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    shapes = jax.tree.map(jnp.shape, state.learned.parameters)
    kernels = lambda trunk: [trunk[f"Dense_{i}"]["kernel"][1] for i in range(3)]  # noqa: E731
    assert kernels(shapes.actor["actor"]) == [512, 256, 128]
    assert kernels(shapes.critics["critic_1"]) == [1024, 512, 256]
