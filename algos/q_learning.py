"""What algorithms share that learn the value of each action (`DQN`, `PQN`, ...), as functions.

Where an action is several choices (`MultiDiscrete`) there are as many values as the sum of the choices, and
not as their product: each choice is a branch that is valued, and explored, by itself (Tavakoli et al. 2018,
arXiv 1711.08946). All are fitted to one target, what the best of each is worth in the mean (its equation 6).

Letters in shapes: `B` environments, `N` rows of any origin, `M` choices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from algos import given
from algos.distributions import Categorical, allowed_values, sizes
from algos.given import Network
from algos.over_sequences import separated
from algos.rollout import Actor, chosen, empty_memory
from envs import Discrete, Environment, MultiDiscrete, Observation, composite
from fdg.settings.fields import hyperparameter, require_within
from fdg.settings.parts import Part

# --- acting: most often the best action, now and then any ---


@dataclasses.dataclass(frozen=True)
class Exploration(Part):
    """How often an action is drawn at random, in the course of a run."""

    epsilon_start: float = hyperparameter(1.0, "probability of a random action, at first")
    epsilon_end: float = hyperparameter(0.05, "and in the end")
    exploration_fraction: float = hyperparameter(0.5, "part of the run in which it falls, linearly")

    def epsilon(self, iteration: jax.Array, num_iterations: int) -> jax.Array:
        """Probability of a random action in an iteration of so many: `[]` float32."""
        duration = self.exploration_fraction * num_iterations
        return linear(self.epsilon_start, self.epsilon_end, duration, iteration)

    def check(self, algorithm: Any) -> None:
        """Refuses a probability or a fraction outside of [0, 1]."""
        require_within(algorithm, 0, 1, "epsilon_start", "epsilon_end", "exploration_fraction")


def epsilon_greedy(values: jax.Array, epsilon: float | jax.Array) -> Categorical:
    """The best action, but with probability `epsilon` any that is allowed (Watkins 1989, section 8.1).

    Args:
        values: `[..., n]` float32, of each action; `-inf` where it is not allowed.
        epsilon: scalar in [0, 1].

    Returns:
        A distribution: `sample(keys)` acts, with a key for each element of the batch; `mode()` is the best
        action as long as `epsilon` is below one.

    >>> policy = epsilon_greedy(jnp.array([[1.0, 3.0, 2.0, -jnp.inf]]), 0.3)
    >>> [round(float(p), 3) for p in jnp.exp(policy.logits[0])]
    [0.1, 0.8, 0.1, 0.0]
    """
    allowed = values > -jnp.inf
    any_allowed = allowed / jnp.sum(allowed, axis=-1, keepdims=True)
    best = jax.nn.one_hot(jnp.argmax(values, axis=-1), values.shape[-1], dtype=values.dtype)
    return Categorical(jnp.log((1.0 - epsilon) * best + epsilon * any_allowed))


def linear(
    start: float | jax.Array, end: float | jax.Array, duration: float | jax.Array, time: jax.Array
) -> jax.Array:
    """A number that goes from `start` to `end` in so much time, and stays there: `[]` float32.

    >>> [float(linear(1.0, 0.5, 10.0, jnp.int32(time))) for time in (0, 5, 10, 99)]
    [1.0, 0.75, 0.5, 0.5]
    """
    if isinstance(duration, jax.Array):  # it may be traced
        lasts = duration > 0
        progress = jnp.where(lasts, jnp.clip(time / jnp.where(lasts, duration, 1.0), 0.0, 1.0), 1.0)
    else:
        progress = jnp.clip(time / duration, 0.0, 1.0) if duration > 0 else jnp.float32(1.0)
    return start + (end - start) * progress


# --- values of actions ---


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
    features, action_mask = separated(observation)
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
    given.action_values(jax.eval_shape(network.apply, parameters, features), sum(sizes(space)), num_envs)


def over_choices(each: jax.Array, reduced: Callable[[jax.Array, int], jax.Array] = jnp.mean) -> jax.Array:
    """What each choice of an action is worth, `[N, M]`, as one number, `[N]`; of one choice it stays `[N]`.

    >>> over_choices(jnp.array([[1.0, 3.0]])).tolist(), over_choices(jnp.array([1.0, 3.0])).tolist()
    ([2.0], [1.0, 3.0])
    """
    return each if each.ndim == 1 else reduced(each, -1)


def for_each_choice(one: jax.Array, values: jax.Array) -> jax.Array:
    """Numbers `[N]` in a shape that goes with `values`, `[N]` or `[N, M]`."""
    return one if values.ndim == 1 else one[:, None]
