"""DQN with the distribution of each action's return: `QRDQN` and `C51`.

QR-DQN: Dabney et al. 2017, arXiv 1710.10044. C51: Bellemare, Dabney and Munos 2017, "A Distributional
Perspective on Reinforcement Learning", arXiv 1707.06887. The network has `K` outputs for each action:
quantiles, or logits of fixed returns. The value of an action is its mean return.

Shapes: `N` samples of a minibatch, `n` actions, `K` outputs per action.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from algos import networks
from algos.distributions import allowed_only, sizes
from algos.dqn import DQN, discrete_space
from algos.replaying import Transition
from envs import Discrete, Observation, features_and_mask
from fdg.settings.fields import hyperparameter, require, require_positive


def quantile_error(quantiles: jax.Array, target: jax.Array, threshold: float) -> jax.Array:
    """Quantile regression of quantiles `[N, K]` on targets `[N, K']`: `[N]` float32.

    Dabney et al. 2017, arXiv 1710.10044, equations 9 and 10: summed over quantiles, averaged over targets.
    The loss is quadratic in errors up to the `threshold` kappa, and linear beyond.
    """
    error = target[:, None] - quantiles[:, :, None]  # [N, K, K']
    magnitude = jnp.abs(error)
    huber = (
        jnp.where(magnitude <= threshold, 0.5 * jnp.square(error), threshold * (magnitude - 0.5 * threshold))
        / threshold
    )
    # The quantile midpoints of lemma 2.
    midpoints = (jnp.arange(quantiles.shape[1], dtype=jnp.float32) + 0.5) / quantiles.shape[1]
    quantile_huber = jnp.abs(midpoints[None, :, None] - (error < 0)) * huber
    return jnp.sum(jnp.mean(quantile_huber, axis=2), axis=1)


# --- critics' outputs ---


class CriticKind:
    """A kind of critics: how losses interpret the outputs of two critics.

    A subclass defines `value`, `target`, `error` and `distance`. Targets subtract a `cost` from the next
    value: SAC's entropy term, a penalty, or zero.
    """

    def lower(self: Any, outputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The lower of the two critics' values, `[N]`."""
        return jnp.minimum(*map(self.value, outputs))

    def errors(
        self: Any, outputs: tuple[jax.Array, jax.Array], target: jax.Array, weight: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of both critics; with weights `[N]` also the samples' errors, `{"error": [N]}`.

        A sample's error, the mean over both critics, is its next priority.
        """
        first, second = outputs
        loss = self.error(first, target, weight) + self.error(second, target, weight)
        if weight is None:
            return loss, {}
        return loss, {"error": 0.5 * (self.distance(first, target) + self.distance(second, target))}


@dataclasses.dataclass(frozen=True)
class Values(CriticKind):
    """Interprets critic outputs `[N]` as values."""

    @property
    def outputs(self) -> int:
        """Outputs of a critic per sample."""
        return 1

    def value(self, output: jax.Array) -> jax.Array:
        """The value: the output itself."""
        return output

    def target(self, reward, discount, first, second, cost) -> jax.Array:
        """The critics' target: `reward + discount * (the lower of both - cost)`, all `[N]`.

        >>> one = jnp.ones(1)
        >>> Values().target(one, 0.5 * one, 4 * one, 6 * one, 2 * one).tolist()
        [2.0]
        """
        return reward + discount * (jnp.minimum(first, second) - cost)

    def error(self, output: jax.Array, target: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """Half the mean squared error, with sample weights `[N]`."""
        squared = jnp.square(output - target)
        return 0.5 * jnp.mean(squared if weight is None else weight * squared)

    def distance(self, output: jax.Array, target: jax.Array) -> jax.Array:
        """Absolute errors: `[N]`."""
        return jnp.abs(output - target)


# --- distributions on a grid: C51, and critics with `atoms` (Seo et al. 2025, arXiv 2505.22642) ---


@dataclasses.dataclass(frozen=True)
class Distributions(CriticKind):
    """Interprets critic outputs `[N, K]` as logits of returns on a grid.

    `atoms` is K; `low` and `high` are the smallest and the largest return of the grid, to which targets are
    clipped.
    """

    atoms: int
    low: float | jax.Array
    high: float | jax.Array

    @property
    def outputs(self) -> int:
        """K, the outputs of a critic per sample."""
        return self.atoms

    @property
    def returns(self) -> jax.Array:
        """The grid: `[K]` float32."""
        return self.low + self._spacing * jnp.arange(self.atoms, dtype=jnp.float32)

    def value(self, output: jax.Array) -> jax.Array:
        """Means of the distributions with logits `output [N, K]`: `[N]` float32."""
        return jax.nn.softmax(output) @ self.returns

    def target(self, reward, discount, first, second, cost) -> jax.Array:
        """Probabilities `[N, K]` of the return, from the critic with the lower mean.

        The probability of each return, `reward + discount * (z - cost)`, is split between the two neighbours
        on the grid (equation 7 of Bellemare et al.).

        >>> one, even = jnp.ones(1), jnp.zeros((1, 3))
        >>> grid = Distributions(3, 0.0, 2.0)  # even odds of 0, 1 and 2, halved: 0, 0.5 and 1
        >>> (6 * grid.target(0 * one, 0.5 * one, even, even, 0 * one)).tolist()
        [[3.0, 3.0, 0.0]]
        """
        lower = jnp.where((self.value(first) <= self.value(second))[:, None], first, second)
        returns = reward[:, None] + discount[:, None] * (self.returns[None] - cost[:, None])
        return self.project(jax.nn.softmax(lower), returns)

    def project(self, probability, returns) -> jax.Array:
        """Projects `returns [N, K]` with their `probability [N, K]` onto the grid: `[N, K]`.

        Returns outside the grid are clipped to its ends.
        """
        clipped = jnp.clip(returns, self.low, self.high)
        distance = jnp.abs(clipped[:, :, None] - self.returns[None, None]) / self._spacing  # [N, K, K']
        shares = jnp.clip(1.0 - distance, 0.0, 1.0)
        return jnp.sum(probability[:, :, None] * shares, axis=1)

    def error(self, output: jax.Array, target: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """Mean cross-entropy, with sample weights `[N]`."""
        log_likelihood = jnp.sum(target * jax.nn.log_softmax(output), axis=-1)
        return -jnp.mean(log_likelihood if weight is None else weight * log_likelihood)

    def distance(self, output: jax.Array, target: jax.Array) -> jax.Array:
        """Kullback-Leibler divergences from the targets: `[N]`."""
        log_ratio = jax.scipy.special.xlogy(target, target) - target * jax.nn.log_softmax(output)
        return jnp.sum(log_ratio, axis=-1)

    @property
    def _spacing(self) -> float | jax.Array:
        return (self.high - self.low) / (self.atoms - 1)


def check_grid(algorithm: Any) -> None:
    """Refuses fields `atoms`, `value_min` and `value_max` that do not define a grid."""
    low, high = algorithm.value_min, algorithm.value_max
    require(algorithm, algorithm.atoms >= 2, f"atoms={algorithm.atoms}: a grid has at least two")
    require(algorithm, low < high, f"value_min={low}, value_max={high}: the first must be below the second")


# --- DQN ---


@dataclasses.dataclass(frozen=True)
class DistributionalDQN(DQN):
    """Base of `QRDQN` and `C51`; a subclass adds `_outputs_field`, `_mean_return` and `loss`.

    An action must be a single choice: with several, only the mean of their values has a target, so a single
    choice has no distribution of returns.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete,)

    max_error: float | None = hyperparameter(
        None, "not used: this algorithm has its own loss", structural="nothing here (the loss is another)"
    )

    def __post_init__(self):
        super().__post_init__()
        require(
            self,
            self.max_error is None,
            f"max_error={self.max_error}: distributions of returns have a loss of their own; leave it None",
        )
        require(
            self,
            not self.dueling,
            "dueling=True: distributions of returns have no dueling form; leave it out",
        )

    _outputs_field: ClassVar[str]  # the name of the field that holds K

    @property
    def outputs_per_action(self) -> int:
        """K, the network's outputs for each action."""
        return getattr(self, self._outputs_field)

    def _mean_return(self, outputs: jax.Array) -> jax.Array:
        """Mean returns `[..., n]` from the network's `outputs [..., n, K]`."""
        raise NotImplementedError

    def _action_outputs(self, parameters: Any, observation: Observation) -> jax.Array:
        """The network's outputs for every action, allowed or not: `[N, n, K]`."""
        outputs = self._network.apply(parameters, features_and_mask(observation)[0])
        return outputs.reshape(*outputs.shape[:-1], -1, self.outputs_per_action)

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        """Q of every action `[N, n]`: the mean return; `-inf` where the action is not allowed."""
        _, action_mask = features_and_mask(observation)
        return allowed_only(self._mean_return(self._action_outputs(parameters, observation)), action_mask)

    def _best_next_outputs(
        self, parameters: Any, target_parameters: Any, transition: Transition
    ) -> jax.Array:
        """The target network's outputs `[N, K]` for the next action with the largest mean return.

        The target network chooses that action, or with `double` the trained network.
        """
        choosing_parameters = parameters if self.double else target_parameters
        best = jnp.argmax(self._values(choosing_parameters, transition.next_observation), axis=-1)
        return select_outputs(self._action_outputs(target_parameters, transition.next_observation), best)

    @property
    def _outputs(self) -> Discrete:
        return Discrete(sum(sizes(discrete_space(self.env))) * self.outputs_per_action)


