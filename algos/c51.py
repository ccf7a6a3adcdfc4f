"""Categorical DQN, C51 (Bellemare, Dabney and Munos 2017, "A Distributional Perspective on Reinforcement
Learning", arXiv 1707.06887): DQN with probabilities of returns from a fixed grid.

All but the loss is `algos/distributional.py`.

Letters in shapes: `N` samples of a minibatch, `n` actions, `K` atoms.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from algos.critic_readings import Distributions
from algos.distributional import DistributionalDQN, of_action
from algos.replay import Transition
from fdg.settings.fields import hyperparameter, require


@dataclasses.dataclass(frozen=True)
class C51(DistributionalDQN):
    """C51 for discrete actions, with the fields of `DQN` and three of its own.

    Returns are thought to lie between `value_min` and `value_max`; the metric `outside` says what part of the
    targets does not. Defaults of the grid are those of CleanRL's `c51.py` (Huang et al. 2022, JMLR 23(274)),
    for CartPole; the paper's 51 atoms from -10 to 10 are for Atari's clipped rewards.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> C51(env=envs.make("CartPole-v1"), atoms=5)._grid.returns.tolist()
    [-100.0, -50.0, 0.0, 50.0, 100.0]
    """

    presets_of: ClassVar[str] = "C51"

    atoms: int = hyperparameter(101, "K, returns of the grid")
    value_min: float = hyperparameter(-100.0, "the smallest of them")
    value_max: float = hyperparameter(100.0, "the largest")

    def __post_init__(self):
        super().__post_init__()
        require(self, self.atoms >= 2, f"atoms={self.atoms}: a grid has two at least")
        require(
            self,
            self.value_min < self.value_max,
            f"value_min={self.value_min}, value_max={self.value_max}: the first must be below the second",
        )

    @property
    def numbers_of_an_action(self) -> int:
        """K."""
        return self.atoms

    # --- parts ---

    @property
    def _grid(self) -> Distributions:
        """The atoms (section 4)."""
        return Distributions(self.atoms, self.value_min, self.value_max)

    def _mean(self, numbers: jax.Array) -> jax.Array:
        """Means over the atoms, of logits."""
        return self._grid.value(numbers)

    def loss(self, parameters, target_parameters, transition: Transition, weight):
        """Cross-entropy of the projected target and the prediction (algorithm 1, its last line)."""
        logits = of_action(self._numbers(parameters, transition.observation), transition.action)
        target, outside = jax.lax.stop_gradient(self._projected(parameters, target_parameters, transition))
        cross_entropy = -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)
        loss = jnp.mean(weight * cross_entropy)
        # Where replay is prioritised, by the divergence that is minimised: Hessel et al. 2018, arXiv
        # 1710.02298, section "The integrated agent".
        divergence = cross_entropy + jnp.sum(jax.scipy.special.xlogy(target, target), axis=-1)
        parts = {"loss": loss, "value": jnp.mean(self._mean(logits)), "outside": jnp.mean(outside)}
        return loss, (divergence, parts)

    def _projected(
        self, parameters, target_parameters, transition: Transition
    ) -> tuple[jax.Array, jax.Array]:
        """Probabilities of the atoms `[N, K]` of the best action's return, and what lay outside `[N]`.

        Equation 7: each return that can follow, `r + discount * z`, held within the grid, is divided between
        its two neighbours.
        """
        probability = jax.nn.softmax(self._following(parameters, target_parameters, transition))
        returns = transition.reward[:, None] + transition.discount[:, None] * self._grid.returns[None]
        is_outside = (returns < self.value_min) | (returns > self.value_max)
        outside = jnp.sum(jnp.where(is_outside, probability, 0.0), axis=1)
        return self._grid.projected(probability, returns), outside
