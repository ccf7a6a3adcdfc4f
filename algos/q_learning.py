"""What algorithms share that learn the value of each action (`DQN`, `PQN`, ...), as functions.

Where an action is several choices (`MultiDiscrete`) there are as many values as the sum of the choices, and
not as their product: each choice is a branch that is valued, and explored, by itself (Tavakoli et al. 2018,
arXiv 1711.08946). All are fitted to one target, what the best of each is worth in the mean (its equation 6).

Letters in shapes: `B` environments, `N` rows of any origin, `M` choices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from algos import outputs
from algos.acting import Actor, chosen, empty_memory
from algos.distributions import Categorical, allowed_values, sizes
from algos.exploration import epsilon_greedy
from algos.networks import Network
from envs import Discrete, Environment, MultiDiscrete, Observation, composite, features_and_mask


def choices(env: Environment) -> Discrete | MultiDiscrete:
    """The action space of an environment, which an algorithm checked when it was constructed."""
    space = env.action_space
    assert isinstance(space, Discrete | MultiDiscrete)
    return space


def values(
    network: Network, parameters: Any, observation: Observation, space: Discrete | MultiDiscrete
) -> jax.Array:
    """Q of every action `[N, n]`, for observations `[N, *obs]` as the network sees them.

    Of several choices `[N, M, n]`, `n` being the most that one has. `-inf`: not allowed, or not there.
    """
    features, action_mask = features_and_mask(observation)
    return allowed_values(space, network.apply(parameters, features), action_mask)


def epsilon_greedy_actor(
    values_of: Callable[[Observation], jax.Array],
    epsilon: jax.Array,
    deliver: Callable[[jax.Array], jax.Array],
) -> Actor:
    """An actor without memory that takes the best action, or one drawn as in training.

    Args:
      values_of: of observations `[N, *obs]` the `values`.
      epsilon: `[]` float32, the probability of a random action in training.
      deliver: from its actions to those that the environment takes.
    """

    def act(memory, observation, start, keys, greedy):
        found = values_of(observation)
        policy = Categorical(found) if greedy else epsilon_greedy(found, epsilon)
        return deliver(chosen(policy, keys, greedy)), memory

    return Actor(empty_memory, act)


def check_values(
    network: Network, parameters: Any, env: Environment, num_envs: int, space: Discrete | MultiDiscrete
) -> None:
    """Refuses a network that does not give a number for each action of a space."""
    features = composite.types(env.observation_space, (num_envs,))
    outputs.action_values(jax.eval_shape(network.apply, parameters, features), sum(sizes(space)), num_envs)


def over_choices(each: jax.Array, reduced: Callable[[jax.Array, int], jax.Array] = jnp.mean) -> jax.Array:
    """What each choice of an action is worth, `[N, M]`, as one number, `[N]`; of one choice it stays `[N]`.

    >>> over_choices(jnp.array([[1.0, 3.0]])).tolist(), over_choices(jnp.array([1.0, 3.0])).tolist()
    ([2.0], [1.0, 3.0])
    """
    return each if each.ndim == 1 else reduced(each, -1)


def for_each_choice(one: jax.Array, values: jax.Array) -> jax.Array:
    """Numbers `[N]` in a shape that goes with `values`, `[N]` or `[N, M]`."""
    return one if values.ndim == 1 else one[:, None]
