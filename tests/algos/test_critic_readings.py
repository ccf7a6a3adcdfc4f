"""Distributional critics: targets against a plain loop, the loss by hand, and SAC, TD3 and CrossQ with them.

The loop is algorithm 1 of Bellemare, Dabney and Munos 2017 (arXiv 1707.06887).
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.distributional import Distributions, Values

GRID = Distributions(5, -2.0, 2.0)  # -2, -1, 0, 1, 2


def projected(probability, reward, discount, cost):
    """Projects one sample: each atom's probability is split between the nearest grid points."""
    result = np.zeros(5)
    for j, z in enumerate(np.linspace(-2.0, 2.0, 5)):
        at = (np.clip(reward + discount * (z - cost), -2.0, 2.0) + 2.0) / 1.0
        below, above = math.floor(at), math.ceil(at)
        result[below] += probability[j] * (1.0 if below == above else above - at)
        result[above] += probability[j] * (0.0 if below == above else at - below)
    return result


def test_targets_match_plain_loop():
    """The target uses the critic with the lower mean per sample; values lie within and beyond the grid."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 6, 5)).astype(np.float32)
    reward, cost = rng.normal(0.0, 1.5, size=(2, 6)).astype(np.float32)
    discount = np.float32([0.9, 0.0, 0.9, 0.5, 0.9, 0.0])
    found = GRID.target(*map(jnp.asarray, (reward, discount, *logits, cost)))
    probability = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    lower = np.argmin(probability @ np.linspace(-2.0, 2.0, 5), axis=0)
    assert 0 < lower.sum() < 6
    for i in range(6):
        expected = projected(probability[lower[i], i], reward[i], discount[i], cost[i])
        np.testing.assert_allclose(found[i], expected, atol=1e-5)


def test_value_and_loss_by_hand():
    """Probabilities 1/4, 1/4, 1/2 of -2, -1, 0: mean -0.75. Cross-entropy with a certain 0: -log 1/2."""
    logits = jnp.log(jnp.array([[0.25, 0.25, 0.5, 1e-30, 1e-30]]))
    assert float(GRID.value(logits)[0]) == pytest.approx(-0.75)
    certain = jnp.array([[0.0, 0.0, 1.0, 0.0, 0.0]])
    assert float(GRID.error(logits, certain)) == pytest.approx(math.log(2.0), rel=1e-5)
    assert Values().value(jnp.ones(2)).tolist() == [1.0, 1.0]


SIZES = {"num_envs": 2, "batch_size": 4, "buffer_size": 16, "hidden": (4,), "updates_per_step": 0.5}


def test_weighted_errors_by_hand():
    """Values 3 and 1, targets 1 and 2, weights 1/2 and 1: a loss of 0.5 * mean(0.5 * 4, 1 * 1) = 0.75."""
    output, target = (jnp.array([3.0, 1.0]), jnp.array([1.0, 5.0])), jnp.array([1.0, 2.0])
    weight = jnp.array([0.5, 1.0])
    loss, found = algos.SAC.grid.critic_kind.errors(output, target, weight)
    assert float(loss) == pytest.approx(0.75 + 0.5 * 4.5)  # the other critic has errors 0 and 3
    assert found["error"].tolist() == [1.0, 2.0]
    assert algos.SAC.grid.critic_kind.errors(output, target)[1] == {}
    probability = jnp.array([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    uniform = jnp.zeros((2, 3))  # KL divergence: log 3 - entropy of the target
    expected = [math.log(3.0) - 1.5 * math.log(2.0), math.log(3.0)]
    distance = Distributions(3, 0.0, 1.0).distance(uniform, probability)
    np.testing.assert_allclose(distance, expected, rtol=1e-5)
    halved = Distributions(3, 0.0, 1.0).error(uniform, probability, jnp.array([0.5, 0.5]))
    assert float(halved) == pytest.approx(0.5 * math.log(3.0))


def test_critic_network_output_size():
    values = algos.Network(lambda *_: (), lambda _, x, a: (a[:, 0], a[:, 0]))
    algorithm = algos.SAC(env=envs.make("probe:continuous"), atoms=5, critic_network=values, **SIZES)
    with pytest.raises(fdg.FdgError, match=r"critic_network gives a distribution as .*\[2, 5\], 5 numbers"):
        fdg.trace(algorithm)
