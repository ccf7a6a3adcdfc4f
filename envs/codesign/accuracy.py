"""Accuracies of candidate networks from four sources; every output names its source.

`table`: looked up. `train`: each network (child) is trained within the program. `supernet`: children share
weights. `surrogate`: a formula for tests, not a measurement.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign import children, images
from envs.codesign.space import Task
from fdg.errors import FdgError
from fdg.kinds import matches
from fdg.reading import cached_by_stamp, read_json

SOURCES = ("table", "train", "supernet", "surrogate")  # of accuracies
SHIPPED = "accuracies.json"  # the shipped table, in this folder
UNIT = 10_000  # the integer in a table for an accuracy of 1
_MAX_FILE_BYTES = 2**24  # of a table
_CHUNK = 16  # children trained together; constant, so that results do not depend on the number of children


def surrogate(task: Task) -> np.ndarray:
    """A formula in place of measured accuracies: 1 - (1 + weights / 1,000)^(-1/2), [choices] float32.

    `weights` is a network's number of weights.
    """
    weights = [sum(layer.weight_words for layer in task.build(*choice)) for choice in task.choices()]
    return 1 - (1 + np.asarray(weights, np.float32) / 1000) ** -0.5


def of_choices(task: Task, source: str, table: str = "") -> np.ndarray:
    """Accuracies of all networks of a task, [choices] float32.

    `source` is one of `SOURCES` except `train`. A task without decisions has its own `accuracy`, or NaN.
    `table` is a file that replaces the shipped table.
    """
    if not task.decisions:
        return np.asarray([np.nan if task.accuracy is None else task.accuracy], np.float32)
    if source == "surrogate":
        return surrogate(task)
    if source == "supernet":
        return _supernet(task, images.signature(task.data))
    return by_seed(task, table).mean(0)


def by_seed(task: Task, table: str = "") -> np.ndarray:
    """Accuracies of a task in a table, for each seed, [seeds, choices] float32."""
    return np.asarray(_table_row(task, table)["accuracy"], np.float32) / np.float32(UNIT)


def signature(task: Task) -> str:
    """The key of a task in a table: everything its accuracies depend on; for an image file its digest."""
    options = "; ".join(f"{decision.name} {list(decision.options)}" for decision in task.decisions)
    return f"{images.signature(task.data)}; {task.build!r}; {options}"


def _table_row(task: Task, table: str) -> Mapping[str, Any]:
    """The entry of a task in a table; raises an `FdgError` if it is missing or incomplete."""
    rows = read_table(table)
    row = rows.get(signature(task))
    if row is None:
        raise FdgError(
            f"task '{task.name}': {table or 'the shipped table'} has no accuracies of its networks on"
            f" '{task.data}': measure them, python -m bench.codesign_table FILE.toml, or accuracy='train'"
        )
    if any(len(of_seed) != len(task.choices()) for of_seed in row["accuracy"]):
        raise FdgError(
            f"{table or SHIPPED}: '{signature(task)}' needs one accuracy per network: measure again"
        )
    return row


@cached_by_stamp
def read_table(table: str) -> dict[str, Any]:
    """A table of accuracies: {signature: {"accuracy": [seeds][choices] in ten-thousandths}}.

    If `table` is empty, the one that is shipped.
    """
    rows_by_signature = read_json(table or Path(__file__).with_name(SHIPPED), _MAX_FILE_BYTES)
    is_table = all(
        isinstance(row, dict)
        and row.get("accuracy")
        and matches(row["accuracy"], list[list[int]])
        and all(0 <= x <= UNIT for of_seed in row["accuracy"] for x in of_seed)
        for row in rows_by_signature.values()
    )
    if not is_table:
        raise FdgError(
            f"{table or SHIPPED} is not a table of accuracies: python -m bench.codesign_table makes one"
        )
    return rows_by_signature


@functools.lru_cache(maxsize=8)
def _supernet(task: Task, _: str) -> np.ndarray:
    """As `of_choices`; the second argument, the images' signature, is only a key of the cache."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.jit(lambda: children.supernet(task, _images(task)))())


def _images(task: Task) -> images.Images:
    """The task's images; raises an `FdgError` if its networks do not take them."""
    loaded = images.get(task.data)
    children.check_images(task, loaded)
    return loaded


def accuracies(
    tasks: tuple[Task, ...], source: str, table: str, networks: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Accuracies of the networks of B designs for M tasks, [B, M] float32.

    `networks` [B, M] int32 are positions among each task's `choices()`. With the source "train" only those
    `wanted` [B] bool are trained; the others are 0. `table` is as for `of_choices`.
    """
    columns = [
        _train_networks(task, networks[:, i], wanted)
        if source == "train" and task.decisions
        else jnp.asarray(of_choices(task, source, table))[networks[:, i]]
        for i, task in enumerate(tasks)
    ]
    return jnp.stack(columns, axis=1)


def _train_networks(task: Task, networks: jax.Array, wanted: jax.Array) -> jax.Array:
    """Trains the `wanted` networks in chunks of `_CHUNK`; [B] float32."""
    total, data = len(networks), _images(task)
    network, options = children.network(task), jnp.asarray(children.options(task))
    order = jnp.argsort(~wanted, stable=True)  # the wanted ones first
    order = jnp.pad(order, (0, -total % _CHUNK), constant_values=total)  # results at `total` are dropped

    def has_more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] * _CHUNK < wanted.sum()

    def train(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk, accuracy = carry
        rows = jax.lax.dynamic_slice_in_dim(order, chunk * _CHUNK, _CHUNK)
        choices = options[networks[jnp.minimum(rows, total - 1)]]
        new = children.train(network, data, choices, 0, children.settings(data))
        return chunk + 1, accuracy.at[rows].set(new, mode="drop")

    _, accuracy = jax.lax.while_loop(has_more, train, (jnp.int32(0), jnp.zeros(total)))
    return jnp.where(wanted, accuracy, 0)
