"""The objective of group-relative algorithms: advantages, ratios, clipping, KL, means over tokens.

Every mean over tokens or responses is a weighted sum. Its weights (`token_weights`) are computed for a whole
minibatch, so losses and gradients of micro-batches add up. Components that only some papers have are in
`variants.py` (tables, advantages) and `losses.py` (other surrogates, importance weights, losses of pairs).

Shapes: `N` responses, contiguous for each prompt (a group of `G`); `R` tokens. `mask [N, R]` is true at
tokens that the policy chose. `log_prob`, `log_ratio`, `advantage` and losses are `[N, R]` float32.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from algos import registry
from fdg.settings.fields import hyperparameter
from fdg.settings.moved import moved

# Names that moved to `algos.rlhf.variants`.
_IN_VARIANTS = (
    "CONVENTIONS VARIANTS objective overlong_penalty reversed_cumsum reward_at_end token_advantages whiten"
)
__getattr__ = moved(__name__, "algos.rlhf.variants", {name: name for name in _IN_VARIANTS.split()})

# Values of settings; `Objective` and the functions below say what they mean.
RatioLevel = Literal["token", "sequence", "sequence_token", "trajectory"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Estimator = Literal["k1", "k2", "k3"]
Surrogate = Literal["clip", "weight", "gate", "geometric_mean"]
Correction = Literal[
    "none", "truncate_token", "mask_token", "truncate_sequence", "mask_sequence", "decoupled"
]
Preference = Literal["sigmoid", "hinge", "ipo", "robust"]
Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "tokens", "none"]
KLPlace = Literal["loss", "reward", "reward_to_go"]

# Logarithms are clipped to this before `exp`: exp(20) is half a billion, and its square fits in float32.
_MAX_LOG = 20.0
_ROUNDING = 128  # units in the last place of 1 within which log-probabilities count as equal


@dataclasses.dataclass(frozen=True)
class Objective:
    """An objective; the defaults are those of GRPO's paper (arXiv 2402.03300, equations 3 and 4).

    Fields with a help text are also settings of `GRPO`; only variants and conventions set the others.
    `scale="tokens"` standardises the advantages of all tokens. `kl_in="reward"` subtracts the KL from a
    response's reward, and `"reward_to_go"` from each token's reward, without gradient.
    """

    baseline: Baseline = hyperparameter("group", "baseline that rewards are compared with")
    scale: Scale = hyperparameter(
        "group", "standard deviation that advantages are divided by; none: they are not"
    )
    guard: float = hyperparameter(1e-6, "added to this standard deviation, against division by zero")
    unbiased_deviation: bool = True  # variances divide by n - 1
    ratio_level: RatioLevel = hyperparameter("token", "level of ratios to the policy that responded")
    surrogate: Surrogate = hyperparameter("clip", "surrogate loss of a token, by its ratio and advantage")
    aggregation: Aggregation = hyperparameter("sequence_mean", "aggregation of tokens to a loss")
    count_empty: bool = True  # responses without tokens count in means
    clip_low: float = hyperparameter(0.2, "lower bound of the ratio is 1 minus this")
    clip_high: float = hyperparameter(0.2, "upper bound of the ratio is 1 plus this")
    gate_positive: float = hyperparameter(1.0, "steepness of a gate where advantages are above zero")
    gate_negative: float = hyperparameter(1.05, "steepness of a gate where advantages are below zero")
    dual_clip: float | None = hyperparameter(
        None, "upper bound of the loss of a token with negative advantage, in units of the advantage"
    )
    kl_coefficient: float = hyperparameter(
        0.04,
        "beta: weight of the KL to the reference; 0: no reference",
        structural="whether there is a reference",
    )
    kl_estimator: Estimator = hyperparameter("k3", "estimator of the KL")
    kl_in: KLPlace = hyperparameter("loss", "KL as a loss term, or in the reward")
    overlong_buffer: float = hyperparameter(
        0.0,
        "share of the longest response, at its end, over which a length penalty grows",
        structural="how many tokens have a penalty",
    )
    overlong_coefficient: float = 1.0  # the full penalty
    mask_truncated: bool = hyperparameter(False, "leave truncated responses out of the loss")
    dynamic_sampling: int = hyperparameter(
        0, "factor of prompts to sample for, to keep those whose rewards differ; 0: keep all prompts"
    )
    correction: Correction = hyperparameter("none", "importance weights of actor against learner")
    correction_cap: float = hyperparameter(2.0, "upper bound of these weights")

    def cost(
        self, log_prob: jax.Array, log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """The loss of each token by the `surrogate`: `[N, R]` float32."""
        if self.surrogate == "clip":
            return surrogate(log_ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)
        return registry.option("losses").cost(self, log_prob, log_ratio, advantage, mask)

    def clipped(self, log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
        """True where a ratio is clipped on the side of its advantage: `[N, R]` bool."""
        if self.surrogate in ("clip", "weight"):
            return clipped(log_ratio, advantage, self.clip_low, self.clip_high)
        return registry.option("losses").clipped_tokens(self, log_ratio, advantage)

    def reward(self, reward: jax.Array, lengths: jax.Array, longest: int) -> jax.Array:
        """Rewards `[N]` with the length penalty for `lengths [N]`."""
        buffer = round(self.overlong_buffer * longest)
        penalty = registry.option("variants").overlong_penalty(lengths, longest, buffer)
        return reward + self.overlong_coefficient * penalty

    def advantage(
        self,
        reward: jax.Array,
        log_prob: jax.Array,
        reference_log_prob: jax.Array,
        mask: jax.Array,
        group: int,
        given: jax.Array | None = None,
    ) -> jax.Array:
        """The advantage of each token, `[N, R]` float32, without gradient; zero outside the mask.

        `reward` is `[N]` float32, `mask [N, R]` bool. `log_prob` and `reference_log_prob [N, R]` float32, of
        the acting policy and the reference, are used if the KL is in rewards. `given [N]` bool is True for
        responses that have a reward (None: all).
        """
        penalty = None
        if self.kl_coefficient and self.kl_in != "loss":
            kl = divergence(log_prob, reference_log_prob, self.kl_estimator)
            penalty = self.kl_coefficient * jnp.where(mask, kl, 0.0)
        if penalty is not None and self.kl_in == "reward":
            reward = reward - penalty.sum(axis=1)
        response_advantage = group_advantage(
            reward, group, self.baseline, self.scale, self.guard, self.unbiased_deviation, given
        )
        advantage = jnp.where(mask, response_advantage[:, None], 0.0)
        if penalty is not None and self.kl_in == "reward_to_go":
            advantage = advantage - registry.option("variants").reversed_cumsum(penalty, mask)
        if self.scale == "tokens":
            advantage = registry.option("variants").whiten(advantage, mask)
        return jax.lax.stop_gradient(advantage)


# --- advantages ---


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

    `reward` is `[N]` float32; computations are in float64 if that is enabled. `given [N]` bool is True for
    responses that have a reward (None: all); the others have advantage zero. The baseline is the group's mean
    (GRPO), the mean of the other responses (RLOO, arXiv 2402.14740, equation 2), or none. The divisor is
    `guard` plus the standard deviation of rewards within the group (GRPO, arXiv 2402.03300, section 4.1.2) or
    the batch, over `n - 1` if `unbiased`. A `scale` of "none" (Dr. GRPO), or of "tokens" (which is applied
    later), does not divide.

    >>> group_advantage(jnp.array([1.0, 0.0, 0.0, 5.0]), 2, "leave_one_out", "none", 0.0, True).tolist()
    [1.0, -1.0, -5.0, 5.0]
    """
    grouped = reward.astype(float).reshape(-1, group)
    is_given = jnp.ones(grouped.shape, bool) if given is None else given.reshape(-1, group)
    advantage = jnp.where(is_given, grouped, 0.0)
    if baseline != "none":
        advantage = _centred(grouped, is_given, axis=1)
    if baseline == "leave_one_out":
        count = jnp.sum(is_given, axis=1, keepdims=True, dtype=advantage.dtype)
        advantage = advantage * (count / jnp.maximum(count - 1, 1))
    if scale in ("group", "batch"):
        axis = 1 if scale == "group" else None
        count = jnp.sum(is_given, axis, keepdims=True, dtype=advantage.dtype)
        squares = jnp.sum(jnp.square(_centred(grouped, is_given, axis)), axis, keepdims=True)
        divisor = jnp.sqrt(squares / jnp.maximum(count - unbiased, 1)) + guard
        advantage = advantage / jnp.where(divisor > 0, divisor, 1.0)  # zero: no guard, and all are equal
    return advantage.reshape(-1)