def select_outputs(outputs: jax.Array, action: jax.Array) -> jax.Array:
    """Selects the outputs for actions `[N]` from those of all actions, `[N, n, K]`: `[N, K]`."""
    return jax.vmap(networks.select_values, in_axes=(-1, None), out_axes=-1)(outputs, action)


@dataclasses.dataclass(frozen=True)
class QRDQN(DistributionalDQN, presets="QRDQN"):
    """QR-DQN for discrete actions, with the fields of `DQN` and two more.

    >>> import envs
    >>> QRDQN(env=envs.make("CartPole-v1")).quantiles
    51
    """

    quantiles: int = hyperparameter(51, "K, quantiles of each action's return")
    huber_threshold: float = hyperparameter(1.0, "kappa: error above which the quantile Huber loss is linear")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "quantiles", "huber_threshold")

    _outputs_field = "quantiles"

    def _mean_return(self, outputs: jax.Array) -> jax.Array:
        return jnp.mean(outputs, axis=-1)

    def loss(self, parameters, target_parameters, transition: Transition, weight):
        """Quantile regression (equations 9 and 10); arguments and results as in `DQN.loss`."""
        quantiles = select_outputs(
            self._action_outputs(parameters, transition.observation), transition.action
        )
        target = jax.lax.stop_gradient(self._target(parameters, target_parameters, transition))
        error = quantile_error(quantiles, target, self.huber_threshold)
        loss = jnp.mean(weight * error)
        mean_error = jnp.mean(target, axis=1) - jnp.mean(quantiles, axis=1)
        return loss, (mean_error, {"loss": loss, "value": jnp.mean(quantiles)})

    def _target(self, parameters, target_parameters, transition: Transition) -> jax.Array:
        """The target quantiles, `[N, K]`, from the next action with the largest mean (algorithm 1)."""
        quantiles = self._best_next_outputs(parameters, target_parameters, transition)
        return transition.reward[:, None] + transition.discount[:, None] * quantiles


