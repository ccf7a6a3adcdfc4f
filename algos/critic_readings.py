"""What a pair of critics gives, read as values, or as how returns are distributed on a grid.

The loss of an off-policy actor-critic is the same for both: what the targets are, how far a critic is from
them, and which value an action has is said here. Distributions are those of C51 (Bellemare, Dabney and Munos
2017, arXiv 1707.06887), as FastTD3 and FastSAC have them (Seo et al. 2025, arXiv 2505.22642).

Letters in shapes: `N` samples of a minibatch, `K` returns of a grid.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fdg.settings.fields import hyperparameter, require
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class ReturnGrid(Part):
    """The returns whose probabilities critics give, if they do."""

    atoms: int | None = hyperparameter(
        None, "returns of a grid, whose probabilities the critics give; None: they give values"
    )
    value_min: float = hyperparameter(-250.0, "the smallest return of that grid", only_with="atoms")
    value_max: float = hyperparameter(250.0, "the largest", only_with="atoms")

    @property
    def reading(self) -> "Values | Distributions":
        """How what critics give is read."""
        if self.atoms is None:
            return Values()
        return Distributions(self.atoms, self.value_min, self.value_max)

    def check(self, algorithm: Any) -> None:
        """Refuses values of which no grid can be made."""
        if self.atoms is None:
            return
        require(algorithm, self.atoms >= 2, f"atoms={self.atoms}: a grid has two at least")
        require(
            algorithm,
            self.value_min < self.value_max,
            f"value_min={self.value_min}, value_max={self.value_max}: the first must be the lower one",
        )

    def lower(self, given: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Of what two critics give, the lower value, `[N]`."""
        return jnp.minimum(*map(self.reading.value, given))

    def errors(
        self, given: tuple[jax.Array, jax.Array], target: jax.Array, weight: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of both critics; with weights `[N]` also the samples' errors, `{"error": [N]}`.

        An error is the mean over both critics: priorities of the next draw.
        """
        read, (first, second) = self.reading, given
        loss = read.error(first, target, weight) + read.error(second, target, weight)
        if weight is None:
            return loss, {}
        return loss, {"error": 0.5 * (read.distance(first, target) + read.distance(second, target))}


@dataclasses.dataclass(frozen=True)
class Values:
    """A critic gives values, `[N]`."""

    @property
    def outputs(self) -> int:
        """Numbers that a critic gives."""
        return 1

    def value(self, numbers: jax.Array) -> jax.Array:
        """What it gives."""
        return numbers

    def target(self, reward, discount, first, second, cost) -> jax.Array:
        """`reward + discount * (the lower of both - cost)`, all `[N]`: what critics are fitted to.

        >>> one = jnp.ones(1)
        >>> Values().target(one, 0.5 * one, 4 * one, 6 * one, 2 * one).tolist()
        [2.0]
        """
        return reward + discount * (jnp.minimum(first, second) - cost)

    def error(self, numbers: jax.Array, target: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """Half the mean squared error, of samples with weights `[N]`."""
        each = jnp.square(numbers - target)
        return 0.5 * jnp.mean(each if weight is None else weight * each)

    def distance(self, numbers: jax.Array, target: jax.Array) -> jax.Array:
        """Absolute errors: `[N]`."""
        return jnp.abs(numbers - target)


@dataclasses.dataclass(frozen=True)
class Distributions:
    """A critic gives logits of returns on a grid, `[N, K]`.

    Attributes:
      atoms: K.
      low, high: the smallest and the largest return of the grid; targets are held within.
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
