"""C51: projections and the loss by hand.

Bellemare et al. 2017 (arXiv 1707.06887): equation 7 is the projection, algorithm 1 the loss.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from tests.algos.by_hand import discrete_transitions as transition

# Two actions, three atoms (-1, 0 and 1), equal for every observation: the parameters are the logits.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros(6),
    apply=lambda table, observation: jnp.broadcast_to(table[None], (len(observation), 6)),
)


def algorithm(kind=algos.C51, **fields):
    fields = {"atoms": 3, "value_min": -1.0, "value_max": 1.0, "network": TABLE, **fields}
    return kind(env=envs.make("probe:policy_of_observation"), num_envs=1, batch_size=3, **fields)


def logits(*probabilities):
    return jnp.log(jnp.array(probabilities)).reshape(-1)


ONLINE = logits([0.25, 0.25, 0.5], [0.5, 0.25, 0.25])  # values 1/4 and -1/4
TARGET = logits([0.5, 0.5, 1e-30], [0.25, 0.25, 0.5])  # values -1/2 and 1/4
STEPS = transition([0, 1, 0], [0.0, 1.0, 0.25], [1.0, 0.5, 0.0])


def test_targets_by_hand():
    """The target network prefers the second action, with probabilities 1/4, 1/4, 1/2.

    Reward 0, discount 1: unchanged. Reward 1, discount 1/2: the atoms move to 1/2, 1 and 3/2 (clipped to 1):
    1/8 for 0, the rest for 1; 1/2 was outside. Terminated with reward 1/4: 3/4 for 0, 1/4 for 1.
    """
    target, outside = algorithm()._project_target(ONLINE, TARGET, STEPS)
    np.testing.assert_allclose(target, [[0.25, 0.25, 0.5], [0, 0.125, 0.875], [0, 0.75, 0.25]], atol=1e-6)
    np.testing.assert_allclose(outside, [0.0, 0.5, 0.0], atol=1e-6)
    # Double: the online network prefers the first action, with target probabilities 1/2, 1/2, 0 at 1/2 and 1.
    target, _ = algorithm(double=True)._project_target(ONLINE, TARGET, STEPS)
    np.testing.assert_allclose(target[:2], [[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]], atol=1e-6)


def test_loss_by_hand():
    """Predictions 1/4, 1/4, 1/2; 1/2, 1/4, 1/4; and the first again; weights 1, 1 and 2."""
    loss, (error, parts) = algorithm().loss(ONLINE, TARGET, STEPS, jnp.array([1.0, 1.0, 2.0]))
    log = np.log(2.0)
    cross_entropy = np.array([1.5 * log, 2 * log, 0.75 * 2 * log + 0.25 * log])
    assert float(loss) == pytest.approx(float(cross_entropy @ [1, 1, 2]) / 3, rel=1e-5)
    # The error is the KL divergence: cross-entropy minus the target's entropy.
    entropy = [1.5 * log, -(np.log(0.125) / 8 + 7 / 8 * np.log(0.875)), 2 * log - 0.75 * np.log(3.0)]
    np.testing.assert_allclose(error, cross_entropy - entropy, atol=1e-5)
    assert float(parts["value"]) == pytest.approx((0.25 - 0.25 + 0.25) / 3, rel=1e-5)
