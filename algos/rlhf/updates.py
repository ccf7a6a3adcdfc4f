"""Updates of a language model: epochs of minibatches, and their micro-batches.

A loss here is a sum over tokens, with weights that are computed for the whole minibatch
(`objective.token_weights`). So gradients and losses of micro-batches add up to those of the minibatch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from algos import registry


class Rows(NamedTuple):
    """The rows of an iteration's updates."""

    size: int  # the number of rows
    groups: int  # groups of rows; each minibatch gets equally many rows of each group, if possible
    what: str  # what a row is, for messages


def split_micro_batches(samples: Any, size: int) -> Any:
    """Divides samples `[n, ...]` into micro-batches of strided rows: `[n / size, size, ...]`.

    Because of the stride, a batch that is sharded over devices stays sharded: each device has rows of every
    micro-batch.

    >>> split_micro_batches(jnp.arange(6), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(size, -1, *x.shape[1:]), 1, 0), samples)


def join_micro_batches(micro_batches: Any) -> Any:
    """The inverse of `split_micro_batches`: `[n / size, size, ...]` to `[n, ...]`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), micro_batches)


def map_micro_batches(function: Callable[[Any], Any], samples: Any, size: int | None) -> Any:
    """Applies `function` to samples `[n, ...]` in micro-batches of gcd(n, `size`) (None: all n at once)."""
    count = len(jax.tree.leaves(samples)[0])
    if size is None or size >= count:
        return function(samples)
    return join_micro_batches(jax.lax.map(function, split_micro_batches(samples, math.gcd(size, count))))


def accumulate_gradient(
    gradient: Callable[[Any], tuple[Any, dict[str, jax.Array]]], samples: Any, size: int | None
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient and measures of a minibatch `[n, ...]`, added up over micro-batches of gcd(n, `size`) samples.

    `gradient` maps samples to gradient and measures (summands of metrics). Of measures whose name ends in
    `_max`, the largest is taken instead of the sum. Without a `size`, the minibatch is one micro-batch.
    """
    count = len(jax.tree.leaves(samples)[0])
    if size is None or size >= count:
        return gradient(samples)
    micro_batches = split_micro_batches(samples, math.gcd(size, count))
    shape = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], micro_batches))[0]

    def add_gradient(total: Any, micro_batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        one_gradient, measures = gradient(micro_batch)
        return jax.tree.map(jnp.add, total, one_gradient), measures

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    total, measures = jax.lax.scan(add_gradient, zeros, micro_batches)
    return total, combine_measures(measures)


def combine_measures(measures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Combines measures `[micro-batches]`: by sum, or by maximum if the name ends in `_max`."""
    return {
        name: jnp.max(x, axis=0) if name.endswith("_max") else jnp.sum(x, axis=0)
        for name, x in measures.items()
    }


def epochs(
    step: Callable[[Any, Any, jax.Array], tuple[Any, dict[str, jax.Array]]],
    carry: Any,
    samples: Any,
    key: jax.Array,
    num_epochs: int,
    num_minibatches: int,
    groups: int,
) -> tuple[Any, dict[str, jax.Array]]:
    """All updates on some samples, each on its own minibatch.

    `step`: `(carry, minibatch, is_first) -> (carry, measures)`; `is_first` is True in the first update.
    Samples `[n, ...]` are those of `groups` prompts; the `n / groups` of a prompt are contiguous. Samples are
    shuffled within blocks, which contribute equally to every minibatch: a block is one prompt's, or a few
    prompts' if `num_minibatches` does not divide `n / groups`. With one minibatch nothing is shuffled.
    Returns the carry after the last update, and each measure's mean over updates, or its maximum if the name
    ends in `_max`.
    """
    count = len(jax.tree.leaves(samples)[0])
    if num_minibatches == 1:

        def one_epoch(carry: Any, index: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            return step(carry, samples, index == 0)

        carry, measures = jax.lax.scan(one_epoch, carry, jnp.arange(num_epochs))
    else:
        optimizers = registry.option("optimizers")
        blocks = optimizers.num_blocks(groups, count // groups, num_minibatches)
        rows = optimizers.shuffled_rows(key, count // blocks, num_epochs, num_minibatches, blocks)

        def one_update(
            carry: Any, rows_and_index: tuple[jax.Array, jax.Array]
        ) -> tuple[Any, dict[str, jax.Array]]:
            rows, index = rows_and_index
            return step(carry, optimizers.take(samples, rows), index == 0)

        carry, measures = jax.lax.scan(one_update, carry, (rows, jnp.arange(len(rows))))
    return carry, {name: jnp.max(x) if name.endswith("_max") else jnp.mean(x) for name, x in measures.items()}


def run_updates(
    agent: Any,
    add_weights: Callable[[Any], Any],
    parameters: Any,
    optimizer_state: Any,
    samples: Any,
    key: jax.Array,
    marks_first: bool = True,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """All updates of a `LanguageAgent` on some samples: trained parameters, optimiser state, measures.

    `add_weights` sets the weights of a minibatch. `samples` and `key` are as for `epochs`.
    If not `marks_first`, the loss gets `()` for `is_first`.
    """

    def step(carry: Any, minibatch: Any, is_first: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        trained, optimizer_state = carry
        current = agent._with_trained(parameters, trained)
        gradient_of = functools.partial(agent.gradient, current, is_first if marks_first else ())
        weighted, size = add_weights(minibatch), agent.rows_per_micro_batch
        gradient, measures = accumulate_gradient(gradient_of, weighted, size)
        trained, optimizer_state = agent.update(gradient, optimizer_state, trained)
        return (trained, optimizer_state), {**measures, "gradient_norm": optax.tree.norm(gradient)}

    carry = agent._trained(parameters), optimizer_state
    groups = agent.rows_of(vars(agent)).groups
    (trained, optimizer_state), measures = epochs(
        step, carry, samples, key, agent.num_epochs, agent.num_minibatches, groups
    )
    return trained, optimizer_state, measures
