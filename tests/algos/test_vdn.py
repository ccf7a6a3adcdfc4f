"""VDN, and what it shares with QMIX: targets and losses by hand, unlike agents, refusals.

Sunehag et al. 2018 (arXiv 1706.05296), section 3: the sum. The loss is equation 6 of QMIX's paper (arXiv
1803.11485), its targets those of double Q-learning (`test_dqn.py`) and lambda-returns (`test_returns.py`).
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
from tests.algos.probes import trained

# A network of three observations, 0, 1 and 2, and two actions that is a table: its parameters are its values.
TABLE = algos.Network(
    init=lambda key, observation: jnp.zeros((3, 2)),
    apply=lambda table, observation: table[observation[:, 0].astype(jnp.int32)],
)
ONLINE = Parameters(jnp.array([[1.0, 2.0], [4.0, 3.0], [0.0, 5.0]]), ())
TARGET = Parameters(jnp.array([[6.0, 2.0], [1.0, 8.0], [3.0, 4.0]]), ())


def vdn(**fields):
    sizes = {"num_envs": 1, "num_steps": 3, "batch_size": 1, "discount": 0.5, "network": TABLE}
    return algos.VDN(**{"env": envs.make("probe:agents"), **sizes, **fields})


def sequence():
    """Three steps of two agents, of which the second is truncated, and the third leads to 2, 2."""

    def seen(*pairs):
        return jnp.array(pairs, jnp.float32)[None, :, :, None]

    steps = Step(
        observation=seen((0, 1), (1, 2), (2, 0)),
        action=jnp.array([[[0, 1], [1, 1], [0, 0]]]),
        reward=jnp.array([[[1.0, 3.0], [0.0, 2.0], [4.0, 0.0]]]),  # of the team: 2, 1 and 2
        terminated=jnp.zeros((1, 3), bool),
        truncated=jnp.array([[False, True, False]]),
        final_observation=seen((1, 2), (0, 0), (2, 2)),
    )
    return Sequences((), jnp.array([[True, False, True]]), steps)


def target(algorithm, parameters=ONLINE, older=TARGET):
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), sequence())
    return algorithm._target(parameters, older, (), sequences, ())[:, 0]


def test_targets_by_hand():
    """The best of the target network: 8 + 4 after the first step, 6 + 6, 4 + 4.

    Those that learn prefer 0, 1 after the first step, 1, 1 after the second, and 1, 1: 1 + 4, 2 + 2, 4 + 4.
    """
    np.testing.assert_allclose(target(vdn(double=False)), [2 + 6, 1 + 6, 2 + 4])
    np.testing.assert_allclose(target(vdn()), [2 + 2.5, 1 + 2, 2 + 4])
    # Lambda 1/2: the first step is followed by half of its own 5 and half of the 3 of the second step.
    np.testing.assert_allclose(target(vdn(q_lambda=0.5)), [2 + 0.5 * (2.5 + 1.5), 3, 6])
    np.testing.assert_allclose(target(vdn(reward_scale=2.0)), [4 + 2.5, 2 + 2, 4 + 4])
    ended = sequence().steps._replace(terminated=jnp.array([[False, False, True]]))
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), sequence()._replace(steps=ended))
    assert float(vdn()._target(ONLINE, TARGET, (), sequences, ())[2, 0]) == 2.0


def test_the_loss_by_hand():
    """Values of what was done: 1 + 3, 3 + 5 and 0 + 1; targets 4.5, 3 and 6: errors 1/2, -5 and 5.

    The loss is half the mean of their squares, (1/4 + 25 + 25) / 6, times the weight; the gradient is minus
    the error, a third of it, times the weight, at both agents' actions.
    """
    gradient, error, losses = vdn().gradient(ONLINE, TARGET, sequence(), jnp.array([2.0]))
    assert float(losses["loss"]) == pytest.approx(2 * 50.25 / 6)
    assert float(error[0]) == pytest.approx(10.5 / 3)
    by_hand = 2 / 3 * np.array([[-0.5 - 5.0, 0.0], [0.0, -0.5 + 5.0], [-5.0, 5.0]])
    np.testing.assert_allclose(gradient.agents, by_hand, rtol=1e-6)


# --- actions of several choices ---


@dataclasses.dataclass(frozen=True)
class Chooses:
    """Two agents see 0 or 1 each, and are paid if both choices, of two and of three, are what they saw.

    And a constant: of a state that is all zeros first hypernetworks, without biases, make no mixture.
    """

    name: str = "chooses"
    num_agents: typing.ClassVar = 2
    observation_space: typing.ClassVar = envs.Box(0.0, 1.0, (2,))
    action_space: typing.ClassVar = envs.MultiDiscrete((2, 3))
    max_episode_steps: typing.ClassVar = None

    def reset(self, key):
        seen = jax.random.bernoulli(key, shape=(2, 1))
        return seen, jnp.pad(seen.astype(jnp.float32), ((0, 0), (0, 1)), constant_values=1.0)

    def step(self, key, state, action):
        right = jnp.all(action == state, axis=-1)
        return state, jnp.ones((2, 2)), right.astype(jnp.float32), jnp.bool_(True), jnp.bool_(False)


def test_choices_by_hand():
    """One step, the agents saw 0 and 1, chose (1, 2) and (0, 0), and see 1 and 0: 2 + 3 + 4 + 2 = 11.

    Those that learn prefer (0, 0) then, and (1, 1): by the target 60 + 80 + 20 + 40 = 200, half of which, and
    the 2 that the team earns, is 91 more. Where the first choice of 1 may not be 0, it is 1: 70 for 60.
    """
    table = algos.Network(lambda key, seen: None, lambda table, seen: table[seen[:, 0].astype(jnp.int32)])
    chooses = envs.vectorize(Chooses())
    fields = {"num_envs": 1, "num_steps": 1, "batch_size": 1, "discount": 0.5}
    algorithm = algos.VDN(env=chooses, network=table, **fields)
    online = Parameters(jnp.array([[1.0, 2.0, 0.0, 5.0, 3.0], [4.0, 3.0, 2.0, 1.0, 0.0]]), ())
    older = Parameters(10 * jnp.arange(1.0, 11.0).reshape(2, 5), ())
    never, following = jnp.zeros((1, 1), bool), jnp.array([[[[1.0, 0.0], [0.0, 0.0]]]])
    action, reward = jnp.array([[[[1, 2], [0, 0]]]]), jnp.array([[[1.0, 3.0]]])
    steps = Step(following[:, :, ::-1], action, reward, never, never, following)
    gradients = jax.jit(algorithm.gradient)
    gradient, error, _ = gradients(online, older, Sequences((), never, steps), jnp.ones(1))
    assert error.tolist() == [91.0]
    assert gradient.agents.tolist() == [[0, -91, 0, 0, -91], [-91, 0, -91, 0, 0]]
    mask = jnp.ones((1, 1, 2, 5), bool).at[0, 0, 0, 0].set(False)
    steps = steps._replace(final_observation=envs.MaskedObservation(following, mask))
    _, error, _ = gradients(online, older, Sequences((), never, steps), jnp.ones(1))
    assert error.tolist() == [96.0]
    # A dueling head: the advantages of each choice are centred, so all have the mean V.
    dueling = algos.VDN(env=chooses, dueling=True, hidden=(4,), **fields)
    init, _, unroll = dueling._network

    @jax.jit
    def found(key, seen):
        return unroll(init(key, seen), (), seen, never).values

    values = found(jax.random.key(0), jnp.ones((1, 1, 2, 2)))
    np.testing.assert_allclose(values[..., :2].mean(-1), values[..., 2:].mean(-1), rtol=1e-5)
    assert float(jnp.std(values)) > 0.01


QUICK = {
    "num_envs": 8, "num_steps": 4, "batch_size": 16, "num_updates": 2, "buffer_size": 2_000, "hidden": (16,),
    "learning_starts": 64, "total_steps": 10_000, "target_period": 20, "anneal_learning_rate": False,
}  # fmt: skip


def test_unlike_agents():
    """Observations in parts, and actions that only one of them has: the other's are masked."""
    algorithm = algos.VDN(env=envs.make("probe:unlike"), **QUICK)
    state = trained(algorithm, 150)
    assert float(algorithm.evaluate(state, jax.random.key(1), 64)["return"]) > 0.9


# --- refusals ---


def test_a_network_of_another_width_is_refused():
    table = algos.Network(TABLE.init, lambda table, observation: TABLE.apply(table, observation)[:, :1])
    algorithm = vdn(network=table)
    with pytest.raises(
        FdgError, match=r"float32\[1, 1, 2, 1\]: it must be \[1, 1, 2, 2\], one for each of 2"
    ):
        algorithm.check_when_traced(jax.eval_shape(algorithm.init, jax.random.key(0)))