def _centred(x: jax.Array, where: jax.Array, axis: int | None) -> jax.Array:
    """Entries of `x` `where` True, minus their mean over an axis (None: all axes); zero elsewhere.

    If all these entries are equal, the result is exactly zero.
    """
    largest = jnp.max(x, axis, keepdims=True, where=where, initial=-jnp.inf)
    smallest = jnp.min(x, axis, keepdims=True, where=where, initial=jnp.inf)
    count = jnp.maximum(jnp.sum(where, axis, keepdims=True, dtype=x.dtype), 1)
    mean = jnp.sum(jnp.where(where, x, 0.0), axis, keepdims=True) / count
    return jnp.where(where & (largest > smallest), x - mean, 0.0)


def informative(reward: jax.Array, group: int, given: jax.Array | None = None) -> jax.Array:
    """True for prompts whose responses differ in reward, `[N / G]` bool; other prompts have no gradient.

    DAPO, arXiv 2503.14476, equation 11.

    >>> informative(jnp.array([1.0, 0.0, 1.0, 1.0]), 2).tolist()
    [True, False]
    """
    is_given = jnp.ones(reward.shape, bool) if given is None else given
    highest = jnp.where(is_given, reward, -jnp.inf).reshape(-1, group).max(axis=1)
    return highest > jnp.where(is_given, reward, jnp.inf).reshape(-1, group).min(axis=1)


