"""Token losses, as pure functions of log-probabilities, masks and advantages.

Every mean over tokens or responses is a sum with weights (`token_weights`) that are made once for a whole
minibatch, so losses and gradients of micro-batches add up.

Shapes: `N` responses, `R` tokens of a response. `mask [N, R]` is true at tokens that the policy
chose. `log_prob`, `log_ratio`, `advantage` and results are `[N, R]` float32.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fdg.settings.fields import hyperparameter, is_traced, require, require_not_negative
from fdg.settings.parts import Part

RatioLevel = Literal["token", "sequence", "sequence_token", "trajectory"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Estimator = Literal["k1", "k2", "k3"]
Surrogate = Literal["clip", "weight", "gate", "geometric_mean"]
Correction = Literal[
    "none", "truncate_token", "mask_token", "truncate_sequence", "mask_sequence", "decoupled"
]
Preference = Literal["sigmoid", "hinge", "ipo", "robust"]

_LARGEST = (
    20.0  # largest logarithm to be exponentiated: exp(20) is half a billion, and its square still a float32
)
_ROUNDING = 128  # units in the last place of 1 within which log-probabilities count as equal


def token_weights(
    mask: jax.Array, aggregation: Aggregation, length: int, count_empty: bool = True
) -> jax.Array:
    """The weight of each token in the loss of a minibatch, `[N, R]` float32; zero outside the mask.

    - `token_mean`: equal for all tokens (DAPO, arXiv 2503.14476, equation 8).
    - `sequence_mean`: equal for all responses, and within each (GRPO, arXiv 2402.03300, equation 3).
    - `sequence_sum`: the tokens of a response are summed, responses averaged (RLOO, REINFORCE).
    - `constant`: one over `N * length`, the longest response (Dr. GRPO, arXiv 2503.20783, section 3.2).

    `count_empty`: whether responses without a token count in the number of responses (TRL), or not (verl).

    >>> mask = jnp.array([[True, False, False], [True, True, True]])
    >>> token_weights(mask, "token_mean", 3)[1].tolist()
    [0.25, 0.25, 0.25]
    >>> token_weights(mask, "sequence_mean", 3)[0].tolist()
    [0.5, 0.0, 0.0]
    """
    lengths = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
    count = jnp.float32(len(mask)) if count_empty else jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.float32), 1)
    return weights_among(mask, lengths, count, aggregation, length)


def weight_sums(
    mask: jax.Array, aggregation: Aggregation, length: int, count_empty: bool = True
) -> tuple[jax.Array, jax.Array]:
    """`token_weights` of a part of a minibatch, before division by the total of all parts.

    Returns `[n, R]` float32, and this part's share of the divisor: its tokens, or its responses.

    >>> mask = jnp.array([[True, False], [True, True]])
    >>> weights, count = weight_sums(mask, "token_mean", 2)
    >>> weights.tolist(), float(count)
    ([[1.0, 0.0], [1.0, 1.0]], 3.0)
    """
    lengths = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
    if aggregation == "token_mean":
        return mask.astype(jnp.float32), jnp.sum(lengths)
    count = jnp.float32(len(mask)) if count_empty else jnp.sum(lengths > 0, dtype=jnp.float32)
    return weights_among(mask, lengths, jnp.float32(1), aggregation, length), count


def weights_among(
    mask: jax.Array, lengths: jax.Array, count: jax.Array, aggregation: Aggregation, length: int
) -> jax.Array:
    """`token_weights` for packed rows: `lengths` is the length of each token's response `[n, T]`; also takes
    the number of responses.

    >>> mask = jnp.array([[True, True, True, True]])  # a response of one token, and one of three
    >>> weights_among(mask, jnp.array([[1, 3, 3, 3]]), jnp.float32(2), "sequence_mean", 3)[0, 0].item()
    0.5
    """
    tokens = mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return tokens / jnp.maximum(jnp.sum(tokens), 1)
    if aggregation == "sequence_mean":
        return tokens / jnp.maximum(lengths, 1) / count
    if aggregation == "sequence_sum":
        return tokens / count
    return tokens / (count * length)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `x [...]` over the mask; zero if the mask is empty.

    >>> float(masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])))
    2.0
    """
    total = jnp.sum(jnp.where(mask, x, 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)


def log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, mask: jax.Array, level: RatioLevel) -> jax.Array:
    """Log-ratio of the current policy to the policy that responded, `[N, R]` float32.

    - `token`: each token's own.
    - `sequence`: the mean over the response, at each of its tokens (GSPO, arXiv 2507.18071, equation 7).
    - `sequence_token`: the same value, whose gradient is that of the token alone (GSPO-token, equation 14).
    - `trajectory`: the sum over the response (RLOO, arXiv 2402.14740).

    Zero outside the mask.

    >>> now, old = jnp.log(jnp.array([[0.4, 0.2]])), jnp.log(jnp.array([[0.1, 0.2]]))
    >>> mask = jnp.ones((1, 2), bool)
    >>> [f"{x:.2f}" for x in jnp.exp(log_ratio(now, old, mask, "sequence"))[0]]
    ['2.00', '2.00']
    """
    change = jnp.where(mask, log_prob - old_log_prob, 0.0)
    if level == "token":
        found = change
    else:
        whole = jnp.sum(change, axis=1, keepdims=True)
        if level != "trajectory":
            whole = whole / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32), 1)
        found = jnp.broadcast_to(whole, change.shape)
        if level == "sequence_token":
            # The value is the response's ratio; the gradient is that of the token's log-probability.
            own = log_prob - jax.lax.stop_gradient(log_prob)
            found = jax.lax.stop_gradient(found) + own
    return jnp.where(mask, jnp.clip(found, -_LARGEST, _LARGEST), 0.0)


