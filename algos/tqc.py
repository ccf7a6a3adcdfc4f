"""Truncated quantile critics (TQC; Kuznetsov, Shvechikov, Grishin and Vetrov 2020, ICML, arXiv 2005.04269).

Soft actor-critic whose critics give quantiles of the return. Targets are the quantiles of all critics
together without the largest, which controls overestimation. All else is `algos/redq.py`.

Letters in shapes: `E` critics, `K` quantiles of each, `N` samples of a minibatch.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from algos.losses import quantile_error
from algos.redq import Ensemble, SoftEnsemble
from algos.replay import Transition
from fdg.settings.fields import hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class TQC(SoftEnsemble):
    """TQC for continuous actions within bounds.

    Defaults are those of the paper (its table of hyperparameters): five critics of three layers
    of 512, 25 quantiles of each, of which two are dropped; but for four environments that are stepped
    together.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> TQC(env=envs.make("Pendulum-v1")).num_critics
    5
    """

    presets_of: ClassVar[str] = "TQC"

    ensemble = Ensemble(num_critics=5, critic_hidden=(512, 512, 512))
    quantiles: int = hyperparameter(25, "K, of each critic")
    dropped_quantiles: int = hyperparameter(
        2, "d: the largest of the targets that are left out, for each critic"
    )
    huber_threshold: float = hyperparameter(1.0, "kappa: error from which on the quantile loss is a line")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "quantiles", "huber_threshold")
        require(
            self,
            0 <= self.dropped_quantiles < self.quantiles,
            f"dropped_quantiles={self.dropped_quantiles}: it is from 0 to below quantiles={self.quantiles}",
        )

    def _target(self, transition: Transition, following, cost, keys) -> jax.Array:
        """Algorithm 1: `[N, K']`, of the `K' = E * (K - d)` smallest quantiles of all critics together."""
        kept = len(following) * (self.quantiles - self.dropped_quantiles)
        together = jnp.sort(following.swapaxes(0, 1).reshape(following.shape[1], -1), axis=-1)[:, :kept]
        return transition.reward[:, None] + transition.discount[:, None] * (together - cost[:, None])

    def _error(self, given, target) -> jax.Array:
        """The mean quantile Huber losses, summed over critics."""
        of_one = lambda quantiles: quantile_error(quantiles, target, self.huber_threshold)  # noqa: E731
        return jnp.sum(jax.vmap(of_one)(given), axis=0) / self.quantiles

    @property
    def _outputs(self) -> int:
        return self.quantiles
