"""TD3: targets, losses, target noise, the delayed update and exploration noise by hand.

Fujimoto et al. 2018 (arXiv 1802.09477): targets are equation 14, an update is algorithm 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.td3 import Learned, Parameters
from tests.algos.by_hand import CRITICS, HALF, MEAN, keys, transitions


class ScalarTD3(algos.TD3):
    """The actor's action is the tanh of its parameter; critic i returns `c_i * action`."""

    _actor, _critics = MEAN, CRITICS


def scalar_td3(**fields):
    return ScalarTD3(env=envs.make("probe:continuous"), **fields)


def test_targets_by_hand():
    """Without noise, the next action is 1/2. The second step terminates; the lower critic is used."""
    target = scalar_td3(target_noise=0.0)._target(
        Parameters(HALF, jnp.array([8.0, 20.0])), transitions([0.0] * 2, [1.0, 1.0], [0.5, 0.0]), keys(2)[0]
    )
    np.testing.assert_allclose(target, [1.0 + 0.5 * 4.0, 1.0], rtol=1e-6)


def test_target_noise_is_clipped():
    transition = transitions([0.0] * 512, [0.0] * 512, [1.0] * 512)
    target = lambda **fields: scalar_td3(**fields)._target(  # noqa: E731
        Parameters(HALF, jnp.array([1.0, 1.0])), transition, keys(512)[0]
    )
    action = np.asarray(target(target_noise=0.2, target_noise_clip=0.3))
    assert action.min() == pytest.approx(0.2, abs=1e-6) and action.max() == pytest.approx(0.8, abs=1e-6)
    inside = action[(action > 0.201) & (action < 0.799)]
    assert 0.8 < len(inside) / 512 < 0.93  # 87% are within 1.5 standard deviations
    assert np.asarray(target(target_noise=9.0, target_noise_clip=9.0)).max() == 1.0


def test_gradients_by_hand():
    parameters = Parameters(HALF, jnp.array([3.0, 2.0]))
    algorithm = scalar_td3(target_noise=0.0)
    transition = transitions(action=[1.0, -0.5], reward=[1.0, 2.0], discount=[0.5, 0.0])
    targets = Parameters(HALF, jnp.array([4.0, 6.0]))
    for is_due in (True, False):
        gradient, _, losses = algorithm.gradient(parameters, targets, is_due, transition, keys(2))
        # Targets 1 + 1/2 * min(4, 6) * 1/2 = 2, and 2, as in test_sac.py.
        np.testing.assert_allclose(gradient.critics, [1.375, 0.75], rtol=1e-5)
        assert float(losses["critic_loss"]) == pytest.approx(0.25 * (1.0 + 3.5**2 + 0.0 + 3.0**2), rel=1e-5)
        # Only the first critic: -3 * tanh(parameter), whose slope is -3 * (1 - 1/4).
        assert float(gradient.actor) == pytest.approx(-2.25 if is_due else 0.0, rel=1e-5)


def initial_learned(algorithm, parameters):
    """The learned state before the first update."""
    optimizer_state = Parameters(*map(algorithm._optimizer.init, parameters))
    return Learned(parameters, parameters, optimizer_state, jnp.int32(0))


def test_delayed_update_by_hand():
    """Adam's first step is the learning rate times the sign; targets move 1/4 of the way."""
    algorithm = scalar_td3(learning_rate=0.5, target_rate=0.25)
    initial = initial_learned(algorithm, Parameters(jnp.float32(0.0), jnp.array([8.0, 8.0])))
    gradient = Parameters(jnp.float32(-2.0), jnp.array([3.0, 0.0]))
    first = algorithm.update(gradient, initial, False)
    assert float(first.parameters.actor) == 0.0 and int(first.updates) == 1
    np.testing.assert_allclose(first.parameters.critics, [7.5, 8.0], rtol=1e-5)
    np.testing.assert_allclose(first.targets.critics, [8.0, 8.0])
    second = algorithm.update(gradient, first, True)
    np.testing.assert_allclose(second.parameters.actor, 0.5, rtol=1e-5)  # Adam's first step
    np.testing.assert_allclose(second.targets.actor, 0.125, rtol=1e-5)
    np.testing.assert_allclose(second.targets.critics, [8.0 - 0.25 * 1.0, 8.0], rtol=1e-5)


def test_policy_delay():
    algorithm = scalar_td3(policy_delay=3)
    learned = initial_learned(algorithm, Parameters(HALF, jnp.ones(2)))
    moved = []
    for _ in range(6):
        after, *_ = algorithm._learn_from(learned, transitions([0.5], [1.0], [0.5]), keys(1))
        moved.append(bool(after.parameters.actor != learned.parameters.actor))
        learned = after
    assert moved == [False, False, True] * 2 and isinstance(learned, Learned)


def test_exploration_noise():
    policy = scalar_td3(exploration_noise=0.1)._policy(HALF, jnp.zeros((4096, 1)))
    actions = policy.sample(jax.random.split(jax.random.key(0), 4096))
    assert actions.shape == (4096, 1) and float(jnp.std(actions)) == pytest.approx(0.1, rel=0.05)
    assert float(jnp.mean(actions)) == pytest.approx(0.5, abs=0.01)
    np.testing.assert_allclose(policy.mode(), 0.5, rtol=1e-6)