def surrogate(
    log_ratio: jax.Array,
    advantage: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> jax.Array:
    """PPO's clipped objective (arXiv 1707.06347, equation 7), negated, of each token.

    Args:
      clip_low, clip_high: ratios are clipped to `1 - clip_low` and `1 + clip_high` (DAPO's "clip-higher").
      dual_clip: bounds the loss of a token with negative advantage to this many times the advantage (Ye et
        al. 2020, arXiv 1912.09729, equation 5); None for no bound.

    >>> costs = surrogate(jnp.log(jnp.array([[2.0, 2.0]])), jnp.array([[1.0, -1.0]]), 0.2, 0.28)
    >>> [f"{cost:.2f}" for cost in costs[0]]
    ['-1.28', '2.00']
    """
    ratio = jnp.exp(log_ratio)
    kept = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    cost = -jnp.minimum(ratio * advantage, kept * advantage)
    if dual_clip is None:
        return cost
    return jnp.where(advantage < 0, jnp.minimum(cost, -dual_clip * advantage), cost)


def clipped(log_ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float) -> jax.Array:
    """True where clipping removes the gradient: `[N, R]` bool."""
    ratio = jnp.exp(log_ratio)
    return ((ratio < 1.0 - clip_low) & (advantage < 0)) | ((ratio > 1.0 + clip_high) & (advantage > 0))


def weighted(
    log_prob: jax.Array, log_ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float
) -> jax.Array:
    """REINFORCE with clipped importance weights, negated, of each token.

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): the weight is clipped to `1 - clip_low` and
    `1 + clip_high` and has no gradient, so every token keeps one. `log_prob` is the learner's.

    >>> cost = weighted(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[8.0]])), jnp.ones((1, 1)), 1.0, 4.0)
    >>> f"{cost[0, 0]:.3f}"  # -5 log(0.5)
    '3.466'
    """
    weight = jax.lax.stop_gradient(jnp.clip(jnp.exp(log_ratio), 1.0 - clip_low, 1.0 + clip_high))
    return -weight * advantage * log_prob


def gated(log_ratio: jax.Array, advantage: jax.Array, positive: float, negative: float) -> jax.Array:
    """A soft gate in place of clipping, negated, of each token.

    SAPO (arXiv 2511.20347): `4 / tau * sigmoid(tau * (ratio - 1)) * advantage`, whose slope at ratio 1 is the
    advantage. tau is `positive` where the advantage is above zero, else `negative`.

    >>> f"{gated(jnp.zeros((1, 1)), jnp.array([[3.0]]), 1.0, 1.05)[0, 0]:.1f}"
    '-6.0'
    """
    tau = jnp.where(advantage > 0, positive, negative)
    return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * advantage


def geometric_mean(
    log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array, clip_low: float, clip_high: float
) -> jax.Array:
    """Geometric mean of a response's clipped ratios times its advantage, negated, at each token.

    GMPO (arXiv 2507.20673, equation 4): token ratios are clipped to `exp(-clip_low)` and `exp(clip_high)`, on
    the side of the advantage's sign, as in PPO. If advantages differ by token, the mean is used.
    """
    length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32), 1)
    whole = jnp.sum(jnp.where(mask, advantage, 0.0), axis=1, keepdims=True) / length
    kept = jnp.clip(log_ratio, -clip_low, clip_high)
    least = jnp.where(whole > 0, jnp.minimum(log_ratio, kept), jnp.maximum(log_ratio, kept))
    mean = jnp.sum(jnp.where(mask, least, 0.0), axis=1, keepdims=True) / length
    return jnp.where(mask, -whole * jnp.exp(mean), 0.0)


