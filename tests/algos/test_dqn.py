"""DQN: targets, losses, target network, schedules, weights and priorities by hand; a masked probe.

The loss is L_i of Mnih et al. 2015 (Nature 518), "Training algorithm for deep Q-networks", halved, and with
their error clipping as an option. Double Q-learning: equation 4 of van Hasselt et al. 2016 (arXiv
1509.06461). Weights and priorities: equation 1 and algorithm 1, lines 10 to 12, of Schaul et al. 2016
(arXiv 1511.05952; `test_replay.py`). Dueling: equation 9 of Wang et al. 2016 (arXiv 1511.06581;
`test_networks.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.replay import Replay, Sample, Transition
from tests.algos.probes import trained
from tests.conformance.comparison import plain

# Tabular Q-values for observations 0 and 1 and three actions: the parameters are the values.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros((2, 3)),
    apply=lambda table, observation: table[observation[:, 0].astype(jnp.int32)],
)
ONLINE = jnp.array([[1.0, 4.0, 2.0], [0.0, 3.0, 6.0]])
TARGET = jnp.array([[5.0, 1.0, 9.0], [8.0, 2.0, 7.0]])


def dqn(**fields):
    settings = {"num_envs": 4, "batch_size": 4, "learning_starts": 0, "network": TABLE}
    return algos.DQN(**{"env": envs.make("CartPole-v1"), **settings, **fields})


def transition():
    """Four transitions with next observations 0, 1, 0 and 1: two continue, one terminates, one is truncated
    after two steps with discount 1/2."""
    return Transition(
        observation=jnp.array([[1.0], [0.0], [1.0], [0.0]]),
        action=jnp.array([1, 2, 0, 1]),
        reward=jnp.array([1.0, -1.0, 2.0, 0.0]),
        discount=jnp.array([0.5, 0.5, 0.0, 0.25]),
        next_observation=jnp.array([[0.0], [1.0], [0.0], [1.0]]),
    )


def test_targets_by_hand():
    """Maxima of the target network: 9 and 8."""
    target = dqn()._target(ONLINE, TARGET, transition())
    assert target.tolist() == [1 + 0.5 * 9, -1 + 0.5 * 8, 2, 0.25 * 8]


# The same for a multi-discrete action with choices of two and three values.
TABLE2 = algos.Network(
    init=lambda key, observation: jnp.zeros((2, 5)),
    apply=lambda table, observation: table[observation[:, 0].astype(jnp.int32)],
)
ONLINE2 = jnp.array([[1.0, 4.0, 2.0, 0.0, 3.0], [0.0, 3.0, 6.0, 5.0, 1.0]])
TARGET2 = jnp.array([[5.0, 1.0, 9.0, 2.0, 7.0], [8.0, 2.0, 7.0, 4.0, 6.0]])


def test_multi_discrete_by_hand():
    """Next values are means over choices: (5 + 9) / 2 = 7 for 0, (8 + 7) / 2 = 7.5 for 1.

    With double Q-learning the online network prefers (1, 2) for 0 and (1, 0) for 1: (1 + 7) / 2, (2 + 7) / 2.
    The first sample has observation 1, choices (1, 0) with values 3 and 6, target 4.5: errors 1.5 and -1.5,
    priority 3. A masked choice of 0 is not in the maximum.
    """
    env = envs.make("probe:multi_discrete")
    fields = {"env": env, "num_envs": 2, "batch_size": 2, "learning_starts": 0, "network": TABLE2}
    rows = transition()._replace(action=jnp.array([[1, 0], [0, 2], [0, 0], [1, 1]]))
    rows = jax.tree.map(lambda x: x[:2], rows)
    target = algos.DQN(**fields)._target(ONLINE2, TARGET2, rows)
    assert target.tolist() == [1 + 0.5 * 7, -1 + 0.5 * 7.5]
    assert algos.DQN(**fields, double=True)._target(ONLINE2, TARGET2, rows).tolist() == [3.0, -1 + 0.5 * 4.5]
    gradient, error, losses = algos.DQN(**fields).gradient(ONLINE2, TARGET2, rows, jnp.ones(2))
    errors = np.array([[1.5, -1.5], [2.75 - 1, 2.75 - 3]])
    assert float(losses["loss"]) == pytest.approx(np.mean(errors**2) / 2)
    assert error.tolist() == np.abs(errors).sum(1).tolist()
    np.testing.assert_allclose(
        gradient, -np.array([[1.75, 0, 0, 0, -0.25], [0, 1.5, -1.5, 0, 0]]) / 4, rtol=1e-6
    )
    mask = jnp.ones((2, 5), bool).at[:, 0].set(False)
    masked = rows._replace(next_observation=envs.MaskedObservation(rows.next_observation, mask))
    assert algos.DQN(**fields)._target(ONLINE2, TARGET2, masked).tolist() == [3.5, -1 + 0.5 * 4.5]


def test_double_q_targets_by_hand():
    """The online network prefers action 1 for observation 0, 2 for 1: target values 1 and 7."""
    target = dqn(double=True)._target(ONLINE, TARGET, transition())
    assert target.tolist() == [1 + 0.5 * 1, -1 + 0.5 * 7, 2, 0.25 * 7]


@pytest.mark.parametrize(
    ("max_error", "loss", "gradient"),
    [
        (None, 1.15625, [[0.0, 0.25, -0.25], [0.0, -0.625, 0.0]]),
        (1.0, 0.8125, [[0.0, 0.125, -0.25], [0.0, -0.25, 0.0]]),
    ],
)
def test_loss_by_hand(max_error, loss, gradient):
    """Values of the actions taken: 3, 2, 0 and 4; errors 5.5 - 3, 3 - 2, 2 - 0 and 2 - 4.

    Half their squares: 3.125, 1/2, 2 and 2; with weights 1, 1, 0 and 1/2 the mean is 4.625 / 4 = 1.15625.
    With a maximum error of 1 (linear beyond, |error| - 1/2): 2, 1/2, 3/2 and 3/2, mean 3.25 / 4 = 0.8125.
    The gradient is -weight * error / 4 at each action, with the error clipped or not.
    """
    weight = jnp.array([1.0, 1.0, 0.0, 0.5])
    slope, error, losses = dqn(max_error=max_error).gradient(ONLINE, TARGET, transition(), weight)
    assert error.tolist() == [2.5, 1.0, 2.0, -2.0]
    assert float(losses["loss"]) == loss
    assert slope.tolist() == gradient


def test_target_network_update():
    """Every second update moves the target 1/4 of the way; before learning starts nothing changes."""
    algorithm = dqn(target_period=2, target_rate=0.25, learning_rate=0.1)
    learned = algorithm.init(jax.random.key(0)).learned._replace(parameters=ONLINE, target_parameters=TARGET)
    ones = jnp.ones(4)
    unchanged, _, _ = algorithm.learn(learned, None, transition(), ones, jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, unchanged, learned)
    first, _, _ = algorithm.learn(learned, None, transition(), ones, jnp.bool_(True))
    assert not np.array_equal(first.parameters, ONLINE)
    np.testing.assert_array_equal(first.target_parameters, TARGET)
    second, _, _ = algorithm.learn(first, None, transition(), ones, jnp.bool_(True))
    np.testing.assert_allclose(second.target_parameters, 0.75 * TARGET + 0.25 * second.parameters, rtol=1e-6)
    assert int(second.updates) == 2


def test_learning_starts_and_epsilon():
    """Eight steps and two updates per iteration; updates start after 16 steps."""
    algorithm = algos.DQN(
        env=envs.make("probe:policy"), num_envs=4, num_steps=2, updates_per_step=0.25, batch_size=8,
        hidden=(8,), learning_starts=16, total_steps=64, exploration_fraction=0.5, epsilon_end=0.0,
    )  # fmt: skip
    _, metrics = plain(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 6)
    assert metrics["updates"].tolist() == [0, 2, 4, 6, 8, 10]
    assert metrics["epsilon"].tolist() == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


class ConstantBuffer:
    """A buffer with constant samples; its state is the last priorities."""

    init = staticmethod(lambda observation, action: jnp.zeros(4))
    add = staticmethod(lambda priority, steps: priority)
    is_ready = staticmethod(lambda priority: jnp.bool_(True))
    weight = staticmethod(lambda sample, beta: jnp.full(4, beta))
    prioritize = staticmethod(lambda old, indices, priority: priority + indices)
    has_priorities = True
    as_rows = staticmethod(lambda memory, start, steps: steps)
    map_observations = staticmethod(lambda see, minibatch: minibatch)
    transitions = staticmethod(lambda minibatch, weight: (minibatch, weight))
    priority = staticmethod(lambda error: error)

    @staticmethod
    def sample(priority, key):
        return Sample(transition(), jnp.zeros(4), jnp.ones(4))


class ConstantBufferDQN(algos.DQN):
    buffer = ConstantBuffer


def test_weights_and_priorities_by_hand():
    """Importance exponents 0.4 and 0.7, on the way to 1. Priorities are the absolute errors 2.5, 1, 2 and 2.

    The weighted loss is (3.125 + 0.5 + 2 + 2) / 4 = 1.90625 times the weight.
    """
    env = envs.make("CartPole-v1")
    fields = {"num_envs": 4, "num_steps": 2, "total_steps": 16, "learning_rate": 1e-20, "batch_size": 4}
    fields["priority_exponent"] = 0.5  # otherwise the buffer is not used between updates
    algorithm = ConstantBufferDQN(env=env, network=TABLE, **fields)
    assert algorithm.num_iterations == 2 and algorithm.updates_per_iteration == 1
    state = jax.jit(algorithm.init)(jax.random.key(0))
    learned = state.learned._replace(parameters=ONLINE, target_parameters=TARGET)
    state, iterate = state._replace(learned=learned), jax.jit(algorithm.iterate)
    for weight in (0.4, 0.7):
        state, metrics = iterate(state)
        np.testing.assert_allclose(state.replay, [2.5, 1.0, 2.0, 2.0], rtol=1e-5)
        assert float(metrics["loss"]) == pytest.approx(1.90625 * weight, rel=1e-5)


def test_buffer_settings():
    fields = {"buffer_size": 400, "learning_starts": 12, "n_step": 3, "priority_exponent": 0.6}
    algorithm = dqn(batch_size=8, discount=0.9, **fields)
    assert algorithm.buffer == Replay(num_envs=4, batch_size=8, discount=0.9, **fields)


# --- probe environments ---

QUICK = {
    "num_envs": 8, "num_steps": 4, "total_steps": 5_000, "buffer_size": 2_000, "batch_size": 32,
    "learning_starts": 64, "updates_per_step": 0.5, "target_period": 20, "learning_rate": 3e-3,
    "hidden": (16,),
}  # fmt: skip
OPTIONS = {"double": True, "dueling": True, "n_step": 3, "priority_exponent": 0.6}


def test_masked_actions():
    """Each of three observations has actions with reward 1, reward -1, and a masked one.

    Replay stores masks; the masked action's reward of 1,000 would show in the return.
    """
    algorithm = algos.DQN(env=envs.make("probe:masked"), **QUICK, **OPTIONS)
    state = trained(algorithm, 100)
    score = algorithm.evaluate(state, jax.random.key(1), 16)["return"]
    assert float(score) == algorithm.env.single.optimal_return
