"""PQN: targets and losses by hand.

The loss, half the squared error, has the gradient in the last line of algorithm 1 of Gallici et al. 2025
(arXiv 2407.04811); the targets are the lambda-returns of that paper's section on Q(lambda)
(`test_returns.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np

import algos
import envs
from algos.pqn import Minibatch
from tests.algos.by_hand import in_two_envs as column
from tests.algos.by_hand import time_step

# Tabular Q-values for three observations and two actions: the parameters are the values.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros((3, 2)),
    apply=lambda table, observation: table[observation[:, 0].astype(jnp.int32)],
)
VALUES = jnp.array([[1.0, 4.0], [2.0, 0.0], [-8.0, -6.0]])  # maxima: 4, 2 and -6


def pqn(**fields):
    fields = {"num_envs": 2, "num_steps": 5, "num_minibatches": 1, "network": TABLE, **fields}
    return algos.PQN(env=envs.make("CartPole-v1"), **fields)


def test_targets_by_hand():
    """Five steps, discount 1/2, lambda 1/2, rewards doubled; the second terminates, the fourth is truncated.

    Backwards, with the maxima 4, 2 and -6 of observations 0, 1 and 2:
    step 4, next observation 0: 2 * 3 + 4 / 2 = 8.
    step 3, truncated at observation 2: 2 * 1 - 6 / 2 = -1.
    step 2, next observation 1: 2 * 2 + (2 / 2 + -1 / 2) / 2 = 4.25.
    step 1 terminates: 2 * 5 = 10.
    step 0, next observation 0: 2 * 1 + (4 / 2 + 10 / 2) / 2 = 5.5.

    Within an episode, the maximum for the next row comes from acting. Values of first rows of episodes (100)
    must not be used for the previous step.
    """
    step = time_step(
        reward=column(1.0, 5.0, 2.0, 1.0, 3.0),
        terminated=column(False, True, False, False, False),
        truncated=column(False, False, False, True, False),
        final=column(0.0, 2.0, 1.0, 2.0, 0.0),
    )
    value = column(100.0, 4.0, 100.0, 2.0, 100.0)
    target = pqn(discount=0.5, q_lambda=0.5, reward_scale=2.0)._target(VALUES, value, step)
    np.testing.assert_allclose(target, column(5.5, 10.0, 4.25, -1.0, 8.0), rtol=1e-6)


def test_act_returns_maximum_value():
    """The maxima are 4, 2 and -6, whichever action is sampled."""
    observation, keys = jnp.array([[0.0], [1.0], [2.0]]), jax.random.split(jax.random.key(0), 3)
    for epsilon in (0.0, 1.0):
        _, value = pqn().act(VALUES, None, epsilon, observation, keys)
        assert value.tolist() == [4.0, 2.0, -6.0]


def test_loss_by_hand():
    """Values 4 and -8 of the actions taken, targets 1 and -6: (9 + 4) / 4; gradient: difference / 2."""
    minibatch = Minibatch(jnp.array([[0.0], [2.0]]), jnp.array([1, 0]), jnp.array([1.0, -6.0]))
    gradient, losses = pqn().gradient(VALUES, minibatch)
    assert float(losses["loss"]) == 3.25
    assert gradient.tolist() == [[0.0, 1.5], [0.0, 0.0], [-1.0, 0.0]]


def test_multi_discrete_by_hand():
    """Maxima of a choice of two and one of three are 4 and 3, mean 3.5.

    The minibatch has target 2 for both; the chosen values are 1 and 3: (1 + 1) / 4.
    """
    table = jnp.array([[1.0, 4.0, 2.0, 0.0, 3.0]])
    network = algos.Network(lambda key, seen: table, lambda table, seen: table[seen[:, 0].astype(jnp.int32)])
    env = envs.make("probe:multi_discrete")
    algorithm = algos.PQN(
        env=env, network=network, num_envs=2, num_steps=5, num_minibatches=1, discount=0.5, reward_scale=2.0
    )
    never, zero, known = column(*[False] * 5), column(*[0.0] * 5), column(*[100.0] * 5)
    target = algorithm._target(table, known, time_step(column(*[1.0] * 5), ~never, never, zero))
    assert target.tolist() == [[2.0, 2.0]] * 5
    truncated = algorithm._target(table, known, time_step(column(*[1.0] * 5), never, ~never, zero))
    assert truncated.tolist() == [[2.0 + 0.5 * 3.5] * 2] * 5
    minibatch = Minibatch(jnp.zeros((1, 1)), jnp.array([[0, 2]]), jnp.array([2.0]))
    gradient, losses = algorithm.gradient(table, minibatch)
    assert float(losses["loss"]) == 0.5 and gradient.tolist() == [[-0.5, 0, 0, 0, 0.5]]
