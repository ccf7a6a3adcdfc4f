"""Networks of one number, by which losses and gradients are worked out by hand."""

import math

import jax
import jax.numpy as jnp

import algos
import envs
from algos.replay import Transition

HALF = jnp.float32(math.atanh(0.5))  # an actor that does one half
ONE = envs.make("probe:continuous")  # observations [1], actions [1] from -1 to 1


def of_action(c, observation, action):
    """Critics: the value of critic i is `c_i * action`."""
    return c[0] * action[:, 0], c[1] * action[:, 0]


def column(*numbers):
    return jnp.array(numbers)[:, None]


def transitions(action, reward, discount):
    zeros = jnp.zeros((len(action), 1))
    return Transition(zeros, jnp.array(action)[:, None], jnp.array(reward), jnp.array(discount), zeros)


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
NARROW = algos.Network(  # a mean, with almost no deviation
    lambda key, observation: jnp.float32(0.0),
    lambda x, observation: jnp.stack(
        [jnp.full(len(observation), x), jnp.full(len(observation), -99.0)], axis=-1
    ),
)
