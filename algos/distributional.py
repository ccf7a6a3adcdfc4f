"""DQN that learns how each action's return is distributed: what `QRDQN` and `C51` share.

The network gives `K` numbers for each action, which a subclass reads as quantiles, or as probabilities of
fixed returns. Acting takes the mean for the value, so all of `DQN`, its options included, stays as it is.

Letters in shapes: `N` samples of a minibatch, `n` actions, `K` numbers of each.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from algos import networks
from algos.distributions import allowed_only, sizes
from algos.dqn import DQN
from algos.over_sequences import separated
from algos.q_learning import choices
from algos.replay import Transition
from envs import Discrete, Observation
from fdg.settings.fields import hyperparameter, require


@dataclasses.dataclass(frozen=True)
class DistributionalDQN(DQN):
    """Base of `QRDQN` and `C51`; a subclass adds `numbers_of_an_action`, `_mean` and `loss`.

    One choice alone: the returns of branches that are fitted to a mean have no distribution of their own.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete,)

    max_error: float | None = hyperparameter(
        None, "not used here: the loss is another", structural="nothing here (the loss is another)"
    )

    def __post_init__(self):
        super().__post_init__()
        require(
            self,
            self.max_error is None,
            f"max_error={self.max_error}: distributions of returns have a loss of their own; leave it None",
        )
        require(
            self, not self.dueling, "dueling=True: distributions have no head of values and advantages here"
        )

    @property
    def numbers_of_an_action(self) -> int:
        """K."""
        raise NotImplementedError

    # --- parts ---

    def _mean(self, numbers: jax.Array) -> jax.Array:
        """Means `[..., n]` of the returns that `numbers [..., n, K]` tell of."""
        raise NotImplementedError

    def _numbers(self, parameters: Any, observation: Observation) -> jax.Array:
        """What the network gives for every action, allowed or not: `[N, n, K]`."""
        found = self._network.apply(parameters, separated(observation)[0])
        return found.reshape(*found.shape[:-1], -1, self.numbers_of_an_action)

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        """Q of every action `[N, n]`: the mean of its returns; `-inf` where it is not allowed."""
        _, action_mask = separated(observation)
        return allowed_only(self._mean(self._numbers(parameters, observation)), action_mask)

    def _following(self, parameters: Any, target_parameters: Any, transition: Transition) -> jax.Array:
        """Of the observations that follow, the target's numbers for the action that is best in the mean:
        `[N, K]`. Which one that is, says the target, or with `double` the network that learns."""
        choosing = parameters if self.double else target_parameters
        best = jnp.argmax(self._values(choosing, transition.next_observation), axis=-1)
        return of_action(self._numbers(target_parameters, transition.next_observation), best)

    @property
    def _outputs(self) -> Discrete:
        return Discrete(sum(sizes(choices(self.env))) * self.numbers_of_an_action)


def of_action(numbers: jax.Array, action: jax.Array) -> jax.Array:
    """Of numbers `[N, n, K]` those of the actions `[N]`: `[N, K]`."""
    return jax.vmap(networks.of_action, in_axes=(-1, None), out_axes=-1)(numbers, action)
