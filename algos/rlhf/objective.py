"""The objectives of group-relative algorithms, by paper and library.

An `Objective` has three layers, later ones taking precedence: a variant (a paper), a convention (a library's
choices where papers leave room, or differ), and explicit values.

Shapes: `N` responses, contiguous for each prompt (a group of `G`); `R` tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from algos.rlhf import losses
from algos.rlhf.losses import (
    Aggregation,
    Correction,
    Estimator,
    RatioLevel,
    Surrogate,
    divergence,
    masked_mean,
)
from fdg.errors import FdgError, nearest
from fdg.settings.fields import hyperparameter
from fdg.settings.parts import Part

Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "tokens", "none"]
Penalised = Literal["loss", "reward", "reward_to_go"]
Variant = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]
Convention = Literal["paper", "trl", "verl", "tunix"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """An objective; by default as in GRPO's paper (arXiv 2402.03300, equations 3 and 4).

    Fields with a help text are those of `GRPO`; the others belong to variants and conventions alone.
    `scale="tokens"` standardises the advantages of all tokens; `kl_in="reward"` and `"reward_to_go"` subtract
    the KL from a response's reward, or from each token's, without gradient.
    """

    baseline: Baseline = hyperparameter("group", "baseline that rewards are compared with")
    scale: Scale = hyperparameter("group", "divisor of advantages")
    guard: float = hyperparameter(1e-6, "added to the deviation")
    unbiased_deviation: bool = True  # deviations are over n - 1
    ratio_level: RatioLevel = hyperparameter("token", "level of ratios: token or sequence")
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
    kl_coefficient: float = hyperparameter(0.04, "beta: weight of the KL to the reference; 0: no reference")
    kl_estimator: Estimator = hyperparameter("k3", "estimator of the KL")
    kl_in: Penalised = hyperparameter("loss", "KL as a loss term, or in the reward")
    overlong_buffer: float = hyperparameter(
        0.0, "share of the longest response, at its end, over which a length penalty grows"
    )
    overlong_coefficient: float = 1.0  # the full penalty
    mask_truncated: bool = hyperparameter(False, "leave truncated responses out of the loss")
    dynamic_sampling: int = hyperparameter(
        0,
        "factor of prompts to sample for, to keep those whose rewards differ; 0: keep all prompts",
    )
    correction: Correction = hyperparameter("none", "importance weights of actor against learner")
    correction_cap: float = hyperparameter(2.0, "upper bound of these weights")

    def cost(
        self, log_prob: jax.Array, log_ratio: jax.Array, advantage: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """The loss of each token by the `surrogate`: `[N, R]` float32."""
        low, high = self.clip_low, self.clip_high
        match self.surrogate:
            case "weight":
                return losses.weighted(log_prob, log_ratio, advantage, low, high)
            case "gate":
                return losses.gated(log_ratio, advantage, self.gate_positive, self.gate_negative)
            case "geometric_mean":
                return losses.geometric_mean(log_ratio, advantage, mask, low, high)
        return losses.surrogate(log_ratio, advantage, low, high, self.dual_clip)

    def clipped(self, log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
        """True where a ratio is clipped on the side of its advantage: `[N, R]` bool."""
        match self.surrogate:
            case "gate":
                return jnp.zeros(log_ratio.shape, bool)
            case "geometric_mean":
                below, above = log_ratio < -self.clip_low, log_ratio > self.clip_high
                return (below & (advantage < 0)) | (above & (advantage > 0))
        return losses.clipped(log_ratio, advantage, self.clip_low, self.clip_high)

    def reward(self, reward: jax.Array, lengths: jax.Array, longest: int) -> jax.Array:
        """Rewards `[N]` with the length penalty for `lengths [N]`."""
        buffer = round(self.overlong_buffer * longest)
        return reward + self.overlong_coefficient * overlong_penalty(lengths, longest, buffer)

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

        `reward [N]` float32; `log_prob` and `reference_log_prob [N, R]` float32 are of the acting policy and
        the reference, used if the KL is in rewards; `mask [N, R]` bool; `given [N]` bool, which responses
        have a reward (None: all).
        """
        penalty = None
        if self.kl_coefficient and self.kl_in != "loss":
            kl = divergence(log_prob, reference_log_prob, self.kl_estimator)
            penalty = self.kl_coefficient * jnp.where(mask, kl, 0.0)
        if penalty is not None and self.kl_in == "reward":
            reward = reward - penalty.sum(axis=1)
        whole = group_advantage(
            reward, group, self.baseline, self.scale, self.guard, self.unbiased_deviation, given
        )
        advantage = jnp.where(mask, whole[:, None], 0.0)
        if penalty is not None and self.kl_in == "reward_to_go":
            advantage = advantage - reversed_cumsum(penalty, mask)
        if self.scale == "tokens":
            advantage = whiten(advantage, mask)
        return jax.lax.stop_gradient(advantage)