@dataclasses.dataclass(frozen=True)
class C51(DistributionalDQN, presets="C51"):
    """C51 for discrete actions, with the fields of `DQN` and three more.

    Returns are assumed to be between `value_min` and `value_max`; the metric `outside` is the targets' mean
    probability of returns outside this range. Defaults of the grid are those of CleanRL's `c51.py` (Huang et
    al. 2022, JMLR 23(274)), for CartPole; the paper's 51 atoms from -10 to 10 are for Atari's clipped
    rewards.

    >>> import envs
    >>> C51(env=envs.make("CartPole-v1"), atoms=5)._grid.returns.tolist()
    [-100.0, -50.0, 0.0, 50.0, 100.0]
    """

    atoms: int = hyperparameter(101, "K, atoms of the return distribution")
    value_min: float = hyperparameter(-100.0, "smallest atom")
    value_max: float = hyperparameter(100.0, "largest atom")

    def __post_init__(self):
        super().__post_init__()
        check_grid(self)

    _outputs_field = "atoms"

    @property
    def _grid(self) -> Distributions:
        return Distributions(self.atoms, self.value_min, self.value_max)

    def _mean_return(self, outputs: jax.Array) -> jax.Array:
        return self._grid.value(outputs)

    def loss(self, parameters, target_parameters, transition: Transition, weight):
        """Cross-entropy of the projected target and the prediction (last line of algorithm 1)."""
        logits = select_outputs(self._action_outputs(parameters, transition.observation), transition.action)
        target, outside = jax.lax.stop_gradient(
            self._project_target(parameters, target_parameters, transition)
        )
        cross_entropy = -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)
        loss = jnp.mean(weight * cross_entropy)
        # The priority is the minimised divergence: Hessel et al. 2018, arXiv 1710.02298, section "The
        # integrated agent".
        divergence = cross_entropy + jnp.sum(jax.scipy.special.xlogy(target, target), axis=-1)
        metrics = {"loss": loss, "value": jnp.mean(self._mean_return(logits)), "outside": jnp.mean(outside)}
        return loss, (divergence, metrics)

    def _project_target(
        self, parameters, target_parameters, transition: Transition
    ) -> tuple[jax.Array, jax.Array]:
        """The target distribution on the grid `[N, K]`, and the probability `[N]` of returns outside.

        Equation 7: each possible return, `r + discount * z`, is clipped to the grid, and its probability is
        split between its two neighbours.
        """
        probability = jax.nn.softmax(self._best_next_outputs(parameters, target_parameters, transition))
        returns = transition.reward[:, None] + transition.discount[:, None] * self._grid.returns[None]
        is_outside = (returns < self.value_min) | (returns > self.value_max)
        outside = jnp.sum(jnp.where(is_outside, probability, 0.0), axis=1)
        return self._grid.project(probability, returns), outside
