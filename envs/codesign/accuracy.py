"""Accuracies of networks from four sources, which every output names.

`table`: measured before, and looked up. `train`: children are trained within the program. `supernet`:
children of shared weights. `surrogate`: a formula, not measured, for tests and speed alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign.space import Task
from fdg.errors import FdgError

SOURCES = ("table", "train", "supernet", "surrogate")


def surrogate(task: Task) -> np.ndarray:
    """A formula in place of accuracies, not measured: 1 - (1 + weights / 1,000)^(-1/2), [choices] float32."""
    weights = [sum(layer.weight_words for layer in task.build(*choice)) for choice in task.choices()]
    return 1 - (1 + np.asarray(weights, np.float32) / 1000) ** -0.5


def known(task: Task, source: str, table: str = "") -> np.ndarray:
    """Accuracies of all networks of a task, [choices] float32; not-a-number where there are none.

    Args:
      task: whose `accuracy` wins, where its network is given.
      source: one of `SOURCES` but `train`.
      table: file of accuracies in place of the one that is shipped.

    Raises:
      FdgError: the table has none of this task.
    """
    if not task.decisions:
        return np.asarray([np.nan if task.accuracy is None else task.accuracy], np.float32)
    if source == "surrogate":
        return surrogate(task)
    raise FdgError(f"accuracy='{source}' of task '{task.name}': no such accuracies; use accuracy='surrogate'")


def accuracies(
    tasks: tuple[Task, ...], source: str, table: str, networks: jax.Array, wanted: jax.Array
) -> Any:
    """Accuracies of designs, [B, M] float32.

    Args:
      tasks: M.
      source: one of `SOURCES`.
      table: as in `known`.
      networks: [B, M] int32, positions among each task's `choices()`.
      wanted: [B] bool; of others none need be trained.
    """
    found = [jnp.asarray(known(task, source, table))[networks[:, at]] for at, task in enumerate(tasks)]
    return jnp.stack(found, axis=1)
