"""QR-DQN: values, targets and the quantile loss by hand.

Dabney et al. 2017 (arXiv 1710.10044): equations 9 and 10 are the loss, algorithm 1 the targets.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from tests.algos.by_hand import discrete_transitions as transition

# Two actions with two quantiles each, equal for every observation: the parameters are the quantiles.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros(4),
    apply=lambda table, observation: jnp.broadcast_to(table[None], (len(observation), 4)),
)


def algorithm(**fields):
    env = envs.make("probe:policy_of_observation")
    return algos.QRDQN(env=env, num_envs=2, batch_size=2, quantiles=2, network=TABLE, **fields)


def test_value_is_mean_of_quantiles():
    values = algorithm()._values(jnp.array([1.0, 3.0, -2.0, 0.0]), jnp.zeros((3, 1)))
    np.testing.assert_allclose(values, [[2.0, -1.0]] * 3)


def test_targets_by_hand():
    """The target network prefers the second action (mean 2, not 1); its quantiles are 0 and 4."""
    online, target = jnp.array([9.0, 9.0, 0.0, 0.0]), jnp.array([1.0, 1.0, 0.0, 4.0])
    step = transition([0, 0], [1.0, 1.0], [0.5, 0.0])
    np.testing.assert_allclose(algorithm()._target(online, target, step), [[1.0, 3.0], [1.0, 1.0]])
    # Double: the online network prefers the first action.
    np.testing.assert_allclose(algorithm(double=True)._target(online, target, step), [[1.5, 1.5], [1.0, 1.0]])


def test_loss_by_hand():
    """Predicted quantiles 0 and 2, levels 1/4 and 3/4; targets 1 and 4 (reward 1, next 0 and 3)."""
    online, target = jnp.array([0.0, 2.0, 0.0, 0.0]), jnp.array([0.0, 3.0, -9.0, -9.0])
    loss, (error, _) = algorithm().loss(
        online, target, transition([0, 0], [1.0, 1.0], [1.0, 1.0]), jnp.ones(2)
    )
    # Quantile 0: errors 1 and 4, Huber 0.5 and 3.5, both positive: 1/4 of each, mean 0.5.
    # Quantile 2: errors -1 and 2, Huber 0.5 and 1.5: (|3/4 - 1| * 0.5 + 3/4 * 1.5) / 2 = 0.625.
    assert float(loss) == pytest.approx(0.5 + 0.625, rel=1e-6)
    np.testing.assert_allclose(error, [2.5 - 1.0] * 2)
