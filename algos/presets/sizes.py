"""Adjusts sizes that must divide each other: sizes that the user did not set are fitted to the others."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from fdg.settings.fields import largest_divisor


def fitting_sizes(values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Changes to sizes that the user did not set, so that sizes divide each other; empty if none are needed.

    Args:
      values: all fields of an algorithm, by name.
      named: the fields that the user set, which do not change.

    >>> preset = {"num_envs": 64, "num_steps": 256, "num_minibatches": 32, "shuffle": "each"}
    >>> fitting_sizes({**preset, "num_envs": 2, "num_steps": 12}, ["num_envs", "num_steps"])
    {'num_minibatches': 24}
    >>> fitting_sizes({**preset, "num_envs": 2, "num_steps": 12}, ["num_steps", "num_minibatches"])
    {}
    >>> fitting_sizes({"num_envs": 24, "num_steps": 1, "batch_size": 256}, ["num_envs"])
    {'batch_size': 264}
    """
    changes: dict[str, Any] = {}

    def size(name: str) -> int:
        value = changes.get(name, values.get(name))
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    def change(name: str, fitting: int) -> None:
        if size(name) and name not in named and fitting > 0 and fitting != size(name):
            changes[name] = fitting

    num_envs, num_steps = size("num_envs"), size("num_steps")
    if not num_envs or not num_steps:
        return {}  # the algorithm then refuses the sizes
    change("num_workers", largest_divisor(num_envs, size("num_workers")))
    items_per_env = num_steps
    if "sequence_length" in values and (values.get("recurrent", True) or values.get("memory") is not None):
        change("sequence_length", largest_divisor(num_steps, size("sequence_length")))
        length = size("sequence_length") or num_steps
        change("burn_in", min(size("burn_in"), length))
        items_per_env = num_steps // length
    rows = items_per_env if values.get("shuffle") == "time" else num_envs * items_per_env
    change("num_minibatches", largest_divisor(rows, size("num_minibatches")))
    change("batch_size", max(1, round(size("batch_size") / num_envs)) * num_envs)
    if size("buffer_size"):
        change("learning_starts", min(size("learning_starts"), size("buffer_size") // num_envs * num_envs))
    rate, steps = values.get("updates_per_step"), num_envs * num_steps
    if isinstance(rate, int | float) and rate > 0 and "updates_per_step" not in named:
        updates = max(1, round(rate * steps))
        if not math.isclose(updates, rate * steps):
            changes["updates_per_step"] = updates / steps
    return changes
