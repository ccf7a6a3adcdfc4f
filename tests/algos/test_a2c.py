"""A2C: the loss, its gradient and RMSprop by hand; memories of A2C and IMPALA.

The loss is that of Mnih et al. 2016 (arXiv 1602.01783), section 4, "Asynchronous advantage actor-critic":
the policy gradient with its entropy term as displayed there; the value gradient `d (R - V)^2` and the
returns R from algorithm S3, its inner loop.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos import networks, optimizers
from algos.on_policy import Trajectory
from envs import TimeStep
from tests.algos.test_recurrent_ppo import COUNTING

# --- the loss, by hand ---

# V = weight * observation; logits (0, bias), so that at bias 0 both actions have probability 1/2.
LINEAR = algos.Network(
    init=lambda key, observation: {"weight": jnp.float32(1), "bias": jnp.float32(0)},
    apply=lambda parameters, observation: (
        parameters["bias"] * jnp.stack([jnp.zeros(len(observation)), jnp.ones(len(observation))], axis=-1),
        parameters["weight"] * observation[:, 0],
    ),
)


def three_steps(log_prob=None):
    """One environment: the first step continues, the second is truncated, the third terminates."""
    column = lambda *numbers: jnp.asarray(numbers)[:, None]  # noqa: E731
    return Trajectory(
        observation=column(2.0, 4.0, 8.0)[..., None],
        action=column(1, 0, 1),
        decision=log_prob,
        time_step=TimeStep(
            observation=None,
            reward=column(1.0, 2.0, 3.0),
            terminated=column(False, False, True),
            truncated=column(False, True, False),
            final_observation=column(4.0, 6.0, 10.0)[..., None],
            episode_return=column(0.0, 3.0, 3.0),
            episode_length=column(0, 2, 1),
        ),
    )


def test_loss_by_hand():
    """Discount 1/2; V is the observation.

    Returns: 3 (terminated); 2 + 6/2 = 5 (truncated: bootstrapped from the final observation); 1 + 5/2 = 3.5.
    Advantages: 3.5 - 2 = 1.5; 5 - 4 = 1; 3 - 8 = -5; their mean is -2.5 / 3.
    Policy: -(log 1/2) times that: -(2.5 / 3) log 2. Value: (1.5^2 + 1 + 5^2) / 3 = 28.25 / 3.
    """
    algorithm = algos.A2C(env=envs.make("probe:policy"), discount=0.5, network=LINEAR)
    parameters = LINEAR.init(None, None)
    loss, parts = algorithm.loss(parameters, three_steps())
    assert float(parts["policy_loss"]) == pytest.approx(-2.5 / 3 * math.log(2), rel=1e-6)
    assert float(parts["value_loss"]) == pytest.approx(28.25 / 3, rel=1e-6)
    assert float(parts["entropy"]) == pytest.approx(math.log(2), rel=1e-6)
    assert float(loss) == pytest.approx(
        -2.5 / 3 * math.log(2) + 0.5 * 28.25 / 3 - 0.01 * math.log(2), rel=1e-6
    )


def test_gradient_by_hand():
    """Gradients do not flow through advantage and target.

    Weight: half the mean of 2 (V - target) V: half of (-2 * 1.5 * 2 - 2 * 1 * 4 + 2 * 5 * 8) / 3 = 22.
    Bias: d log pi = 1/2 for action 1, -1/2 for action 0: -(1.5 / 2 - 1 / 2 - 5 / 2) / 3 = 0.75. The gradient
    of the entropy is 0, since the probabilities are equal.
    """
    algorithm = algos.A2C(env=envs.make("probe:policy"), discount=0.5, network=LINEAR)
    gradient, _ = algorithm.gradient(LINEAR.init(None, None), three_steps())
    assert float(gradient["weight"]) == pytest.approx(11.0, rel=1e-6)
    assert float(gradient["bias"]) == pytest.approx(0.75, rel=1e-6)


def test_rmsprop_by_hand():
    """(6, 8) is clipped to (3, 4), norm 5. Mean squares start at 1: 0.99 + 0.01 * 9, and 0.99 + 0.01 * 16."""
    optimizer = optimizers.clipped_rmsprop(0.1, max_grad_norm=5.0, eps=0.01)
    parameters = jnp.zeros(2)
    state = optimizer.init(parameters)
    updates, state = optimizer.update(jnp.array([6.0, 8.0]), state)
    np.testing.assert_allclose(updates, [-0.3 / math.sqrt(1.09), -0.4 / math.sqrt(1.16)], rtol=1e-6)
    updates, _ = optimizer.update(jnp.array([0.0, 5.0]), state)  # 0.99 * 1.15 + 0.01 * 25 = 1.3885
    np.testing.assert_allclose(updates, [0.0, -0.5 / math.sqrt(1.3985)], rtol=1e-6)


# --- with a memory ---


def test_bootstrap_values_use_memory():
    """The value is the step number within an episode, truncated after 3 steps; rewards 1, discount 1/2.

    Episode steps are 1, 2, 3, 1. Bootstrap values are those of the next observation before a reset: 4 after
    the truncation, 2 after the last row.
    """
    algorithm = algos.A2C(
        env=envs.make("probe:truncation", steps=3), network=COUNTING, num_envs=2, num_steps=4, discount=0.5
    )
    state = algorithm.init(jax.random.key(0))
    _, metrics = jax.jit(algorithm.iterate)(state)
    # Returns 1 + 2.5/2, 1 + 3/2, 1 + 4/2, 1 + 2/2 of values 1, 2, 3, 1.
    returns, values = np.array([2.25, 2.5, 3.0, 2.0]), np.array([1.0, 2.0, 3.0, 1.0])
    assert float(metrics["value_loss"]) == pytest.approx(np.mean(np.square(returns - values)), rel=1e-6)


def shapes(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


class Overriding(algos.A2C):
    """A user's subclass that overrides `learn` with the signature for networks without memory."""

    @fdg.fragment("learner", in_axes=(None, 0, 1), out_axes=(None, 0, None))
    def learn(self, learned, running, trajectory):
        returns, novelty = running
        return super().learn(learned, (returns, novelty), trajectory)


def test_subclass_overrides_learn():
    algorithm = Overriding(env=envs.make("probe:policy"), num_envs=4)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    assert shapes(jax.eval_shape(algorithm.iterate, state)[0]) == shapes(state)


def test_normalizer_gets_no_empty_arrays():
    """In particular, a burn-in of zero steps does not normalise an empty array."""
    by_maximum = algos.Normalizer(
        lambda space: jnp.float32(1), lambda s, x: x / (1 + jnp.max(jnp.abs(x))), lambda s, x: s
    )
    algorithm = algos.A2C(env=envs.make("probe:memory"), memory="gru", memory_size=4, normalize=by_maximum)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))  # the maximum of an empty array is refused
    assert shapes(jax.eval_shape(algorithm.iterate, state)[0]) == shapes(state)


@pytest.mark.parametrize("kind", [algos.A2C, algos.DQN, algos.RecurrentPPO])
def test_network_and_memory_conflict(kind):
    env = envs.make("CartPole-v1")
    with pytest.raises(fdg.FdgError, match=r"memory=gru: a network of your own has its own memory, or none"):
        kind(env=env, network=COUNTING, memory="gru")
    with pytest.raises(fdg.FdgError, match=r"memory=lstm and network, which has memory=gru: give one of"):
        kind(env=env, network=networks.gru(8), memory="lstm")
