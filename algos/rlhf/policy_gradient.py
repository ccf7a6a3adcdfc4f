"""Policy gradients on responses of one's own: what all of them have beside their losses.

Letters in shapes: `n` responses of a minibatch or a micro-batch of it, `R` tokens of a response.
"""

import dataclasses

import jax
import jax.numpy as jnp

from algos.hyperparameters import hyperparameter, is_traced, require
from algos.rlhf import losses
from algos.rlhf.judged import JudgedAgent


@dataclasses.dataclass(frozen=True)
class PolicyGradientAgent(JudgedAgent):
    """Base of those that may be paid for trying: a bonus for the entropy of each token, up to a cap."""

    entropy_coefficient: float = hyperparameter(0.0, "weight of an entropy bonus")
    entropy_cap: float | None = hyperparameter(
        None,
        "nats of a token's entropy beyond which the bonus does not grow (None: it always does)",
        only_with="entropy_coefficient",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        weight, cap = self.entropy_coefficient, self.entropy_cap
        require(self, weight >= 0, f"entropy_coefficient={weight}: it must be zero or above")
        require(self, cap is None or cap > 0, f"entropy_cap={cap}: it must be above zero, or None")

    def _less_bonus(self, loss: jax.Array, weight: jax.Array, entropy: jax.Array) -> jax.Array:
        """A loss less the bonus of tokens with such weights and entropies, `[n, R]` float32 each."""
        if not is_traced(self.entropy_coefficient) and not self.entropy_coefficient:
            return loss
        bonus = losses.entropy_bonus(entropy, self.entropy_cap)
        return loss - self.entropy_coefficient * jnp.sum(weight * bonus)
