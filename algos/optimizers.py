"""Optimisers that several algorithms share: gradients clipped by global norm, step sizes that may fall."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from envs import own
from fdg.errors import FdgError, kind_of, one_line, unknown_name
from fdg.settings.fields import hyperparameter, require_positive
from fdg.settings.parts import Part

# A step size is a number, a traced one too, or a schedule of the number of steps so far.
StepSize: TypeAlias = float | jax.Array | optax.Schedule


# Functions of optax, and of optax.contrib, that make an optimiser of a step size alone.
NAMES = (
    *(
        "adabelief",
        "adadelta",
        "adafactor",
        "adagrad",
        "adam",
        "adamax",
        "adamaxw",
        "adamw",
        "adan",
        "amsgrad",
    ),
    *("lamb", "lars", "lion", "noisy_sgd", "novograd", "radam", "rmsprop", "sgd", "sm3", "yogi"),
    *("ademamix", "adopt", "muon", "prodigy", "schedule_free_adamw", "schedule_free_sgd", "sophia"),
)

OPTIMIZER: dict[str, Any] = {
    "help": "an optimiser of optax by its name (lion, adamw, muon, ...), or module:name of a function of the"
    " step size that returns one; in Python also a gradient transformation (None: the algorithm's)",
    "flag": str | None,
    "holds": "optimizer",
}


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Part):
    """An optimiser and its step size."""

    learning_rate: float = hyperparameter(2.5e-4, "step size of the optimiser")
    anneal_learning_rate: bool = hyperparameter(False, "let the step size fall linearly to zero")
    optimizer: Any = dataclasses.field(default=None, metadata=OPTIMIZER)

    def check(self, algorithm: Any) -> None:
        """Refuses a step size that is not positive, and what makes no optimiser."""
        require_positive(algorithm, "learning_rate")
        given(self.optimizer, 1e-3)


@dataclasses.dataclass(frozen=True)
class ClippedOptimizer(OptimizerSettings):
    """The step size of an optimiser of clipped gradients, and what they are clipped to."""

    max_grad_norm: float = hyperparameter(0.5, "global norm that gradients are clipped to")

    def check(self, algorithm: Any) -> None:
        """Refuses a step size or a norm that is not positive."""
        super().check(algorithm)
        require_positive(algorithm, "max_grad_norm")


def given(
    optimizer: Any, learning_rate: StepSize, max_grad_norm: float | jax.Array | None = None
) -> optax.GradientTransformation | None:
    """The optimiser that a user gave; None if none.

    Args:
      optimizer: one of `NAMES`, `module:name`, or a function of the step size: gradients are clipped to
        `max_grad_norm` before it. A gradient transformation is taken as it is, with its own step size.
      learning_rate: a number, or a schedule.
      max_grad_norm: global norm; None: gradients are not clipped.

    Raises:
      FdgError: it is none of these, or the function fails.

    >>> given("lion", 1e-3).init({}) == given(optax.lion, 1e-3).init({})
    True
    """
    if optimizer is None:
        return None
    make = _found(optimizer) if isinstance(optimizer, str) else optimizer
    if _is_transformation(make):
        return make
    if not callable(make):
        raise FdgError(
            f"optimizer={make!r:.60} is {kind_of(make)}: give a name ('lion', ...), a function of the step"
            " size that returns an optax.GradientTransformation, or such a transformation"
        )
    try:
        made = make(learning_rate)
    except Exception as error:  # whatever the code of a user raises
        raise FdgError(
            f"optimizer={_named(make)} fails for a step size alone: {one_line(error)}: give a function of the"
            " step size, such as lambda step_size: optax.sgd(step_size, momentum=0.9)"
        ) from error
    if not _is_transformation(made):
        raise FdgError(
            f"optimizer={_named(make)} returns {kind_of(made)} for a step size: it must return an"
            " optax.GradientTransformation"
        )
    return made if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), made)


def _is_transformation(value: Any) -> bool:
    """Whether it has the two functions of an optax.GradientTransformation."""
    return not isinstance(value, type) and all(
        callable(getattr(value, part, None)) for part in ("init", "update")
    )


@functools.lru_cache(maxsize=64)
def _found(name: str) -> Callable[..., Any]:
    """What a name stands for."""
    if ":" in name:
        return own.found("--optimizer", name)
    if name.lower() not in NAMES:
        raise unknown_name("optimizer", name, NAMES, "algos.optimizers.NAMES")
    return getattr(optax, name.lower(), None) or getattr(optax.contrib, name.lower())


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))[:60]


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
