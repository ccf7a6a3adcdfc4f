"""IMPALA: the loss, its gradient and its clips by hand, and A2C as the on-policy special case.

The loss is the sum of the three gradients of Espeholt et al. 2018 (arXiv 1802.01561), section 4.2, "V-trace
actor-critic algorithm": value, policy, entropy. The targets are equation 1 (`test_returns.py`).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from tests.algos.test_a2c import LINEAR, three_steps

# --- the loss, by hand ---


def off_policy_steps():
    """Behaviour probabilities 1/4, 1 and 1/2, current probabilities 1/2: ratios 2, 1/2 and 1."""
    return three_steps(log_prob=jnp.log(jnp.array([0.25, 1.0, 0.5]))[:, None])


def test_loss_by_hand():
    """Discount 1/2; V is the observation: 2, 4, 8. Weights min(1, ratio): 1, 1/2, 1.

    Errors: 1 + 4/2 - 2 = 1; 2 + 6/2 - 4 = 1 (truncated: bootstrapped from the final observation); 3 - 8 = -5.
    Target - V: -5; 1/2; 1 + (1/2)(1)(1/2) = 1.25. Advantages: -5; 1/2; 1 (1 + (4 + 1/2) / 2 - 2) = 1.25.
    Policy: -(log 1/2) times the mean of the advantages, -3.25 / 3.
    Value: 1/2 (1.25^2 + 0.5^2 + 5^2) / 3 = 26.8125 / 6.
    """
    algorithm = algos.IMPALA(env=envs.make("probe:policy"), discount=0.5, network=LINEAR)
    loss, parts = algorithm.loss(LINEAR.init(None, None), off_policy_steps())
    assert float(parts["policy_loss"]) == pytest.approx(-3.25 / 3 * math.log(2), rel=1e-6)
    assert float(parts["value_loss"]) == pytest.approx(26.8125 / 6, rel=1e-6)
    # Mean of ratio - 1 - log(ratio): (1 - 1/2) / 3, since the logarithms cancel.
    assert float(parts["approx_kl"]) == pytest.approx(0.5 / 3, rel=1e-5)
    assert float(loss) == pytest.approx(
        -3.25 / 3 * math.log(2) + 0.5 * 26.8125 / 6 - 0.01 * math.log(2), rel=1e-6
    )


def test_clips_and_lambda_by_hand():
    """The same with rho-bar 1.5, c-bar 1/2 and lambda 1/2: weights 1.5, 1/2, 1; trace coefficients 1/4.

    Target - V: -5; 1/2; 1.5 + (1/2)(1/4)(1/2) = 1.5625.
    Advantages: -5; 1/2; 1.5 (1 + (1/2)(1/2)(1/2)) = 1.6875.
    """
    algorithm = algos.IMPALA(
        env=envs.make("probe:policy"),
        discount=0.5,
        network=LINEAR,
        rho_clip=1.5,
        c_clip=0.5,
        trace_lambda=0.5,
    )
    _, parts = algorithm.loss(LINEAR.init(None, None), off_policy_steps())
    assert float(parts["policy_loss"]) == pytest.approx(-2.8125 / 3 * math.log(2), rel=1e-6)
    assert float(parts["value_loss"]) == pytest.approx((1.5625**2 + 0.5**2 + 5**2) / 6, rel=1e-6)


def test_gradient_by_hand():
    """Gradients do not flow through targets, advantages and importance weights.

    Weight: half the mean of (V - target) V: half of (-1.25 * 2 - 0.5 * 4 + 5 * 8) / 3 = 35.5 / 3.
    Bias: d log pi = 1/2 for action 1, -1/2 for action 0: -(1.25 - 0.5 - 5) / 2 / 3.
    """
    algorithm = algos.IMPALA(env=envs.make("probe:policy"), discount=0.5, network=LINEAR)
    gradient, _ = algorithm.gradient(LINEAR.init(None, None), off_policy_steps())
    assert float(gradient["weight"]) == pytest.approx(35.5 / 6, rel=1e-6)
    assert float(gradient["bias"]) == pytest.approx(4.25 / 6, rel=1e-6)


def test_on_policy_matches_a2c():
    """With ratios of 1 the gradients are equal, apart from the factor 1/2 of IMPALA's squared error."""
    fields = {"env": envs.make("probe:policy"), "discount": 0.5, "network": LINEAR}
    trajectory = three_steps(log_prob=jnp.full((3, 1), math.log(0.5)))
    impala, _ = algos.IMPALA(**fields, value_coefficient=1.0).gradient(LINEAR.init(None, None), trajectory)
    a2c, _ = algos.A2C(**fields, value_coefficient=0.5).gradient(LINEAR.init(None, None), trajectory)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), impala, a2c)
