"""Updates of a language model: epochs of minibatches, and their micro-batches.

A loss here is a sum over tokens with weights made for its whole minibatch (`objective.token_weights`), so
that gradients and losses of micro-batches add up to those of the minibatch.
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

    size: int
    groups: int  # that are spread evenly over minibatches
    what: str


def parts_of(samples: Any, size: int) -> Any:
    """Samples `[n, ...]` as strided micro-batches `[n / size, size, ...]`.

    The stride keeps a batch that is sharded over devices sharded: each device has rows of every micro-batch.

    >>> parts_of(jnp.arange(6), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(size, -1, *x.shape[1:]), 1, 0), samples)


def whole_of(parts: Any) -> Any:
    """The inverse of `parts_of`, of results `[n / size, size, ...]`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), parts)


def map_micro_batches(function: Callable[[Any], Any], samples: Any, size: int | None) -> Any:
    """Applies `function` to samples `[n, ...]`, one micro-batch at a time; results `[n, ...]`."""
    count = len(jax.tree.leaves(samples)[0])
    if size is None or size >= count:
        return function(samples)
    return whole_of(jax.lax.map(function, parts_of(samples, math.gcd(size, count))))


def accumulate_gradient(
    gradient: Callable[[Any], tuple[Any, dict[str, jax.Array]]], samples: Any, size: int | None
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient and measures of a minibatch `[n, ...]`, added up over its micro-batches of `size` samples.

    `gradient` maps samples to gradient and measures. Of a measure whose name ends in `_max`, the largest is
    taken.
    """
    count = len(jax.tree.leaves(samples)[0])
    if size is None or size >= count:
        return gradient(samples)
    parts = parts_of(samples, math.gcd(size, count))
    shape = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], parts))[0]

    def one(total: Any, part: Any) -> tuple[Any, dict[str, jax.Array]]:
        more, measures = gradient(part)
        return jax.tree.map(jnp.add, total, more), measures

    total, measures = jax.lax.scan(one, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), parts)
    return total, together(measures)


def together(measures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Combines measures `[parts]` of micro-batches: by sum, or by maximum if the name ends in `_max`."""
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

    `step`: `(carry, minibatch, is_first) -> (carry, measures)`. Of the samples `[n, ...]`, the `n / groups`
    of a group (a prompt) are contiguous. They are shuffled within blocks of one prompt, or of the fewest
    prompts that give every minibatch equally many samples of each block. Returns the carry after the last
    update, and the measures' means over them; of `_max`, the largest.
    """
    count = len(jax.tree.leaves(samples)[0])
    if num_minibatches == 1:

        def one_epoch(carry: Any, index: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            return step(carry, samples, index == 0)

        carry, measures = jax.lax.scan(one_epoch, carry, jnp.arange(num_epochs))
    else:
        of = registry.option("optimizers")
        blocks = of.own_blocks(groups, count // groups, num_minibatches)
        rows = of.shuffled_rows(key, count // blocks, num_epochs, num_minibatches, blocks)

        def one(carry: Any, some: tuple[jax.Array, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
            rows, index = some
            return step(carry, of.take(samples, rows), index == 0)

        carry, measures = jax.lax.scan(one, carry, (rows, jnp.arange(len(rows))))
    return carry, {name: jnp.max(x) if name.endswith("_max") else jnp.mean(x) for name, x in measures.items()}


def run_updates(
    agent: Any,
    weighed: Callable[[Any], Any],
    parameters: Any,
    optimizer_state: Any,
    samples: Any,
    key: jax.Array,
    groups: int,
    compares: bool = True,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """All updates of a `LanguageAgent` on some samples: trained parameters, optimiser state, measures.

    `weighed` adds weights to a minibatch; `samples`, `key` and `groups` are as for `epochs`; `compares` says
    whether the loss depends on `is_first`, else it gets `()`.
    """

    def step(carry: Any, minibatch: Any, is_first: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        trained, optimizer_state = carry
        now = agent._with_trained(parameters, trained)
        slope = functools.partial(agent.gradient, now, is_first if compares else ())
        total, measures = accumulate_gradient(slope, weighed(minibatch), agent.at_once)
        trained, optimizer_state = agent.update(total, optimizer_state, trained)
        return (trained, optimizer_state), {**measures, "gradient_norm": optax.tree.norm(total)}

    carry = agent._trained(parameters), optimizer_state
    (trained, optimizer_state), measures = epochs(
        step, carry, samples, key, agent.num_epochs, agent.num_minibatches, groups
    )
    return trained, optimizer_state, measures
