"""Behaviour cloning: likelihoods by hand (section 3 of Fujimoto and Gu 2021, arXiv 2106.06860)."""

import math

import jax.numpy as jnp
import pytest

import algos
import envs
from algos.offline.bc import Parameters
from algos.replay import Transition
from tests.algos.by_hand import GAUSSIAN, HALF, ONE, column


def test_loss_by_hand():
    """Logits log 3 and 0: probabilities 3/4 and 1/4. A Gaussian with unit deviation: squared error only."""

    class Discrete(algos.BC):
        _actor = algos.Network(lambda key, o: jnp.zeros(2), lambda x, o: jnp.broadcast_to(x, (len(o), 2)))

    transition = Transition(jnp.zeros((2, 4)), jnp.array([0, 1]), *jnp.zeros((2, 2)), jnp.zeros((2, 4)))
    loss, losses = Discrete(env=envs.make("CartPole-v1")).loss(
        Parameters(jnp.array([math.log(3.0), 0.0])), transition
    )
    assert float(loss) == pytest.approx(-0.5 * (math.log(0.75) + math.log(0.25)))
    assert float(losses["squared_error"]) == 0.5

    class Gaussian(algos.BC):
        _actor = GAUSSIAN

    transition = Transition(column(0.0), column(-0.5), *jnp.zeros((2, 1)), column(0.0))
    gradient, losses = Gaussian(env=ONE).gradient(Parameters(HALF), transition)
    assert float(losses["loss"]) == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi))
    assert float(gradient.actor) == pytest.approx(1.0 * 0.75, rel=1e-5)
