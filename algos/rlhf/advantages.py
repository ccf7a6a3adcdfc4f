"""Advantages of responses and of their tokens.

Letters in shapes: `N` responses, contiguous for each prompt (a group of `G`); `R` tokens.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from algos.rlhf.losses import masked_mean

Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "tokens", "none"]


def overlong_penalty(lengths: jax.Array, longest: int, buffer: int) -> jax.Array:
    """DAPO's soft punishment of long responses (arXiv 2503.14476, equation 13): `[N]` float32, from 0 to -1.

    It grows over the last `buffer` of `longest` tokens; `lengths` is `[N]` int32. 0 for none.

    >>> overlong_penalty(jnp.array([6, 8, 10]), longest=10, buffer=4).tolist()
    [0.0, -0.5, -1.0]
    """
    if not buffer:
        return jnp.zeros(lengths.shape, jnp.float32)
    return jnp.clip((longest - buffer - lengths) / buffer, -1.0, 0.0).astype(jnp.float32)


def group_advantage(
    reward: jax.Array,
    group: int,
    baseline: Baseline,
    scale: Scale,
    guard: float,
    unbiased: bool,
    given: jax.Array | None = None,
) -> jax.Array:
    """Rewards `[N]` minus a baseline of the responses to the same prompt: `[N]` float32.

    If all rewards of a group are equal, each advantage is exactly zero, regardless of rounding.

    Args:
      reward: `[N]` float32; computed in float64 if that is enabled.
      group: `G`, responses to each prompt.
      baseline: the group's mean (GRPO), the mean of the others (RLOO, arXiv 2402.14740, equation 2), or none.
      scale: divide by the standard deviation of rewards within the group (GRPO, arXiv 2402.03300, section
        4.1.2) or the batch; `none` (Dr. GRPO) and `tokens` (done later) do not.
      guard, unbiased: added to the deviation; whether that is over `n - 1`.
      given: `[N]` bool, which responses have a reward; the others have advantage zero. None: all.

    >>> group_advantage(jnp.array([1.0, 0.0, 0.0, 5.0]), 2, "leave_one_out", "none", 0.0, True).tolist()
    [1.0, -1.0, -5.0, 5.0]
    """
    grouped = reward.astype(float).reshape(-1, group)
    there = jnp.ones(grouped.shape, bool) if given is None else given.reshape(-1, group)
    advantage = jnp.where(there, grouped, 0.0)
    if baseline != "none":
        advantage = _centred(grouped, there, axis=1)
    if baseline == "leave_one_out":
        count = jnp.sum(there, axis=1, keepdims=True, dtype=advantage.dtype)
        advantage = advantage * (count / jnp.maximum(count - 1, 1))
    if scale in ("group", "batch"):
        axis = 1 if scale == "group" else None
        advantage = advantage / (_deviation(grouped, there, axis, unbiased) + guard)
    return advantage.reshape(-1)


def _centred(x: jax.Array, there: jax.Array, axis: int | None) -> jax.Array:
    """`x` minus its mean over an axis, or over all: exactly zero where all are equal, or not `there`."""
    largest = jnp.max(x, axis, keepdims=True, where=there, initial=-jnp.inf)
    smallest = jnp.min(x, axis, keepdims=True, where=there, initial=jnp.inf)
    count = jnp.maximum(jnp.sum(there, axis, keepdims=True, dtype=x.dtype), 1)
    mean = jnp.sum(jnp.where(there, x, 0.0), axis, keepdims=True) / count
    return jnp.where(there & (largest > smallest), x - mean, 0.0)


def _deviation(x: jax.Array, there: jax.Array, axis: int | None, unbiased: bool) -> jax.Array:
    """The standard deviation over an axis, which is kept, or over all; exactly zero where all are equal."""
    count = jnp.sum(there, axis, keepdims=True, dtype=x.dtype)
    squares = jnp.sum(jnp.square(_centred(x, there, axis)), axis, keepdims=True)
    return jnp.sqrt(squares / jnp.maximum(count - unbiased, 1))


def informative(reward: jax.Array, group: int, given: jax.Array | None = None) -> jax.Array:
    """Whether responses to a prompt differ in reward, `[N / G]` bool: others teach nothing (DAPO, eq. 11).

    >>> informative(jnp.array([1.0, 0.0, 1.0, 1.0]), 2).tolist()
    [True, False]
    """
    there = jnp.ones(reward.shape, bool) if given is None else given
    highest = jnp.where(there, reward, -jnp.inf).reshape(-1, group).max(axis=1)
    return highest > jnp.where(there, reward, jnp.inf).reshape(-1, group).min(axis=1)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean zero and variance one (over `n - 1`) of `x [N, R]` over the tokens of the mask; zero elsewhere.

    Where all of them are equal, they are exactly zero.

    >>> whiten(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])).round(3).tolist()
    [[-0.707..., 0.707..., 0.0]]
    """
    count = jnp.sum(mask, dtype=jnp.float32)
    equal = jnp.max(x, where=mask, initial=-jnp.inf) == jnp.min(x, where=mask, initial=jnp.inf)
    centred = jnp.where(mask & ~equal, x - masked_mean(x, mask), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def still_to_come(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The sum of `x [N, R]` over each token of the mask and all that follow it.

    >>> still_to_come(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[True, True, False]])).tolist()
    [[3.0, 2.0, 0.0]]
    """
    return jnp.flip(jnp.cumsum(jnp.flip(jnp.where(mask, x, 0.0), 1), axis=1), 1)


def reward_at_end(reward: jax.Array, mask: jax.Array) -> jax.Array:
    """Rewards `[N]`, each at the last token of the mask of its response: `[N, R]` float32.

    >>> reward_at_end(jnp.array([5.0]), jnp.array([[True, True, False]])).tolist()
    [[0.0, 5.0, 0.0]]
    """
    last = mask & (still_to_come(mask.astype(jnp.float32), mask) == 1)
    return jnp.where(last, reward[:, None], 0.0)


def token_advantages(
    reward: jax.Array, value: jax.Array, mask: jax.Array, discount: float, gae_lambda: float
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation over the tokens of responses (Schulman et al. 2016, arXiv 1506.02438).

    The value after the last token is zero. Tokens outside the mask (such as a tool's output) are skipped.
    `reward`, `value` (before each token), `mask` and both results, advantage and value target, are `[N, R]`.

    >>> one, mask = jnp.ones((1, 3)), jnp.array([[True, False, True]])
    >>> advantage, target = token_advantages(one, 0.5 * one, mask, 1.0, 1.0)
    >>> advantage.tolist(), target.tolist()
    ([[1.5, 0.0, 0.5]], [[2.0, 0.0, 1.0]])
    """

    def one(carry, step):
        later, next_value = carry
        reward, value, mask = step
        advantage = reward + discount * next_value - value + discount * gae_lambda * later
        carry = jnp.where(mask, advantage, later), jnp.where(mask, value, next_value)
        return carry, jnp.where(mask, advantage, 0.0)

    zeros = jnp.zeros(reward.shape[:1], reward.dtype)
    _, advantage = jax.lax.scan(one, (zeros, zeros), (reward.T, value.T, mask.T), reverse=True)
    return advantage.T, jnp.where(mask, advantage.T + value, 0.0)
