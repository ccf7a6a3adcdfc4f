"""What soft actor-critics share: an actor that is paid for its entropy, and the temperature that weighs it.

Haarnoja et al. 2018 (arXiv 1812.05905), by whose numbers equations go here.

Letters in shapes: `N` samples of a minibatch, `D` components of an action.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.critic_readings import Distributions, Values
from algos.distributions import TanhNormal
from algos.replay import Transition
from fdg.settings.fields import hyperparameter, require_positive
from fdg.settings.parts import Part

_LOG_STD_BOUNDS = (-20.0, 2.0)  # as in the authors' code, github.com/rail-berkeley/softlearning


class Parameters(NamedTuple):
    """What gradients are taken by."""

    actor: Any
    critics: Any  # of both
    log_temperature: jax.Array  # [] float32, log alpha


@dataclasses.dataclass(frozen=True)
class Entropy(Part):
    """What entropy is worth, and the temperature that weighs it."""

    initial_temperature: float = hyperparameter(1.0, "alpha at first: the weight of the entropy")
    target_entropy: float | None = hyperparameter(
        None, "nats that the temperature aims at, of actions in [-1, 1]; None: minus one for each component"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses a temperature that is not positive."""
        require_positive(algorithm, "initial_temperature")

    def begin(self) -> jax.Array:
        """The log of the temperature at first: `[]` float32."""
        return jnp.log(jnp.float32(self.initial_temperature))

    def losses(
        self, log_temperature: jax.Array, log_prob: jax.Array, value: jax.Array, shape: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The losses of the actor and of the temperature, and metrics.

        Each has a gradient by its own part of the parameters only: the temperature is a constant to the
        actor, and the actor's actions are constants to it.

        Args:
          log_temperature: `[]` float32.
          log_prob, value: `[N]` float32, of actions that the actor drew.
          shape: of an action; the target is minus one for each component (appendix D), unless it is given.
        """
        target = -float(math.prod(shape)) if self.target_entropy is None else self.target_entropy
        temperature = jnp.exp(jax.lax.stop_gradient(log_temperature))
        actor_loss = jnp.mean(temperature * log_prob - value)  # equations 7 and 9
        entropy = -jnp.mean(jax.lax.stop_gradient(log_prob))
        temperature_loss = jnp.exp(log_temperature) * (entropy - target)  # equation 18
        metrics = {
            "actor_loss": actor_loss,
            "value": jnp.mean(value),
            "entropy": entropy,
            "temperature": temperature,
        }
        return actor_loss, temperature_loss, metrics


def squashed(output: jax.Array, shape: tuple[int, ...]) -> TanhNormal:
    """What an actor's network gives, `[N, 2 * D]`, as a distribution over actions in [-1, 1]."""
    mean, log_std = jnp.split(output, 2, axis=-1)
    return TanhNormal(mean, jnp.clip(log_std, *_LOG_STD_BOUNDS), shape)


def target(
    reading: Values | Distributions,
    transition: Transition,
    temperature: jax.Array,
    following: tuple[jax.Array, jax.Array],
    next_log_prob: jax.Array,
) -> jax.Array:
    """What the critics are fitted to: equation 2, and for the value that follows equation 3.

    `following` is what both critics give for the action that follows; the lower counts (section 6).
    """
    # The discount is zero where the episode terminated, and not where it was truncated.
    (first, second), cost = following, temperature * next_log_prob
    found = reading.target(transition.reward, transition.discount, first, second, cost)
    return jax.lax.stop_gradient(found)
