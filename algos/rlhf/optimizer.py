"""The optimiser of a language model: AdamW, or the user's, with warm-up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from algos.optimizers import user_optimizer
from algos.values import ClippedOptimizer
from fdg.settings.fields import hyperparameter, require, require_not_negative


@dataclasses.dataclass(frozen=True)
class TextOptimizer(ClippedOptimizer):
    """The settings of an optimiser with warm-up and weight decay."""

    warmup: int = hyperparameter(0, "updates of linear warm-up of the step size")
    weight_decay: float = hyperparameter(0.0, "AdamW's decoupled weight decay")

    def check(self, algorithm: Any) -> None:
        """Refuses numbers out of range, and a weight decay with the user's optimiser."""
        super().check(algorithm)
        require(
            algorithm,
            self.optimizer is None or not self.weight_decay,
            f"weight_decay={self.weight_decay} is AdamW's: leave it out with an optimizer",
        )
        require_not_negative(algorithm, "warmup")

    def of(self, updates: int) -> optax.GradientTransformation:
        """The user's optimiser, or AdamW (arXiv 1711.05101), for a run of `updates` updates."""
        step_size = schedule(self.learning_rate, self.warmup, updates if self.anneal_learning_rate else None)
        custom = user_optimizer(self.optimizer, step_size, self.max_grad_norm)
        if custom is not None:  # `count` needs a count of updates, which this optimiser may lack
            return optax.chain(optax.scale_by_schedule(lambda _: 1.0), custom)
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adamw(step_size, weight_decay=self.weight_decay),
        )


def count(optimizer_state: Any) -> jax.Array:
    """The number of updates of an optimiser's state, `[]` int32.

    >>> int(count(optax.adam(1e-3).init(jnp.zeros(3))))
    0
    """
    return optax.tree.get_all_with_path(optimizer_state, "count")[0][1]


def schedule(learning_rate: float, warmup: int, updates: int | None) -> optax.Schedule:
    """A step size that grows linearly for `warmup` updates, and falls linearly to zero over all `updates`.

    The first step size is above zero. `updates=None`: no decay.
    """

    def step_size(count: jax.Array) -> jax.Array:
        rate = jnp.float32(learning_rate)
        if warmup:
            rate = rate * jnp.minimum((count + 1) / warmup, 1.0)
        if updates is not None:
            rate = rate * jnp.maximum(1.0 - count / updates, 0.0)
        return rate

    return step_size
