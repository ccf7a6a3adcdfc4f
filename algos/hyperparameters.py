"""Hyperparameters: dataclass fields with a help text, and the checks that all algorithms share."""

import dataclasses
import math
from typing import Any

from fdg.errors import FdgError


def hyperparameter(default: Any, description: str) -> Any:
    """A dataclass field that the command line shows with this description."""
    return dataclasses.field(default=default, metadata={"help": description})


def require(algorithm: Any, condition: bool, message: str) -> None:
    """Raises an `FdgError` that names the algorithm, unless the condition holds."""
    if not condition:
        raise FdgError(f"{type(algorithm).__name__}: {message}")


def require_positive(algorithm: Any, *names: str) -> None:
    """Requires that the fields are integers or floats above zero."""
    for name in names:
        value = getattr(algorithm, name)
        require(algorithm, value > 0, f"{name}={value}: it must be above zero")


def require_within(algorithm: Any, low: float, high: float, *names: str) -> None:
    """Requires that the fields lie in `[low, high]`."""
    for name in names:
        value = getattr(algorithm, name)
        require(algorithm, low <= value <= high, f"{name}={value}: it must be from {low:g} to {high:g}")


def whole_updates(algorithm: Any) -> int:
    """Gradient steps in one iteration: `updates_per_step` for each environment step, of all environments.

    Raises:
      FdgError: they are no whole number above zero.
    """
    require_positive(algorithm, "updates_per_step")
    rate, steps = algorithm.updates_per_step, algorithm.steps_per_iteration
    exact = rate * steps
    require(
        algorithm,
        exact > 0.5 and math.isclose(round(exact), exact),
        f"updates_per_step={rate} times num_envs * num_steps={steps} makes {exact:g} updates an iteration:"
        " it must be a whole number above zero",
    )
    return round(exact)
