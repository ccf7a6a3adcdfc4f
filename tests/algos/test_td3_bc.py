"""TD3+BC: the actor's loss by hand; everything else is TD3.

The loss is equation 3, with the weight of equation 5, of Fujimoto and Gu 2021 (arXiv 2106.06860).
"""

import jax
import jax.numpy as jnp
import pytest

import algos
from algos.replay import Transition
from tests.algos.by_hand import CRITICS, HALF, MEAN, ONE, column


class ScalarTD3BC(algos.TD3BC):
    """The actor's action is the tanh of its parameter."""

    _critics, _actor = CRITICS, MEAN


def test_td3_bc_by_hand():
    algorithm = ScalarTD3BC(env=ONE, value_weight=2.0, normalize_observation=False)
    transition = Transition(column(0.0, 0.0), column(1.0, 0.0), *jnp.zeros((2, 2)), column(0.0, 0.0))
    loss, slope = jax.value_and_grad(algorithm._actor_loss)(HALF, jnp.array([-4.0, 9.0]), transition)
    # The first critic's value is -2 for both rows: lambda is the constant 2 / 2. Squared errors are 1/4.
    assert float(loss) == pytest.approx(0.25 - 1.0 * -2.0)
    assert float(slope) == pytest.approx((0.5 * (2 * -0.5 + 2 * 0.5) + 4.0) * 0.75, rel=1e-5)
