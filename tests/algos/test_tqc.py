"""TQC: truncated targets and the quantile loss by hand, whom the actor follows, what is refused.

Kuznetsov et al. 2020 (arXiv 2005.04269), algorithm 1.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.distributional import quantile_error
from tests.algos.linear_critics import gradients, linear, transitions


def tqc(**fields):
    fields = {"num_critics": 3, "quantiles": 2, "dropped_quantiles": 1, **linear(2), **fields}
    return algos.TQC(env=envs.make("probe:continuous"), **fields)


def test_the_largest_quantiles_of_all_critics_together_are_dropped():
    """Two quantiles of three critics, one dropped for each: the three smallest of six stay."""
    following = jnp.array([[[1.0, 8.0]], [[2.0, 3.0]], [[7.0, 9.0]]])  # [E, N, K]
    transition = transitions([0.0], [1.0], [0.5])
    target = tqc()._target(transition, following, jnp.ones(1), None)
    np.testing.assert_allclose(target, [[1.0 + 0.5 * (z - 1.0) for z in (1.0, 2.0, 3.0)]])
    every = tqc(dropped_quantiles=0)._target(transition, following, jnp.ones(1), None)
    assert every.shape == (1, 6)
    ended = tqc()._target(transitions([0.0], [1.0], [0.0]), following, jnp.ones(1), None)
    assert ended.tolist() == [[1.0] * 3]


def test_the_quantile_loss_by_hand():
    """Levels 1/4 and 3/4. Errors of 0 from 0 and 2: 0, and 3/2 (a line from 1 on); of 1: 1/2 each."""
    found = quantile_error(jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 2.0]]), 1.0)
    # Level 1/4, quantile 0: (0 + 1/4 * 3/2) / 2. Level 3/4, quantile 1: (1/4 * 1/2 [above] + 3/4 * 1/2) / 2.
    assert float(found[0]) == pytest.approx((0.25 * 1.5) / 2 + (0.25 * 0.5 + 0.75 * 0.5) / 2)
    loss = tqc()._error(jnp.array([[[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]]]), jnp.array([[0.0, 2.0]]))
    assert float(loss[0]) == pytest.approx(
        3 * float(found[0]) / 2
    )  # summed over critics, a mean over quantiles


def test_the_actor_of_tqc_follows_the_mean_of_all_quantiles():
    gradient, _ = gradients(tqc(), is_due=True)
    assert float(gradient.actor) == pytest.approx(-3.0 * 0.75, rel=1e-5)


def test_critics_of_ones_own_give_as_many_quantiles_of_each():
    algorithm = tqc(num_envs=2, batch_size=4, buffer_size=16, quantiles=3)
    with pytest.raises(fdg.FdgError, match=r"gives .*\[3, 2, 2\].* must be \[3, 2, 3\], 3 numbers"):
        fdg.trace(algorithm)
