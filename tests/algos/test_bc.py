"""Behaviour cloning: likelihoods by hand (section 3 of Fujimoto and Gu 2021, arXiv 2106.06860)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.offline.bc import Parameters
from algos.replay import Transition
from fdg.training.sweep import Sweep
from tests.algos.by_hand import GAUSSIAN, HALF, ONE, column
from tests.algos.offline.data import random_steps


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


def test_sweep_matches_single_runs(devices):
    """`init` reads the dataset on the host, once for each point."""
    env, data = envs.make("probe:continuous"), random_steps("probe:continuous")
    bc = algos.BC(env=env, dataset=data, num_envs=4, num_steps=1, batch_size=4, hidden=(4,))
    sweep = Sweep(bc, (("learning_rate", (1e-3, 0.1)),))
    engine = fdg.compile(sweep, policies.GPUOnly(), devices=devices[:1], num_seeds=sweep.agents)
    swept = engine.run(engine.init(0), 2)[0].state.learned.parameters
    single = fdg.compile(sweep.at(1), policies.GPUOnly(), devices=devices[:1])
    expected = single.run(single.init(0), 2)[0].learned.parameters
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-5, atol=1e-6), swept, expected)
