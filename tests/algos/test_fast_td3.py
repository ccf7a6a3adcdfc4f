"""FastTD3: noise by environment, targets, the update and windows by hand, and its sizes.

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


class OneNumber(algos.FastTD3):
    """The actor's number is its parameter, before the tanh; critic i has the value `c_i * action`."""

    _actor, _critics = MEAN, CRITICS


def one_number(**fields):
    small = {"num_envs": 4, "batch_size": 4, "updates_per_step": 0.25, "atoms": None}
    return OneNumber(env=envs.make("probe:continuous"), **{**small, **fields})


def test_each_environment_explores_with_a_deviation_of_its_own():
    """Three of them: 0.01, 0.155 and 0.3, about the action 0; 2,000 draws of each."""
    algorithm = one_number(
        num_envs=3, batch_size=3, updates_per_step=1 / 3, smallest_noise=0.01, exploration_noise=0.3,
        normalize_observation=False,
    )  # fmt: skip
    act = jax.jit(lambda key: algorithm.act(
        jnp.float32(0.0), None, jnp.bool_(True), None, jnp.zeros((3, 1)), None,
        jax.random.split(key, 3),
    )[0])  # fmt: skip
    drawn = jax.vmap(act)(jax.random.split(jax.random.key(0), 2000))[..., 0]
    np.testing.assert_allclose(jnp.std(drawn, axis=0), [0.01, 0.155, 0.3], rtol=0.06)


def test_the_actor_follows_the_lower_critic():
    """TD3's follows the first. `-2 * tanh(number)`, whose slope is `-2 * (1 - 1/4)`."""
    half, c = jnp.float32(math.atanh(0.5)), jnp.array([3.0, 2.0])
    zeros = jnp.zeros((2, 1))
    transition = Transition(zeros, zeros, jnp.zeros(2), jnp.zeros(2), zeros)
    slope = jax.grad(one_number()._actor_loss)(half, c, transition)
    assert float(slope) == pytest.approx(-1.5, rel=1e-5)


def test_an_update_by_hand():
    """AdamW's first step: the step size against the sign, and decay by step size and weight.

    Target critics go 1/4 of the way at every update; the actor of targets is the actor.
    """
    algorithm = one_number(learning_rate=0.5, weight_decay=0.1, target_rate=0.25)
    parameters = Parameters(jnp.float32(2.0), jnp.array([8.0, 8.0]))
    states = Parameters(*map(algorithm._optimizer.init, parameters))
    first = Learned(parameters, parameters, states, jnp.int32(0))
    gradient = Parameters(jnp.float32(-2.0), jnp.array([3.0, 0.0]))
    once = algorithm.update(gradient, first, False)
    moved = [8.0 - 0.5 - 0.5 * 0.1 * 8.0, 8.0 - 0.5 * 0.1 * 8.0]
    np.testing.assert_allclose(once.parameters.critics, moved, rtol=1e-5)
    np.testing.assert_allclose(once.targets.critics, [8.0 + 0.25 * (x - 8.0) for x in moved], rtol=1e-5)
    assert float(once.parameters.actor) == float(once.targets.actor) == 2.0 and int(once.updates) == 1
    due = algorithm.update(gradient, once, True)
    np.testing.assert_allclose(due.parameters.actor, 2.0 + 0.5 - 0.5 * 0.1 * 2.0, rtol=1e-5)
    assert float(due.targets.actor) == float(due.parameters.actor)


def test_windows_of_several_steps_are_drawn():
    algorithm = one_number(n_step=3, discount=0.5)
    assert (algorithm.buffer.n_step, algorithm.buffer.discount) == (3, 0.5)


def test_its_sizes_are_those_of_the_authors():
    algorithm = algos.FastTD3(env=envs.make("Pendulum-v1"))
    assert algorithm.updates_per_iteration == 2 and algorithm.buffer.batch_size == 2 * 32_768
    assert algorithm.grid.reading.outputs == 101
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    shapes = jax.tree.map(jnp.shape, state.learned.parameters)
    kernels = lambda trunk: [trunk[f"Dense_{i}"]["kernel"][1] for i in range(3)]  # noqa: E731
    assert kernels(shapes.actor["actor"]) == [512, 256, 128]
    assert kernels(shapes.critics["critic_1"]) == [1024, 512, 256]