def divergence(log_prob: jax.Array, reference_log_prob: jax.Array, estimator: Estimator) -> jax.Array:
    """KL of the policy from its reference, estimated at each token: `[N, R]` float32.

    With `d` the log-probability minus the reference's: `k1` is d, `k2` is d^2 / 2 and `k3` is exp(-d) - 1 + d
    (Schulman 2020, joschu.net/blog/kl-approx.html; `k3` is GRPO's, arXiv 2402.03300, equation 4). k1 and k3
    are unbiased values. In a loss, k2 has the gradient of the KL, and k1 none on average.

    A `d` within rounding (128 units in the last place of 1) counts as zero, so that k2 and k3 of a policy
    equal to its reference have no gradient: Adam would turn rounding errors into full steps.

    >>> now, reference = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
    >>> [f"{divergence(now, reference, kind)[0, 0]:.4f}" for kind in ("k1", "k2", "k3")]
    ['0.6931', '0.2402', '0.1931']
    """
    difference = log_prob - reference_log_prob
    rounding = _ROUNDING * jnp.finfo(difference.dtype).eps
    # Subtracted, not set to zero: the derivative of k1 is 1 there, too.
    nothing = jnp.where(jnp.abs(difference) <= rounding, difference, 0.0)
    difference = difference - jax.lax.stop_gradient(nothing)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    back = jnp.clip(-difference, -_LARGEST, _LARGEST)
    return jnp.exp(back) - 1.0 - back


@dataclasses.dataclass(frozen=True)
class TokenEntropy(Part):
    """Settings of the entropy bonus of tokens."""

    entropy_coefficient: float = hyperparameter(0.0, "weight of an entropy bonus")
    entropy_cap: float | None = hyperparameter(
        None,
        "entropy of a token in nats above which the bonus does not grow (None: no cap)",
        only_with="entropy_coefficient",
    )

    def check(self, algorithm: Any) -> None:
        """Refuses a negative weight, and a cap that is not positive."""
        require_not_negative(algorithm, "entropy_coefficient")
        cap = self.entropy_cap
        require(algorithm, cap is None or cap > 0, f"entropy_cap={cap}: it must be above zero, or None")

    def subtracted(self, loss: jax.Array, weight: jax.Array, entropy: jax.Array) -> jax.Array:
        """A loss minus the bonus of tokens with such weights and entropies, `[n, R]` float32 each."""
        if not is_traced(self.entropy_coefficient) and not self.entropy_coefficient:
            return loss
        bonus = entropy_bonus(entropy, self.entropy_cap)
        return loss - self.entropy_coefficient * jnp.sum(weight * bonus)


def entropy_bonus(entropy: jax.Array, cap: float | None) -> jax.Array:
    """The entropy of each token in nats, `[N, R]` float32, clipped to a cap, above which it has no gradient.

    While no response is right, only the bonus changes the policy; without a cap it makes all tokens equally
    likely, however small its weight. (He et al. 2025, arXiv 2505.22312, end a bonus at a target entropy.)

    >>> gradient = jax.grad(lambda x: entropy_bonus(x, 0.5).sum())
    >>> gradient(jnp.array([0.2, 0.8])).tolist()
    [1.0, 0.0]
    """
    return entropy if cap is None else jnp.minimum(entropy, cap)