# --- losses ---


def token_weights(
    mask: jax.Array, aggregation: Aggregation, length: int, count_empty: bool = True
) -> jax.Array:
    """The weight of each token in the loss of a minibatch, `[N, R]` float32; zero outside the mask.

    - `token_mean`: equal for all tokens (DAPO, arXiv 2503.14476, equation 8).
    - `sequence_mean`: equal for all responses, and within each (GRPO, arXiv 2402.03300, equation 3).
    - `sequence_sum`: the tokens of a response are summed, responses averaged (RLOO, REINFORCE).
    - `constant`: one over `N * length`, where `length` is the longest possible response (Dr. GRPO, arXiv
      2503.20783, section 3.2).

    `count_empty`: if True, responses without tokens count in the number of responses (as in TRL), else not
    (verl).
    """
    lengths = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
    count = jnp.float32(len(mask)) if count_empty else jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.float32), 1)
    return _weights(mask, lengths, count, aggregation, length)


def undivided_weights(
    mask: jax.Array, aggregation: Aggregation, length: int, count_empty: bool = True
) -> tuple[jax.Array, jax.Array]:
    """`token_weights` of a part of a minibatch, before division by the total of all parts.

    Returns weights `[n, R]` float32, and the part's summand in the total: its number of tokens or responses.
    """
    lengths = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
    if aggregation == "token_mean":
        return mask.astype(jnp.float32), jnp.sum(lengths)
    count = jnp.float32(len(mask)) if count_empty else jnp.sum(lengths > 0, dtype=jnp.float32)
    return _weights(mask, lengths, jnp.float32(1), aggregation, length), count


