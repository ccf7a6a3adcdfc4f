"""IQL: losses and gradients by hand (equations 4 to 7 of Kostrikov et al. 2021, arXiv 2110.06169)."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import algos
from algos.offline import iql
from algos.replay import Transition
from tests.algos.by_hand import CRITICS, GAUSSIAN, HALF, ONE, column


class ScalarIQL(algos.IQL):
    """The actor's mean is its parameter, its deviation 1; V is its parameter plus the observation."""

    _critics = CRITICS
    _actor = GAUSSIAN
    _value = algos.Network(
        lambda key, observation: jnp.float32(0.0), lambda v, observation: v + observation[:, 0]
    )


def test_iql_by_hand():
    algorithm = ScalarIQL(env=ONE, expectile=0.75, advantage_scale=2.0, largest_weight=3.0)
    transition = Transition(
        observation=column(0.0, 0.0),
        action=column(1.0, -0.5),
        reward=jnp.array([1.0, 2.0]),
        discount=jnp.array([0.5, 0.0]),  # the second step terminates
        next_observation=column(3.0, 7.0),
    )
    parameters = iql.Parameters(HALF, jnp.array([3.0, 2.0]), jnp.float32(1.0))
    gradient, losses = algorithm.gradient(parameters, jnp.array([2.0, 4.0]), transition)
    # The lower target values are 2 and -2, V is 1: advantages 1 and -3.
    assert float(losses["value_loss"]) == pytest.approx((0.75 * 1.0 + 0.25 * 9.0) / 2)
    assert float(gradient.value) == pytest.approx((0.75 * -2.0 + 0.25 * 6.0) / 2, abs=1e-6)
    # Critic targets: 1 + 0.5 * (1 + 3) = 3, and 2. Critic values: 3 and -1.5, and 2 and -1.
    assert float(losses["critic_loss"]) == pytest.approx(0.25 * (0.0 + 3.5**2 + 1.0 + 9.0))
    np.testing.assert_allclose(gradient.critics, [0.5 * (0 + -3.5 * -0.5), 0.5 * (-1 + -3 * -0.5)], rtol=1e-5)
    # Weights min(exp(2), 3) and exp(-6); differences to the mean 1/2 and -1.
    weights = np.array([3.0, math.exp(-6.0)])
    log_prob = -0.5 * np.array([0.25, 1.0]) - 0.5 * math.log(2 * math.pi)
    assert float(losses["actor_loss"]) == pytest.approx(-np.mean(weights * log_prob), rel=1e-5)
    slope = -np.mean(weights * np.array([0.5, -1.0])) * 0.75  # the derivative of tanh at 1/2: 1 - 1/4
    assert float(gradient.actor) == pytest.approx(slope, rel=1e-5)
