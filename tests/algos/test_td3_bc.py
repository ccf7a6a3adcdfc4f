"""TD3+BC: the loss of the actor by hand; the rest is that of TD3.

By equation 3 and equation 5 of Fujimoto and Gu 2021 (arXiv 2106.06860).
"""

import jax
import jax.numpy as jnp
import pytest

import algos
from algos.replay import Transition
from tests.algos.by_hand import CRITICS, HALF, MEAN, ONE, column


class OneTD3BC(algos.TD3BC):
    """The actor's number is its parameter, before the tanh."""

    _critics, _actor = CRITICS, MEAN


def test_td3_bc_by_hand():
    algorithm = OneTD3BC(env=ONE, value_weight=2.0, normalize_observation=False)
    transition = Transition(column(0.0, 0.0), column(1.0, 0.0), *jnp.zeros((2, 2)), column(0.0, 0.0))
    loss, slope = jax.value_and_grad(algorithm._actor_loss)(HALF, jnp.array([-4.0, 9.0]), transition)
    # The first critic gives -2 for both, so lambda is 2 / 2 and a constant; errors are 1/4 and 1/4.
    assert float(loss) == pytest.approx(0.25 - 1.0 * -2.0)
    assert float(slope) == pytest.approx((0.5 * (2 * -0.5 + 2 * 0.5) + 4.0) * 0.75, rel=1e-5)
