"""Randomized ensembled double Q-learning (REDQ; Chen, Wang, Zhou and Ross 2021, ICLR, arXiv 2101.05982).

Soft actor-critic with many gradient steps for each environment step, which an ensemble of critics makes
stable: targets are the lowest of a few critics drawn at random. All else is `algos/soft_ensemble.py`.

Letters in shapes: `E` critics, `N` samples of a minibatch.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from algos.ensembles import Ensemble
from algos.replay import ReplayUpdates, Transition
from algos.soft_ensemble import SoftEnsemble
from fdg.settings.fields import hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class REDQ(SoftEnsemble):
    """REDQ for continuous actions within bounds.

    Defaults are those of the paper (its table of hyperparameters): 10 critics, 2 of them in a target, 20
    gradient steps of the critics for each environment step and each gradient step of the actor; but for four
    environments that are stepped together.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> REDQ(env=envs.make("Pendulum-v1"), num_envs=1).updates_per_iteration
    20
    """

    presets_of: ClassVar[str] = "REDQ"

    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=5_000, updates_per_step=20.0
    )
    ensemble = Ensemble(num_critics=10)
    subset: int = hyperparameter(2, "M, critics drawn at random whose lowest value is in a target")
    policy_delay: int = hyperparameter(20, "updates of the critics for each of the actor and the temperature")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "subset")
        require(
            self,
            self.subset <= self.num_critics,
            f"subset={self.subset} is more than num_critics={self.num_critics}: choose at most as many",
        )

    def _target(self, transition: Transition, following, cost, keys) -> jax.Array:
        """Algorithm 1: `[N]`, by the lowest value of `M` critics, drawn for each sample.

        The paper draws one subset for each minibatch; the expectation of the gradient is the same.
        """
        if self.subset < len(following):
            drawn = jax.vmap(lambda key: jax.random.uniform(key, following.shape[:1]), out_axes=1)(keys)
            among = drawn <= jnp.sort(drawn, axis=0)[self.subset - 1][None]
            following = jnp.where(among, following, jnp.inf)
        return transition.reward + transition.discount * (jnp.min(following, axis=0) - cost)

    def _error(self, given, target) -> jax.Array:
        """Half the squared errors, summed over critics."""
        return 0.5 * jnp.sum(jnp.square(given - target[None]), axis=0)
