"""Recurrent networks: sequences match single steps, episode starts reset memory, agents are independent."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos import networks
from algos.memories import ForgetfulGRU
from algos.recurrent import recurrent_actor_critic
from envs.spaces import Box, Discrete
from fdg.errors import UnknownNameError

SPACE, ACTIONS = Box(-1.0, 1.0, (3,)), Box(-1.0, 1.0, (2,))
STEPS, ENVS, AGENTS = 5, 4, 3


@functools.cache
def build(num_agents=None, central=False, memory_size=6):
    """A network, its parameters, and its `unroll` compiled."""
    network = recurrent_actor_critic(
        SPACE, ACTIONS, hidden=(7,), memory_size=memory_size, num_agents=num_agents, central=central
    )
    parameters = jax.jit(network.init)(jax.random.key(0), observations(num_agents))
    return network, parameters, jax.jit(network.unroll)


def observations(num_agents=None, seed=0):
    shape = (STEPS, ENVS) if num_agents is None else (STEPS, ENVS, num_agents)
    return jax.random.normal(jax.random.key(seed), (*shape, 3))


def starts(*when):
    """`[T, B]`: True at each `(t, b)` that starts an episode."""
    start = np.zeros((STEPS, ENVS), bool)
    for t, b in when:
        start[t, b] = True
    return jnp.asarray(start)


def assert_same(expected, actual):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), expected, actual)


def assert_close(expected, actual):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), expected, actual)


def test_gru_matches_flax():
    """Compares values and gradients by every argument with flax's cell, step by step, with episode starts."""
    unit, cell = ForgetfulGRU(5), nn.GRUCell(5)
    keys = jax.random.split(jax.random.key(1), 4)
    memory, inputs = jax.random.normal(keys[0], (3, 5)), jax.random.normal(keys[1], (6, 3, 4))
    weight = jax.random.normal(keys[2], (6, 3, 5))
    start = jnp.zeros((6, 3), bool).at[2, 1].set(True).at[0, 2].set(True).at[5, 1].set(True)
    parameters = unit.init(keys[3], memory, inputs, start)["params"]["gru"]
    parameters = jax.tree.map(lambda x: x + 0.1, parameters)  # no bias is zero

    def ours(parameters, memory, inputs):
        return unit.apply({"params": {"gru": parameters}}, memory, inputs, start)[0]

    def oracle(parameters, memory, inputs):
        after = []
        for t in range(len(inputs)):
            memory = jnp.where(start[t][:, None], 0.0, memory)
            memory, _ = cell.apply({"params": parameters}, memory, inputs[t])
            after.append(memory)
        return jnp.stack(after)

    assert_same(oracle(parameters, memory, inputs), ours(parameters, memory, inputs))

    def gradients(function):
        def loss(*arguments):
            return jnp.sum(weight * function(*arguments))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(parameters, memory, inputs)

    assert_close(gradients(oracle), gradients(ours))


@pytest.mark.parametrize(("num_agents", "central"), [(None, False), (AGENTS, True)])
def test_episode_start_resets_memory(num_agents, central):
    """After an episode start, earlier memory and observations have no influence; elsewhere they have."""
    network, parameters, unroll = build(num_agents, central)
    start = starts((2, 1))
    observation = observations(num_agents)
    other = observation.at[:2].set(observations(num_agents, seed=1)[:2])
    memory = network.memory(ENVS)
    first = unroll(parameters, memory, observation, start)
    second = unroll(parameters, jax.tree.map(lambda x: x + 1.0, memory), other, start)
    assert_same(*(jax.tree.map(lambda x: x[2:, 1], output) for output in (first, second)))
    assert float(jnp.min(jnp.abs(first.value[2:, 0] - second.value[2:, 0]))) > 1e-6

    # Gradients stop there too.
    def late_value(observation):
        return jnp.sum(network.unroll(parameters, memory, observation, start).value[3:])

    flows = jnp.abs(jax.jit(jax.grad(late_value))(observation)).reshape(STEPS, ENVS, -1).sum(-1)
    assert float(jnp.max(flows[:2, 1])) == 0.0 and float(jnp.min(flows[2:, 1])) > 0.0
    assert float(jnp.min(flows[:2, 0])) > 0.0


def test_agents_share_only_parameters():
    """Each agent's results match a single-agent network with the agent's observations."""
    _, parameters, unroll = build(AGENTS)
    single, _, unroll_one = build()
    observation, start = observations(AGENTS), starts((1, 0), (3, 2))
    together = unroll(parameters, build(AGENTS)[0].memory(ENVS), observation, start)
    for a in range(AGENTS):
        alone = unroll_one(parameters, single.memory(ENVS), observation[:, :, a], start)
        assert_same(alone, jax.tree.map(lambda x, a=a: x[:, :, a], together))


def test_central_critic_sees_all_agents():
    network, parameters, unroll = build(AGENTS, central=True)
    observation, start, memory = observations(AGENTS), starts(), network.memory(ENVS)
    first = unroll(parameters, memory, observation, start)
    second = unroll(parameters, memory, observation.at[:, :, 0].add(1.0), start)
    moved = jnp.abs(first.value - second.value).min(axis=(0, 1))
    assert float(moved.min()) > 1e-4  # the value of every agent
    policy_moved = jnp.abs(first.policy - second.policy)[..., :2].sum(-1).max(axis=(0, 1))
    assert policy_moved[0] > 1e-6 and (policy_moved[1:] == 0).all()


def test_no_memory_matches_actor_critic():
    network, parameters, unroll = build(memory_size=None)
    ordinary = networks.actor_critic(SPACE, ACTIONS, hidden=(7,))
    observation = observations()
    rows = observation.reshape(-1, 3)
    assert_same(parameters, jax.jit(ordinary.init)(jax.random.key(0), rows))
    output, value = ordinary.apply(parameters, rows)
    result = unroll(parameters, network.memory(ENVS), observation, starts())
    assert_same((output, value), (result.policy.reshape(-1, 4), result.value.reshape(-1)))
    assert jax.tree.leaves(result.memory) == []


def test_images_of_agents_are_stacked_as_channels():
    network = recurrent_actor_critic(
        Box(0.0, 1.0, (5, 4, 2)), Discrete(3), memory_size=4, num_agents=2, central=True
    )
    observation = jnp.zeros((2, 3, 2, 5, 4, 2))
    parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    assert parameters["actor"]["Convolution_0"]["kernel"].shape == (3, 3, 2, 16)
    assert parameters["critic"]["Convolution_0"]["kernel"].shape == (3, 3, 4, 16)
    output = jax.eval_shape(
        network.unroll, parameters, network.memory(3), observation, jnp.zeros((2, 3), bool)
    )
    assert output.policy.shape == (2, 3, 2, 3) and output.value.shape == (2, 3, 2)


def test_equality_and_unknown_activation():
    assert recurrent_actor_critic(SPACE, ACTIONS) == recurrent_actor_critic(SPACE, ACTIONS)
    assert recurrent_actor_critic(SPACE, ACTIONS) != recurrent_actor_critic(SPACE, ACTIONS, memory_size=4)
    assert hash(recurrent_actor_critic(SPACE, ACTIONS)) == hash(recurrent_actor_critic(SPACE, ACTIONS))
    with pytest.raises(UnknownNameError, match="tahn"):
        recurrent_actor_critic(SPACE, ACTIONS, activation="tahn")
