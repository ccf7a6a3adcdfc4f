"""Acting on values: most often the best action, now and then any."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from algos.distributions import Categorical
from fdg.settings.fields import hyperparameter, require_within
from fdg.settings.parts import Part


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
