"""TQC: truncated targets, the quantile loss and the actor's gradient by hand.

Kuznetsov et al. 2020 (arXiv 2005.04269), algorithm 1.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.distributional import quantile_error
from tests.algos.linear_critics import gradients, linear, transitions, weighted_errors


def tqc(**fields):
    fields = {"num_critics": 3, "quantiles": 2, "dropped_quantiles": 1, **linear(2), **fields}
    return algos.TQC(env=envs.make("probe:continuous"), **fields)


def test_largest_quantiles_are_dropped():
    """Three critics with two quantiles, one dropped per critic: the three smallest of six remain."""
    following = jnp.array([[[1.0, 8.0]], [[2.0, 3.0]], [[7.0, 9.0]]])  # [E, N, K]
    transition = transitions([0.0], [1.0], [0.5])
    target = tqc()._target(transition, following, jnp.ones(1), None)
    np.testing.assert_allclose(target, [[1.0 + 0.5 * (z - 1.0) for z in (1.0, 2.0, 3.0)]])
    all_quantiles = tqc(dropped_quantiles=0)._target(transition, following, jnp.ones(1), None)
    assert all_quantiles.shape == (1, 6)
    terminal = tqc()._target(transitions([0.0], [1.0], [0.0]), following, jnp.ones(1), None)
    assert terminal.tolist() == [[1.0] * 3]


def test_quantile_loss_by_hand():
    """Levels 1/4 and 3/4. Huber errors: quantile 0 has 0 and 3/2, quantile 1 has 1/2 and 1/2."""
    found = quantile_error(jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 2.0]]), 1.0)
    # Level 1/4, quantile 0: (0 + 1/4 * 3/2) / 2. Level 3/4, quantile 1: (1/4 * 1/2 [above] + 3/4 * 1/2) / 2.
    assert float(found[0]) == pytest.approx((0.25 * 1.5) / 2 + (0.25 * 0.5 + 0.75 * 0.5) / 2)
    loss = tqc()._error(jnp.array([[[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]]]), jnp.array([[0.0, 2.0]]))
    assert float(loss[0]) == pytest.approx(3 * float(found[0]) / 2)  # sum over critics, mean over quantiles


def test_actor_uses_mean_of_quantiles():
    gradient, _ = gradients(tqc(), is_due=True)
    assert float(gradient.actor) == pytest.approx(-3.0 * 0.75, rel=1e-5)


def test_priorities_are_errors_of_means():
    """All quantiles of a critic are equal. Targets: 1 + 1/2 * (4 + 4 + 6) / 3 * 1/2, and 2."""
    _, error = weighted_errors(tqc())
    first = 1.0 + 0.25 * 14.0 / 3.0
    expected = [sum(abs(first - c) for c in (3.0, 2.0, 4.0)) / 3, 3.5]
    np.testing.assert_allclose(error, expected, rtol=1e-5)


def test_critic_network_output_size():
    algorithm = tqc(num_envs=2, batch_size=4, buffer_size=16, quantiles=3)
    with pytest.raises(fdg.FdgError, match=r"gives .*\[3, 2, 2\].* must be \[3, 2, 3\], 3 numbers"):
        fdg.trace(algorithm)
