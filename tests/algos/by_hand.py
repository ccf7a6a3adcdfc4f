"""Networks with one parameter, for losses and gradients by hand."""

import math

import jax
import jax.numpy as jnp

import algos
import envs
from algos.replay import Transition

HALF = jnp.float32(math.atanh(0.5))  # actor parameter: tanh of it is the action 1/2
ONE = envs.make("probe:continuous")  # observations [1], actions [1] in [-1, 1]


def of_action(c, observation, action):
    """Value `c_i * action` for critic i."""
    return c[0] * action[:, 0], c[1] * action[:, 0]


def column(*numbers):
    return jnp.array(numbers)[:, None]


def transitions(action, reward, discount):
    zeros = jnp.zeros((len(action), 1))
    return Transition(zeros, jnp.array(action)[:, None], jnp.array(reward), jnp.array(discount), zeros)


def discrete_transitions(action, reward, discount):
    """Transitions with actions `[N]`, and observations of zero."""
    zeros = jnp.zeros((len(action), 1))
    return Transition(zeros, jnp.array(action), jnp.array(reward), jnp.array(discount), zeros)


def in_two_envs(*values):
    """`[T]` repeated to `[T, B = 2]`."""
    return jnp.stack([jnp.array(values)] * 2, axis=1)


def time_step(reward, terminated, truncated, final):
    """A rollout `[T, B]` with scalar final observations."""
    zero = jnp.zeros_like(reward)
    return envs.TimeStep(
        observation=None, reward=reward, terminated=terminated, truncated=truncated,
        final_observation=final[..., None], episode_return=zero, episode_length=zero.astype(jnp.int32),
    )  # fmt: skip


def keys(count, each=1):
    return jax.random.split(jax.random.key(0), (each, count))


CRITICS = algos.Network(lambda key, observation, action: jnp.zeros(2), of_action)
MEAN = algos.Network(
    lambda key, observation: jnp.float32(0.0), lambda x, observation: jnp.full((len(observation), 1), x)
)
GAUSSIAN = algos.Network(
    lambda key, observation: jnp.float32(0.0),
    lambda x, observation: jnp.stack([jnp.full(len(observation), x), jnp.zeros(len(observation))], 1),
)
NARROW = algos.Network(  # the mean is the parameter; the standard deviation is near 0
    lambda key, observation: jnp.float32(0.0),
    lambda x, observation: jnp.stack(
        [jnp.full(len(observation), x), jnp.full(len(observation), -99.0)], axis=-1
    ),
)
