"""Optimisers that several algorithms share: gradients clipped by global norm, step sizes that may fall."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from algos.hyperparameters import hyperparameter, require_positive
from algos.parts import Part

# A step size is a number, a traced one too, or a schedule of the number of steps so far.
StepSize: TypeAlias = float | jax.Array | optax.Schedule


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Part):
    """The step size of an optimiser."""

    learning_rate: float = hyperparameter(2.5e-4, "step size of the optimiser")
    anneal_learning_rate: bool = hyperparameter(False, "let the step size fall linearly to zero")

    def check(self, algorithm: Any) -> None:
        """Refuses a step size that is not positive."""
        require_positive(algorithm, "learning_rate")


@dataclasses.dataclass(frozen=True)
class ClippedOptimizer(OptimizerSettings):
    """The step size of an optimiser of clipped gradients, and what they are clipped to."""

    max_grad_norm: float = hyperparameter(0.5, "global norm that gradients are clipped to")

    def check(self, algorithm: Any) -> None:
        """Refuses a step size or a norm that is not positive."""
        super().check(algorithm)
        require_positive(algorithm, "max_grad_norm")


def annealed(
    learning_rate: float | jax.Array, num_iterations: int, updates_per_iteration: int = 1
) -> optax.Schedule:
    """A step size that falls linearly to zero over a run, constant within an iteration (as in CleanRL).

    >>> step_size = annealed(1.0, num_iterations=4, updates_per_iteration=10)
    >>> [float(step_size(count)) for count in (0, 9, 10, 39, 40)]
    [1.0, 1.0, 0.75, 0.25, 0.0]
    """

    def step_size(count: jax.Array) -> jax.Array:
        return learning_rate * jnp.maximum(1.0 - (count // updates_per_iteration) / num_iterations, 0.0)

    return step_size


def clipped_adam(
    learning_rate: StepSize, max_grad_norm: float | jax.Array, eps: float = 1e-5
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) on gradients clipped to a global norm."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adam(learning_rate, eps=eps))


def clipped_radam(learning_rate: StepSize, max_grad_norm: float | jax.Array) -> optax.GradientTransformation:
    """Rectified Adam (Liu et al. 2020, arXiv 1908.03265) on gradients clipped to a global norm."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.radam(learning_rate))


def clipped_rmsprop(
    learning_rate: StepSize, max_grad_norm: float | jax.Array, decay: float = 0.99, eps: float = 1e-5
) -> optax.GradientTransformation:
    """RMSProp (Tieleman and Hinton 2012) on gradients clipped to a global norm.

    Not centred, with `eps` under the root, as in Mnih et al. 2016 (arXiv 1602.01783, section 4). The mean
    square starts at one, as in TensorFlow, where these hyperparameters come from: from zero, the first steps
    would be ten times as long (`1 / sqrt(1 - decay)`) as those that follow.
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.rmsprop(learning_rate, decay=decay, eps=eps, initial_scale=1.0),
    )
