"""REDQ: targets, random subsets, losses and the delayed actor by hand.

Chen et al. 2021 (arXiv 2101.05982), algorithm 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.redq import Learned
from tests.algos.linear_critics import gradients, keys, linear, transitions, weighted_errors


def redq(**fields):
    return algos.REDQ(env=envs.make("probe:continuous"), **{"num_critics": 3, **linear(1), **fields})


def test_target_is_lowest_of_subset():
    """Discount 1/2, cost 1; the second step terminates."""
    transition = transitions([0.0] * 2, [1.0, 1.0], [0.5, 0.0])
    following, cost = jnp.array([[4.0, 4.0], [6.0, 6.0], [9.0, 9.0]]), jnp.ones(2)
    target = redq(subset=3)._target(transition, following, cost, keys(2)[1])
    assert target.tolist() == [1.0 + 0.5 * (4.0 - 1.0), 1.0]


def test_subsets_are_uniform_per_sample():
    """Of 4, 6 and 9, the lower of two is 4 in 2/3 of the pairs and 6 in 1/3; of one, each has 1/3."""
    transition = transitions([0.0] * 3000, [0.0] * 3000, [1.0] * 3000)
    following = jnp.broadcast_to(jnp.array([[4.0], [6.0], [9.0]]), (3, 3000))
    for subset, expected in ((1, [1 / 3, 1 / 3, 1 / 3]), (2, [2 / 3, 1 / 3, 0.0])):
        target = redq(subset=subset)._target(transition, following, jnp.zeros(3000), keys(3000)[1])
        frequencies = [float(jnp.mean(target == value)) for value in (4.0, 6.0, 9.0)]
        assert frequencies == pytest.approx(expected, abs=0.03)


def test_gradients_by_hand():
    """Temperature 0. The next action is 1/2: targets 1 + 1/2 * 4 * 1/2 = 2, and 2."""
    gradient, losses = gradients(redq(subset=3), is_due=True)
    # Critic 3: values 4 and -2, errors 2 and -4, gradient (2 * 1 + -4 * -0.5) / 2 = 2. Others: test_sac.py.
    np.testing.assert_allclose(gradient.critics, [1.375, 0.75, 2.0], rtol=1e-5)
    squares = 1.0 + 3.5**2 + 0.0 + 3.0**2 + 2.0**2 + 4.0**2
    assert float(losses["critic_loss"]) == pytest.approx(0.25 * squares, rel=1e-5)
    # Actor: -mean(3, 2, 4) * tanh(mean), whose slope is -3 * (1 - 1/4).
    assert float(gradient.actor) == pytest.approx(-3.0 * 0.75, rel=1e-5)


def test_priorities_are_mean_absolute_errors():
    """The errors of `test_gradients_by_hand`: 1, 0 and 2; 3.5, 3 and 4."""
    _, losses = gradients(redq(subset=3), is_due=True)
    weighted, error = weighted_errors(redq(subset=3))
    np.testing.assert_allclose(error, [1.0, 3.5], rtol=1e-5)
    assert float(weighted["critic_loss"]) == pytest.approx(float(losses["critic_loss"]), rel=1e-5)


def test_delayed_actor():
    gradient, _ = gradients(redq(), is_due=False, log_temperature=0.0)
    assert float(gradient.actor) == float(gradient.log_temperature) == 0.0
    algorithm = redq(policy_delay=3, target_rate=0.25, learning_rate=0.5)
    learned = algorithm._init_learned(
        jax.random.key(0), jax.random.key(1), jnp.zeros((1, 1)), jnp.zeros((1, 1))
    )
    moved = []
    for _ in range(6):
        after, _, _ = algorithm._learn_from(learned, transitions([0.5], [1.0], [0.5]), keys(1))
        moved.append(bool(after.parameters.log_temperature != learned.parameters.log_temperature))
        expected = 0.75 * learned.target_critics + 0.25 * after.parameters.critics
        np.testing.assert_allclose(after.target_critics, expected, rtol=1e-6)  # at every update
        learned = after
    assert moved == [False, False, True] * 2 and isinstance(learned, Learned)


def test_critic_network_output_size():
    algorithm = redq(num_envs=2, batch_size=4, buffer_size=16, subset=2, num_critics=4)
    with pytest.raises(fdg.FdgError, match=r"critic_network gives .*\[3, 2\].* must be \[4, 2\]"):
        fdg.trace(algorithm)
