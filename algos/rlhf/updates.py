"""Updates of a language model: micro-batches, epochs, optimiser.

A loss here is a sum over tokens with weights made for its whole minibatch (`losses.token_weights`), so that
gradients and losses of micro-batches add up to those of the minibatch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from algos import optimizers
from algos.optimizers import own_blocks, shuffled_rows, take


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

    >>> samples = jnp.arange(6.0)
    >>> gradient = lambda x: (x.sum(), {"x": x.sum(), "x_max": x.max()})
    >>> total, measures = accumulate_gradient(gradient, samples, 2)
    >>> float(total), float(measures["x"]), float(measures["x_max"])
    (15.0, 15.0, 5.0)
    """
    count = len(jax.tree.leaves(samples)[0])
    if size is None or size >= count:
        return gradient(samples)
    parts = parts_of(samples, math.gcd(size, count))
    shape = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], parts))[0]

    def one(total: Any, part: Any) -> tuple[Any, dict[str, jax.Array]]:
        found, measures = gradient(part)
        return jax.tree.map(jnp.add, total, found), measures

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
        blocks = own_blocks(groups, count // groups, num_minibatches)
        rows = shuffled_rows(key, count // blocks, num_epochs, num_minibatches, blocks)

        def one(carry: Any, some: tuple[jax.Array, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
            rows, index = some
            return step(carry, take(samples, rows), index == 0)

        carry, measures = jax.lax.scan(one, carry, (rows, jnp.arange(len(rows))))
    return carry, {name: jnp.max(x) if name.endswith("_max") else jnp.mean(x) for name, x in measures.items()}


def run_updates(
    self: Any,
    gradient: Callable[[Any, jax.Array, Any], tuple[Any, dict[str, jax.Array]]],
    weighed: Callable[[Any], Any],
    parameters: Any,
    optimizer_state: Any,
    samples: Any,
    key: jax.Array,
    groups: int,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """All updates of a `LanguageAgent` on some samples: trained parameters, optimiser state, measures.

    `gradient`: `(parameters, is_first, samples) -> (gradient, measures)` of a micro-batch; `weighed` adds
    weights to a minibatch; `samples`, `key` and `groups` are as for `epochs`.
    """

    def step(carry: Any, minibatch: Any, is_first: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        trained, optimizer_state = carry
        slope = functools.partial(gradient, self._with_trained(parameters, trained), is_first)
        found, measures = accumulate_gradient(slope, weighed(minibatch), self.at_once)
        trained, optimizer_state = self.update(found, optimizer_state, trained)
        return (trained, optimizer_state), {**measures, "gradient_norm": optax.tree.norm(found)}

    carry = self._trained(parameters), optimizer_state
    (trained, optimizer_state), measures = epochs(
        step, carry, samples, key, self.num_epochs, self.num_minibatches, groups
    )
    return trained, optimizer_state, measures


def optimizer(
    own: Any, step_size: optax.Schedule, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """The user's optimiser (`algos.optimizers.user_optimizer`), or AdamW (arXiv 1711.05101).

    `max_grad_norm` clips the global norm of gradients.
    """
    given = optimizers.user_optimizer(own, step_size, max_grad_norm)
    if given is not None:  # it may count nothing, which `count` needs
        return optax.chain(optax.scale_by_schedule(lambda _: 1.0), given)
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(step_size, weight_decay=weight_decay),
    )


def count(optimizer_state: Any) -> jax.Array:
    """The number of updates of an optimiser's state, `[]` int32.

    >>> int(count(optax.adam(1e-3).init(jnp.zeros(3))))
    0
    """
    return optax.tree.get_all_with_path(optimizer_state, "count")[0][1]


def warmed_up(learning_rate: float, warmup: int, updates: int | None) -> optax.Schedule:
    """A step size that grows linearly for `warmup` updates, and falls linearly to zero after all `updates`.

    The first is above zero; `updates=None` for no decay.
    """

    def step_size(count: jax.Array) -> jax.Array:
        rate = jnp.float32(learning_rate)
        if warmup:
            rate = rate * jnp.minimum((count + 1) / warmup, 1.0)
        if updates is not None:
            rate = rate * jnp.maximum(1.0 - count / updates, 0.0)
        return rate

    return step_size


def divides(count: int, groups: int, num_minibatches: int) -> bool:
    """Whether `epochs` can split `count` samples of `groups` prompts into equal minibatches."""
    blocks = groups * math.gcd(count // groups, num_minibatches) / num_minibatches
    return blocks >= 1 and blocks.is_integer()