def _choices() -> Any:
    """A part with the fields of `Objective` that have a help text, each None by default."""
    fields = []
    for field in dataclasses.fields(Objective):
        if help_text := field.metadata.get("help"):
            whose = "convention" if field.name in ("guard", "dual_clip") else "variant"
            kind: Any = field.type
            fields.append(
                (field.name, kind | None, hyperparameter(None, f"{help_text} (None: the {whose}'s)"))
            )
    return dataclasses.make_dataclass("ObjectiveChoices", fields, bases=(Part,), frozen=True)


ObjectiveChoices = _choices()

VARIANTS: dict[str, Mapping[str, Any]] = {
    # Shao et al. 2024, arXiv 2402.03300, equations 3 and 4.
    "grpo": {},
    # Liu et al. 2025, arXiv 2503.20783: neither lengths nor deviations divide; no reference.
    "dr_grpo": {"scale": "none", "aggregation": "constant", "kl_coefficient": 0.0},
    # Yu et al. 2025, arXiv 2503.14476, equations 8 to 13.
    "dapo": {
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "kl_coefficient": 0.0,
        "overlong_buffer": 0.2,
        "dynamic_sampling": 2,
    },
    # Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7; the range of its section 5.1.
    "gspo": {
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "kl_coefficient": 0.0,
    },
    # Zhao et al. 2025, arXiv 2507.20673, equation 4; its range is exp(-0.4) to exp(0.4).
    "gmpo": {
        "surrogate": "geometric_mean",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "kl_coefficient": 0.0,
    },
    # MiniMax-M1 2025, arXiv 2506.13585, equations 4 and 5: no lower bound. The upper one is not stated; 5 is
    # from Khatri et al. 2025, arXiv 2510.13786.
    "cispo": {
        "surrogate": "weight",
        "aggregation": "token_mean",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "kl_coefficient": 0.0,
    },
    # Gao et al. 2025, arXiv 2511.20347.
    "sapo": {"surrogate": "gate", "kl_coefficient": 0.0},
    # Ahmadian et al. 2024, arXiv 2402.14740, equations 2, 3 and 7: whole responses are the actions.
    "rloo": {
        "baseline": "leave_one_out",
        "scale": "none",
        "ratio_level": "trajectory",
        "kl_coefficient": 0.05,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # Hu et al. 2025, arXiv 2501.03262: PPO without a critic, advantages normalised over the whole batch.
    "reinforce_plus_plus": {
        "baseline": "none",
        "scale": "tokens",
        "aggregation": "token_mean",
        "kl_coefficient": 0.01,
        "kl_estimator": "k1",
        "kl_in": "reward_to_go",
    },
    # Likewise with the group's mean, for binary rewards; its KL is in the loss, as k2.
    "reinforce_plus_plus_baseline": {
        "baseline": "group",
        "scale": "tokens",
        "aggregation": "token_mean",
        "kl_coefficient": 0.01,
        "kl_estimator": "k2",
    },
}

# Defaults of trl 1.16.0, verl 0.8 and google-tunix 0.1.7.
CONVENTIONS: dict[str, Mapping[str, Any]] = {
    "paper": {},
    "trl": {"guard": 1e-4},
    "verl": {"count_empty": False, "dual_clip": 3.0},
    "tunix": {"count_empty": False, "kl_estimator": "k1"},
}
# Settings that define a variant, and that conventions do not change.
_OWN = {"rloo": ("kl_estimator",)} | dict.fromkeys(
    ("reinforce_plus_plus", "reinforce_plus_plus_baseline"), ("kl_estimator",)
)


def objective(variant: Variant = "grpo", convention: Convention = "paper", **values: Any) -> Objective:
    """The objective of a variant with a library's convention and explicit values.

    >>> objective("dapo").clip_high, objective("dapo", clip_high=0.3).clip_high
    (0.28, 0.3)
    >>> objective("grpo", "trl").guard, objective("grpo", "tunix").kl_estimator
    (0.0001, 'k1')
    """
    if variant not in VARIANTS:
        raise FdgError(f"variant={variant!r}: it is one of {', '.join(VARIANTS)}")
    if convention not in CONVENTIONS:
        raise FdgError(f"convention={convention!r}: it is one of {', '.join(CONVENTIONS)}")
    fields = [field.name for field in dataclasses.fields(Objective)]
    for name in values:
        if name not in fields:
            near = nearest(name, fields, 1)
            hint = f": did you mean {near[0]!r}?" if near else f": there are {', '.join(fields)}"
            raise FdgError(f"an objective has no value {name!r}{hint}")
    own = VARIANTS[variant]
    habits = {
        name: value for name, value in CONVENTIONS[convention].items() if name not in _OWN.get(variant, ())
    }
    return Objective(**{**own, **habits, **values})


# --- advantages ---


def overlong_penalty(lengths: jax.Array, longest: int, buffer: int) -> jax.Array:
    """DAPO's soft penalty of long responses (arXiv 2503.14476, equation 13): `[N]` float32, from 0 to -1.

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
      guard, unbiased: a number added to the deviation; True for a deviation over `n - 1`.
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
    """`x` minus its mean over an axis, or over all: exactly zero if all are equal, or not `there`."""
    largest = jnp.max(x, axis, keepdims=True, where=there, initial=-jnp.inf)
    smallest = jnp.min(x, axis, keepdims=True, where=there, initial=jnp.inf)
    count = jnp.maximum(jnp.sum(there, axis, keepdims=True, dtype=x.dtype), 1)
    mean = jnp.sum(jnp.where(there, x, 0.0), axis, keepdims=True) / count
    return jnp.where(there & (largest > smallest), x - mean, 0.0)


def _deviation(x: jax.Array, there: jax.Array, axis: int | None, unbiased: bool) -> jax.Array:
    """The standard deviation over an axis, kept as size 1, or over all; exactly zero if all are equal."""
    count = jnp.sum(there, axis, keepdims=True, dtype=x.dtype)
    squares = jnp.sum(jnp.square(_centred(x, there, axis)), axis, keepdims=True)
    return jnp.sqrt(squares / jnp.maximum(count - unbiased, 1))


def informative(reward: jax.Array, group: int, given: jax.Array | None = None) -> jax.Array:
    """True where responses to a prompt differ in reward, `[N / G]` bool: others have no gradient (DAPO, eq.
    11).

    >>> informative(jnp.array([1.0, 0.0, 1.0, 1.0]), 2).tolist()
    [True, False]
    """
    there = jnp.ones(reward.shape, bool) if given is None else given
    highest = jnp.where(there, reward, -jnp.inf).reshape(-1, group).max(axis=1)
    return highest > jnp.where(there, reward, jnp.inf).reshape(-1, group).min(axis=1)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean zero and variance one (over `n - 1`) of `x [N, R]` over the tokens of the mask; zero elsewhere.

    If all of them are equal, the result is exactly zero.

    >>> whiten(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])).round(3).tolist()
    [[-0.707..., 0.707..., 0.0]]
    """
    count = jnp.sum(mask, dtype=jnp.float32)
    equal = jnp.max(x, where=mask, initial=-jnp.inf) == jnp.min(x, where=mask, initial=jnp.inf)
    centred = jnp.where(mask & ~equal, x - masked_mean(x, mask), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def reversed_cumsum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Reversed cumulative sum of `x [N, R]` over the mask.

    >>> reversed_cumsum(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[True, True, False]])).tolist()
    [[3.0, 2.0, 0.0]]
    """
    return jnp.flip(jnp.cumsum(jnp.flip(jnp.where(mask, x, 0.0), 1), axis=1), 1)


def reward_at_end(reward: jax.Array, mask: jax.Array) -> jax.Array:
    """Rewards `[N]` at the last masked token of each response: `[N, R]` float32.

    >>> reward_at_end(jnp.array([5.0]), jnp.array([[True, True, False]])).tolist()
    [[0.0, 5.0, 0.0]]
    """
    last = mask & (reversed_cumsum(mask.astype(jnp.float32), mask) == 1)
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