def correction(
    sampled_log_prob: jax.Array, log_prob: jax.Array, mask: jax.Array, kind: Correction, cap: float
) -> jax.Array:
    """Importance weights for responses of another policy than the learner's, without gradient.

    The ratio of the learner's probability of a token (or response) to the actor's, both before top-k and
    top-p. `truncate_*` bounds it by `cap` (truncated importance sampling, Yao et al. 2025); `mask_*` drops
    ratios above `cap` or below its inverse; `decoupled` drops tokens above `cap` (decoupled PPO, Hilton et
    al. 2022; AReaL, arXiv 2505.24298, equation 5: `log_prob` is then the proximal policy's).

    >>> drawn, now = jnp.log(jnp.array([[0.1, 0.5]])), jnp.log(jnp.array([[0.4, 0.5]]))
    >>> [f"{w:.2f}" for w in correction(drawn, now, jnp.ones((1, 2), bool), "truncate_token", 2.0)[0]]
    ['2.00', '1.00']
    >>> [f"{w:.2f}" for w in correction(drawn, now, jnp.ones((1, 2), bool), "mask_token", 2.0)[0]]
    ['0.00', '1.00']
    """
    if kind == "none":
        return jnp.ones_like(log_prob)
    level: RatioLevel = "trajectory" if kind.endswith("sequence") else "token"
    weight = jnp.exp(log_ratio(log_prob, sampled_log_prob, mask, level))
    if kind == "decoupled":
        weight = jnp.where(weight <= cap, weight, 0.0)
    elif kind.startswith("truncate"):
        weight = jnp.minimum(weight, cap)
    else:
        weight = jnp.where((weight <= cap) & (weight >= 1.0 / cap), weight, 0.0)
    return jax.lax.stop_gradient(weight)


def interpolated(sampled_log_prob: jax.Array, log_prob: jax.Array, age: jax.Array) -> jax.Array:
    """Log-probabilities of a proximal policy by interpolation, without gradient.

    A fraction `age / (age + 1)` of the way from the policy that sampled a token, `age [N, R]` int32 updates
    before this one, to the current policy: the previous policy, if all updates were equally large (A-3PO,
    arXiv 2512.06547).

    >>> drawn, now = jnp.array([[-3.0, -3.0]]), jnp.array([[-1.0, -1.0]])
    >>> interpolated(drawn, now, jnp.array([[0, 1]])).tolist()
    [[-3.0, -2.0]]
    """
    share = age / (age + 1.0)
    return jax.lax.stop_gradient(sampled_log_prob + share * (log_prob - sampled_log_prob))


def value_error(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float | None) -> jax.Array:
    """Half the squared error of each token's value, `[N, R]`, with clipping to within `clip`.

    >>> one = jnp.ones((1, 1))
    >>> float(value_error(one, 0.0 * one, 2.0 * one, clip=0.5)[0, 0])  # 0.5 * (2 - 0.5)^2
    1.125
    """
    error = jnp.square(value - target)
    if clip is not None:
        kept = old_value + jnp.clip(value - old_value, -clip, clip)
        error = jnp.maximum(error, jnp.square(kept - target))
    return 0.5 * error


def preference_loss(
    margin: jax.Array, beta: float, kind: Preference = "sigmoid", label_smoothing: float = 0.0
) -> jax.Array:
    """The loss of each pair: `[N]` float32.

    Args:
      margin: `[N]` float32, log-probability of the chosen response over the reference's, less that of the
        rejected one; for `ipo` means over tokens, else sums.
      beta: the weight of the reference.
      kind: `sigmoid` (DPO, arXiv 2305.18290, equation 7), `hinge` (SLiC, arXiv 2305.10425), `ipo` (arXiv
        2310.12036, equation 17, beta its tau), or `robust` to wrong labels (arXiv 2403.00409).
      label_smoothing: for `sigmoid` and `robust`: the fraction of wrong labels, below a half.

    >>> [f"{x:.4f}" for x in preference_loss(jnp.array([0.0, 10.0]), beta=0.1)]
    ['0.6931', '0.3133']
    """
    if kind == "hinge":
        return jax.nn.relu(1.0 - beta * margin)
    if kind == "ipo":
        return jnp.square(margin - 1.0 / (2.0 * beta))
    right, wrong = -jax.nn.log_sigmoid(beta * margin), -jax.nn.log_sigmoid(-beta * margin)
    if kind == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * wrong
