"""Quantile-regression DQN (Dabney et al. 2017, arXiv 1710.10044): DQN with quantiles of each action's return.

All but the loss is `algos/distributional.py`.

Letters in shapes: `N` samples of a minibatch, `n` actions, `K` quantiles.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from algos.distributional import DistributionalDQN, of_action
from algos.losses import quantile_error
from algos.replay import Transition
from fdg.settings.fields import hyperparameter, require_positive


@dataclasses.dataclass(frozen=True)
class QRDQN(DistributionalDQN):
    """QR-DQN for discrete actions, with the fields of `DQN` and two of its own.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> QRDQN(env=envs.make("CartPole-v1")).quantiles
    51
    """

    presets_of: ClassVar[str] = "QRDQN"

    quantiles: int = hyperparameter(51, "K, of each action's return")
    huber_threshold: float = hyperparameter(1.0, "kappa: error from which on the quantile loss is a line")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "quantiles", "huber_threshold")

    @property
    def numbers_of_an_action(self) -> int:
        """K."""
        return self.quantiles

    # --- parts ---

    def _mean(self, numbers: jax.Array) -> jax.Array:
        """Means of quantiles (equation 1 of the paper's section 3)."""
        return jnp.mean(numbers, axis=-1)

    def loss(self, parameters, target_parameters, transition: Transition, weight):
        """As of `DQN`: quantile regression (equations 9 and 10)."""
        quantiles = of_action(self._numbers(parameters, transition.observation), transition.action)
        target = jax.lax.stop_gradient(self._target(parameters, target_parameters, transition))
        error = quantile_error(quantiles, target, self.huber_threshold)
        loss = jnp.mean(weight * error)
        mean_error = jnp.mean(target, axis=1) - jnp.mean(quantiles, axis=1)
        return loss, (mean_error, {"loss": loss, "value": jnp.mean(quantiles)})

    def _target(self, parameters, target_parameters, transition: Transition) -> jax.Array:
        """What the quantiles should be, `[N, K]`: by those of the best action in the mean (algorithm 1)."""
        following = self._following(parameters, target_parameters, transition)
        return transition.reward[:, None] + transition.discount[:, None] * following
