"""DQN that learns the distribution of each action's return: `QRDQN` and `C51`.

QR-DQN: Dabney et al. 2017, arXiv 1710.10044. C51: Bellemare, Dabney and Munos 2017, "A Distributional
Perspective on Reinforcement Learning", arXiv 1707.06887. The network gives `K` numbers for each action, read
as quantiles, or as probabilities of fixed returns; acting takes the mean for the value.

Letters in shapes: `N` samples of a minibatch, `n` actions, `K` numbers of each.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from algos import networks
from algos.distributions import allowed_only, sizes
from algos.dqn import DQN, choices
from algos.losses import quantile_error
from algos.replay import Transition
from envs import Discrete, Observation, features_and_mask
from fdg.settings.fields import hyperparameter, require, require_positive

# --- distributions on a grid: of C51, and of critics with `atoms` (Seo et al. 2025, arXiv 2505.22642) ---


@dataclasses.dataclass(frozen=True)
class Distributions:
    """A critic gives logits of returns on a grid, `[N, K]`.

    `atoms` is K; targets are held within `low` and `high`, the smallest and the largest return of the grid.
    """

    atoms: int
    low: float | jax.Array
    high: float | jax.Array

    @property
    def outputs(self) -> int:
        """K."""
        return self.atoms

    @property
    def returns(self) -> jax.Array:
        """The grid: `[K]` float32."""
        return self.low + self._spacing * jnp.arange(self.atoms, dtype=jnp.float32)

    def value(self, numbers: jax.Array) -> jax.Array:
        """Means of the distributions: `[N]`."""
        return jax.nn.softmax(numbers) @ self.returns

    def target(self, reward, discount, first, second, cost) -> jax.Array:
        """Probabilities of the grid, `[N, K]`, of the return that follows: of the critic whose mean is lower.

        Each return that can follow, `reward + discount * (z - cost)`, is divided between its two neighbours
        (equation 7 of Bellemare et al.).

        >>> one, even = jnp.ones(1), jnp.zeros((1, 3))
        >>> grid = Distributions(3, 0.0, 2.0)  # even odds of 0, 1 and 2, halved: 0, 0.5 and 1
        >>> (6 * grid.target(0 * one, 0.5 * one, even, even, 0 * one)).tolist()
        [[3.0, 3.0, 0.0]]
        """
        lower = jnp.where((self.value(first) <= self.value(second))[:, None], first, second)
        following = reward[:, None] + discount[:, None] * (self.returns[None] - cost[:, None])
        return self.projected(jax.nn.softmax(lower), following)

    def projected(self, probability, following) -> jax.Array:
        """Probabilities of the grid, `[N, K]`, of returns `following [N, K]` of some `probability [N, K]`.

        What lies outside the grid counts as its end.
        """
        held = jnp.clip(following, self.low, self.high)
        distance = jnp.abs(held[:, :, None] - self.returns[None, None]) / self._spacing  # [N, K, K']
        shares = jnp.clip(1.0 - distance, 0.0, 1.0)
        return jnp.sum(probability[:, :, None] * shares, axis=1)

    def error(self, numbers: jax.Array, target: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """Mean cross-entropy, of samples with weights `[N]`."""
        each = jnp.sum(target * jax.nn.log_softmax(numbers), axis=-1)
        return -jnp.mean(each if weight is None else weight * each)

    def distance(self, numbers: jax.Array, target: jax.Array) -> jax.Array:
        """Kullback-Leibler divergences from the targets: `[N]`."""
        log_ratio = jax.scipy.special.xlogy(target, target) - target * jax.nn.log_softmax(numbers)
        return jnp.sum(log_ratio, axis=-1)

    @property
    def _spacing(self) -> float | jax.Array:
        return (self.high - self.low) / (self.atoms - 1)


# --- DQN ---


@dataclasses.dataclass(frozen=True)
class DistributionalDQN(DQN):
    """Base of `QRDQN` and `C51`; a subclass adds `_numbers_are`, `_mean` and `loss`.

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

    _numbers_are: ClassVar[str]  # the field with K

    @property
    def numbers_of_an_action(self) -> int:
        """K."""
        return getattr(self, self._numbers_are)

    def _mean(self, numbers: jax.Array) -> jax.Array:
        """Means `[..., n]` of the returns of `numbers [..., n, K]`."""
        raise NotImplementedError

    def _numbers(self, parameters: Any, observation: Observation) -> jax.Array:
        """What the network gives for every action, allowed or not: `[N, n, K]`."""
        found = self._network.apply(parameters, features_and_mask(observation)[0])
        return found.reshape(*found.shape[:-1], -1, self.numbers_of_an_action)

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        """Q of every action `[N, n]`: the mean of its returns; `-inf` where it is not allowed."""
        _, action_mask = features_and_mask(observation)
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


@dataclasses.dataclass(frozen=True)
class QRDQN(DistributionalDQN, presets="QRDQN"):
    """QR-DQN for discrete actions, with the fields of `DQN` and two of its own.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> QRDQN(env=envs.make("CartPole-v1")).quantiles
    51
    """

    quantiles: int = hyperparameter(51, "K, of each action's return")
    huber_threshold: float = hyperparameter(1.0, "kappa: error from which on the quantile loss is a line")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "quantiles", "huber_threshold")

    _numbers_are = "quantiles"

    def _mean(self, numbers: jax.Array) -> jax.Array:
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


@dataclasses.dataclass(frozen=True)
class C51(DistributionalDQN, presets="C51"):
    """C51 for discrete actions, with the fields of `DQN` and three of its own.

    Returns are assumed between `value_min` and `value_max`; the metric `outside` is the share of the targets
    outside. Defaults of the grid are those of CleanRL's `c51.py` (Huang et al. 2022, JMLR 23(274)), for
    CartPole; the paper's 51 atoms from -10 to 10 are for Atari's clipped rewards.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> C51(env=envs.make("CartPole-v1"), atoms=5)._grid.returns.tolist()
    [-100.0, -50.0, 0.0, 50.0, 100.0]
    """

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

    _numbers_are = "atoms"

    @property
    def _grid(self) -> Distributions:
        return Distributions(self.atoms, self.value_min, self.value_max)

    def _mean(self, numbers: jax.Array) -> jax.Array:
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
