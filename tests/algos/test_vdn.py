"""VDN, and the code it shares with QMIX: targets and losses by hand, agents with different spaces.

Sunehag et al. 2018 (arXiv 1706.05296), section 3: the sum. The loss is equation 6 of the QMIX paper (arXiv
1803.11485); targets are those of double Q-learning (`test_dqn.py`) and lambda-returns (`test_returns.py`).
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.replay import Step
from algos.sequences import Sequences
from algos.value_decomposition import Parameters
from fdg.errors import FdgError

# Tabular Q-values for observations 0, 1 and 2 and two actions: the parameters are the values.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros((3, 2)),
    apply=lambda table, observation: table[observation[:, 0].astype(jnp.int32)],
)
ONLINE = Parameters(jnp.array([[1.0, 2.0], [4.0, 3.0], [0.0, 5.0]]), ())
TARGET = Parameters(jnp.array([[6.0, 2.0], [1.0, 8.0], [3.0, 4.0]]), ())


def vdn(**fields):
    settings = {"num_envs": 1, "num_steps": 3, "batch_size": 1, "discount": 0.5, "network": TABLE}
    return algos.VDN(**{"env": envs.make("probe:agents"), **settings, **fields})


def sequence():
    """Three steps of two agents; the second is truncated, the third has next observations 2, 2."""

    def observed(*pairs):
        return jnp.array(pairs, jnp.float32)[None, :, :, None]

    steps = Step(
        observation=observed((0, 1), (1, 2), (2, 0)),
        action=jnp.array([[[0, 1], [1, 1], [0, 0]]]),
        reward=jnp.array([[[1.0, 3.0], [0.0, 2.0], [4.0, 0.0]]]),  # team rewards: 2, 1 and 2
        terminated=jnp.zeros((1, 3), bool),
        truncated=jnp.array([[False, True, False]]),
        final_observation=observed((1, 2), (0, 0), (2, 2)),
    )
    return Sequences((), jnp.array([[True, False, True]]), steps)


def target(algorithm, parameters=ONLINE, older=TARGET):
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), sequence())
    return algorithm._target(parameters, older, (), sequences, ())[:, 0]


def test_targets_by_hand():
    """Maxima of the target network: 8 + 4 after the first step, then 6 + 6 and 4 + 4.

    Double: the online network prefers 0, 1 after the first step, then 1, 1 and 1, 1: 1 + 4, 2 + 2, 4 + 4.
    """
    np.testing.assert_allclose(target(vdn(double=False)), [2 + 6, 1 + 6, 2 + 4])
    np.testing.assert_allclose(target(vdn()), [2 + 2.5, 1 + 2, 2 + 4])
    # Lambda 1/2: the first step adds half of its own 5 and half of the second step's target 3.
    np.testing.assert_allclose(target(vdn(q_lambda=0.5)), [2 + 0.5 * (2.5 + 1.5), 3, 6])
    np.testing.assert_allclose(target(vdn(reward_scale=2.0)), [4 + 2.5, 2 + 2, 4 + 4])
    ended = sequence().steps._replace(terminated=jnp.array([[False, False, True]]))
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), sequence()._replace(steps=ended))
    assert float(vdn()._target(ONLINE, TARGET, (), sequences, ())[2, 0]) == 2.0


def test_loss_by_hand():
    """Values of the taken actions: 1 + 3, 3 + 5 and 0 + 1; targets 4.5, 3 and 6: errors 1/2, -5 and 5.

    The loss is half the mean squared error, (1/4 + 25 + 25) / 6, times the weight. The gradient at both
    agents' actions is minus a third of the error, times the weight.
    """
    gradient, error, losses = vdn().gradient(ONLINE, TARGET, sequence(), jnp.array([2.0]))
    assert float(losses["loss"]) == pytest.approx(2 * 50.25 / 6)
    assert float(error[0]) == pytest.approx(10.5 / 3)
    by_hand = 2 / 3 * np.array([[-0.5 - 5.0, 0.0], [0.0, -0.5 + 5.0], [-5.0, 5.0]])
    np.testing.assert_allclose(gradient.agents, by_hand, rtol=1e-6)


# --- multi-discrete actions ---


@dataclasses.dataclass(frozen=True)
class MultiChoice:
    """Two agents see 0 or 1; the reward is 1 if both choices, of two and three values, equal the observation.

    A constant component is added: with an all-zero state, the bias-free hypernetworks would output zero.
    """

    name: str = "chooses"
    num_agents: typing.ClassVar = 2
    observation_space: typing.ClassVar = envs.Box(0.0, 1.0, (2,))
    action_space: typing.ClassVar = envs.MultiDiscrete((2, 3))
    max_episode_steps: typing.ClassVar = None

    def reset(self, key):
        observed = jax.random.bernoulli(key, shape=(2, 1))
        return observed, jnp.pad(observed.astype(jnp.float32), ((0, 0), (0, 1)), constant_values=1.0)

    def step(self, key, state, action):
        right = jnp.all(action == state, axis=-1)
        return state, jnp.ones((2, 2)), right.astype(jnp.float32), jnp.bool_(True), jnp.bool_(False)


def test_multi_discrete_by_hand():
    """One step: observations 0 and 1, choices (1, 2) and (0, 0), next 1 and 0: 2 + 3 + 4 + 2 = 11.

    The online network then prefers (0, 0) and (1, 1): target 200 = 60 + 80 + 20 + 40, halved, plus the team
    reward 2, less 11: an error of 91. If the first choice of 1 cannot be 0, it is 1: 70 instead of 60.
    """
    table = algos.Network(lambda key, x: None, lambda table, x: table[x[:, 0].astype(jnp.int32)])
    choice_env = envs.vectorize(MultiChoice())
    fields = {"num_envs": 1, "num_steps": 1, "batch_size": 1, "discount": 0.5}
    algorithm = algos.VDN(env=choice_env, network=table, **fields)
    online = Parameters(jnp.array([[1.0, 2.0, 0.0, 5.0, 3.0], [4.0, 3.0, 2.0, 1.0, 0.0]]), ())
    older = Parameters(10 * jnp.arange(1.0, 11.0).reshape(2, 5), ())
    no_ends, following = jnp.zeros((1, 1), bool), jnp.array([[[[1.0, 0.0], [0.0, 0.0]]]])
    action, reward = jnp.array([[[[1, 2], [0, 0]]]]), jnp.array([[[1.0, 3.0]]])
    steps = Step(following[:, :, ::-1], action, reward, no_ends, no_ends, following)
    gradients = jax.jit(algorithm.gradient)
    gradient, error, _ = gradients(online, older, Sequences((), no_ends, steps), jnp.ones(1))
    assert error.tolist() == [91.0]
    assert gradient.agents.tolist() == [[0, -91, 0, 0, -91], [-91, 0, -91, 0, 0]]
    mask = jnp.ones((1, 1, 2, 5), bool).at[0, 0, 0, 0].set(False)
    steps = steps._replace(final_observation=envs.MaskedObservation(following, mask))
    _, error, _ = gradients(online, older, Sequences((), no_ends, steps), jnp.ones(1))
    assert error.tolist() == [96.0]
    # With a dueling head, the advantages of each choice are centred: all choices have the mean V.
    dueling = algos.VDN(env=choice_env, dueling=True, hidden=(4,), **fields)
    init, _, unroll = dueling._network

    @jax.jit
    def found(key, observed):
        return unroll(init(key, observed), (), observed, no_ends).values

    values = found(jax.random.key(0), jnp.ones((1, 1, 2, 2)))
    np.testing.assert_allclose(values[..., :2].mean(-1), values[..., 2:].mean(-1), rtol=1e-5)
    assert float(jnp.std(values)) > 0.01


# --- errors ---


def test_network_output_width():
    table = algos.Network(TABLE.init, lambda table, observation: TABLE.apply(table, observation)[:, :1])
    algorithm = vdn(network=table)
    with pytest.raises(
        FdgError, match=r"float32\[1, 1, 2, 1\]: it must be \[1, 1, 2, 2\], one for each of 2"
    ):
        algorithm.check_when_traced(jax.eval_shape(algorithm.init, jax.random.key(0)))