def _weights(
    mask: jax.Array, lengths: jax.Array, count: jax.Array, aggregation: Aggregation, length: int
) -> jax.Array:
    """`token_weights` of responses of these `lengths [N, 1]`, of which `count` are counted."""
    tokens = mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return tokens / jnp.maximum(jnp.sum(tokens), 1)
    if aggregation == "sequence_mean":
        return tokens / jnp.maximum(lengths, 1) / count
    if aggregation == "sequence_sum":
        return tokens / count
    return tokens / (count * length)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `x [...]` over the mask; zero if the mask is empty."""
    total = jnp.sum(jnp.where(mask, x, 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)


def log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, mask: jax.Array, level: RatioLevel) -> jax.Array:
    """Log-ratio of the current policy to the policy that responded, `[N, R]` float32.

    - `token`: the log-ratio of each token.
    - `sequence`: the mean over the response, at each of its tokens (GSPO, arXiv 2507.18071, equation 7).
    - `sequence_token`: the value of `sequence` with the gradient of `token` (GSPO-token, equation 14).
    - `trajectory`: the sum over the response (RLOO, arXiv 2402.14740).

    At least -20 and at most 20, and zero outside the mask.
    """
    token_ratio = jnp.where(mask, log_prob - old_log_prob, 0.0)
    if level == "token":
        ratio = token_ratio
    else:
        response_ratio = jnp.sum(token_ratio, axis=1, keepdims=True)
        if level != "trajectory":
            length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32), 1)
            response_ratio = response_ratio / length
        ratio = jnp.broadcast_to(response_ratio, token_ratio.shape)
        if level == "sequence_token":
            # The value is the response's ratio; the gradient is that of the token's log-probability.
            zero = log_prob - jax.lax.stop_gradient(log_prob)
            ratio = jax.lax.stop_gradient(ratio) + zero
    return jnp.where(mask, jnp.clip(ratio, -_MAX_LOG, _MAX_LOG), 0.0)


def surrogate(
    log_ratio: jax.Array,
    advantage: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> jax.Array:
    """The loss of each token, `[N, R]` float32: PPO's clipped objective (arXiv 1707.06347, eq. 7), negated.

    Ratios are clipped to `1 - clip_low` and `1 + clip_high` (DAPO's "clip-higher"). `dual_clip` bounds the
    loss of a token with negative advantage to this many times the size of the advantage (Ye et al. 2020,
    arXiv 1912.09729, equation 5); None for no bound.
    """
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    cost = -jnp.minimum(ratio * advantage, clipped_ratio * advantage)
    if dual_clip is None:
        return cost
    return jnp.where(advantage < 0, jnp.minimum(cost, -dual_clip * advantage), cost)


def clipped(log_ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float) -> jax.Array:
    """True where clipping removes the gradient: `[N, R]` bool."""
    ratio = jnp.exp(log_ratio)
    return ((ratio < 1.0 - clip_low) & (advantage < 0)) | ((ratio > 1.0 + clip_high) & (advantage > 0))


def divergence(log_prob: jax.Array, reference_log_prob: jax.Array, estimator: Estimator) -> jax.Array:
    """KL of the policy from its reference, estimated at each token: `[N, R]` float32.

    With `d` the log-probability minus the reference's: `k1` is d, `k2` is d^2 / 2 and `k3` is exp(-d) - 1 + d
    (Schulman 2020, joschu.net/blog/kl-approx.html; `k3` is GRPO's, arXiv 2402.03300, equation 4). k1 and k3
    are unbiased estimates. In a loss, k2 has the gradient of the KL, while that of k1 is zero on average.

    A `d` within rounding (128 units in the last place of 1) counts as zero, so that k2 and k3 of a policy
    equal to its reference have no gradient: Adam would turn rounding errors into full steps.
    """
    difference = log_prob - reference_log_prob
    rounding = _ROUNDING * jnp.finfo(difference.dtype).eps
    # Subtracted, not set to zero, so that the derivative of k1 is 1 there, too.
    rounding_error = jnp.where(jnp.abs(difference) <= rounding, difference, 0.0)
    difference = difference - jax.lax.stop_gradient(rounding_error)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    negated = jnp.clip(-difference, -_MAX_LOG, _MAX_LOG)
    return jnp.exp(negated) - 1.0 - negated
