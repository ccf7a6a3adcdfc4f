"""Terms of losses that only some settings use: surrogates, importance weights, entropy, values, pairs.

Pure functions of log-probabilities, masks and advantages. Shapes are those of `algos/rlhf/objective.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from algos.rlhf.objective import Correction, Preference, RatioLevel, log_ratio
from fdg.settings.fields import hyperparameter, is_traced, require, require_not_negative
from fdg.settings.moved import moved
from fdg.settings.parts import Part

__getattr__ = moved(
    __name__,
    "algos.rlhf.objective",
    {name: name for name in ("clipped", "divergence", "masked_mean", "surrogate", "token_weights")},
)


def cost(
    objective: Any, log_prob: jax.Array, log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array
) -> jax.Array:
    """`Objective.cost` for surrogates other than "clip", which is PPO's."""
    low, high = objective.clip_low, objective.clip_high
    match objective.surrogate:
        case "weight":
            return weighted_loss(log_prob, log_ratio, advantage, low, high)
        case "gate":
            return gated_loss(log_ratio, advantage, objective.gate_positive, objective.gate_negative)
    return geometric_mean_loss(log_ratio, advantage, mask, low, high)


def clipped_tokens(objective: Any, log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """`Objective.clipped` for the surrogates "gate" and "geometric_mean"."""
    if objective.surrogate == "gate":
        return jnp.zeros(log_ratio.shape, bool)
    below, above = log_ratio < -objective.clip_low, log_ratio > objective.clip_high
    return (below & (advantage < 0)) | (above & (advantage > 0))


def weighted_loss(
    log_prob: jax.Array, log_ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float
) -> jax.Array:
    """The loss of each token of REINFORCE with clipped importance weights.

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): the weight is clipped to `1 - clip_low` and
    `1 + clip_high` and has no gradient, so no token loses its gradient. `log_prob` is the learner's.
    """
    weight = jax.lax.stop_gradient(jnp.clip(jnp.exp(log_ratio), 1.0 - clip_low, 1.0 + clip_high))
    return -weight * advantage * log_prob


def gated_loss(log_ratio: jax.Array, advantage: jax.Array, positive: float, negative: float) -> jax.Array:
    """The loss of each token with a soft gate in place of clipping.

    SAPO (arXiv 2511.20347): `-4 / tau * sigmoid(tau * (ratio - 1)) * advantage`, whose slope at ratio 1 is
    minus the advantage. tau is `positive` where the advantage is above zero, else `negative`.
    """
    tau = jnp.where(advantage > 0, positive, negative)
    return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * advantage


def geometric_mean_loss(
    log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array, clip_low: float, clip_high: float
) -> jax.Array:
    """Minus the geometric mean of a response's clipped ratios times its advantage, at each of its tokens.

    GMPO (arXiv 2507.20673, equation 4): token ratios are clipped to `exp(-clip_low)` and `exp(clip_high)`, on
    the side of the advantage's sign, as in PPO. If the advantages of a response's tokens differ, their mean
    is used.
    """
    length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32), 1)
    mean_advantage = jnp.sum(jnp.where(mask, advantage, 0.0), axis=1, keepdims=True) / length
    clipped = jnp.clip(log_ratio, -clip_low, clip_high)
    pessimistic = jnp.where(
        mean_advantage > 0, jnp.minimum(log_ratio, clipped), jnp.maximum(log_ratio, clipped)
    )
    mean = jnp.sum(jnp.where(mask, pessimistic, 0.0), axis=1, keepdims=True) / length
    return jnp.where(mask, -mean_advantage * jnp.exp(mean), 0.0)


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

    def subtract_bonus(self, loss: jax.Array, weight: jax.Array, entropy: jax.Array) -> jax.Array:
        """A loss minus the entropy bonus; `weight` and `entropy` of tokens are `[n, R]` float32."""
        if not is_traced(self.entropy_coefficient) and not self.entropy_coefficient:
            return loss
        bonus = entropy_bonus(entropy, self.entropy_cap)
        return loss - self.entropy_coefficient * jnp.sum(weight * bonus)


def entropy_bonus(entropy: jax.Array, cap: float | None) -> jax.Array:
    """The entropy of each token in nats, `[N, R]` float32, clipped to a cap, above which it has no gradient.

    While no response is right, only the bonus changes the policy; without a cap it makes all tokens equally
    likely, however small its weight. (He et al. 2025, arXiv 2505.22312, end a bonus at a target entropy.)
    """
    return entropy if cap is None else jnp.minimum(entropy, cap)


def correction(
    sampled_log_prob: jax.Array, log_prob: jax.Array, mask: jax.Array, kind: Correction, cap: float
) -> jax.Array:
    """Importance weights for responses of another policy than the learner's, without gradient.

    A weight is the ratio of the learner's probability of a token (or response) to the actor's, both before
    top-k and top-p. `truncate_*` bounds it by `cap` (truncated importance sampling, Yao et al. 2025).
    `mask_*` sets weights above `cap` or below its inverse to zero. `decoupled` sets weights above `cap` to
    zero (decoupled PPO, Hilton et al. 2022; AReaL, arXiv 2505.24298, equation 5); `log_prob` is then that of
    the proximal policy.
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


def interpolate(sampled_log_prob: jax.Array, log_prob: jax.Array, age: jax.Array) -> jax.Array:
    """Log-probabilities of a proximal policy by interpolation, without gradient.

    A token was sampled `age [N, R]` int32 iterations ago. The proximal policy is a fraction `age / (age + 1)`
    of the way from the policy at sampling to the current one. If all iterations change the policy equally,
    this is the policy before the current iteration (A-3PO, arXiv 2512.06547).
    """
    share = age / (age + 1.0)
    return jax.lax.stop_gradient(sampled_log_prob + share * (log_prob - sampled_log_prob))


def value_error(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float | None) -> jax.Array:
    """Half the squared error of each token's value, `[N, R]`.

    The error is the larger of two: of the value, and of the value clipped to within `clip` of the old value.
    With `clip=None` values are not clipped.
    """
    error = jnp.square(value - target)
    if clip is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip, clip)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error


def preference_loss(
    margin: jax.Array, beta: float, kind: Preference = "sigmoid", label_smoothing: float = 0.0
) -> jax.Array:
    """The loss of each pair: `[N]` float32.

    Args:
      margin: `[N]` float32, the log-ratio of policy to reference of the chosen response minus that of the
        rejected one; a log-ratio is a mean over tokens for `ipo`, else a sum.
      beta: the weight of the reference.
      kind: `sigmoid` (DPO, arXiv 2305.18290, equation 7), `hinge` (SLiC, arXiv 2305.10425), `ipo` (arXiv
        2310.12036, equation 17, beta its tau), or `robust` to wrong labels (arXiv 2403.00409).
      label_smoothing: for `sigmoid` and `robust`: the fraction of wrong labels, below a half.
    """
    if kind == "hinge":
        return jax.nn.relu(1.0 - beta * margin)
    if kind == "ipo":
        return jnp.square(margin - 1.0 / (2.0 * beta))
    right, wrong = -jax.nn.log_sigmoid(beta * margin), -jax.nn.log_sigmoid(-beta * margin)
    if kind == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * wrong
