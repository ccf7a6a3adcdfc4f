"""The objectives of group-relative algorithms, by paper and library.

An `Objective` has three layers, later ones taking precedence: a variant (a paper), a convention (a library's
choices where papers leave room, or differ), and explicit values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from algos.rlhf import losses
from algos.rlhf.advantages import (
    Baseline,
    Scale,
    group_advantage,
    overlong_penalty,
    still_to_come,
    whiten,
)
from algos.rlhf.losses import Aggregation, Correction, Estimator, RatioLevel, Surrogate, divergence
from fdg.errors import FdgError, nearest

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

    Attributes:
      baseline: subtracted from a response's reward: the `group` mean, the `leave_one_out` mean, or `none`.
      scale: divides the difference: the standard deviation within the `group` or the `batch`; `tokens`:
        standardises by mean and deviation of all tokens' advantages; `none`.
      guard: added to the deviation.
      unbiased_deviation: whether the deviation is over `n - 1`.
      ratio_level: the level of probability ratios: see `losses.log_ratio`.
      surrogate: the loss of a token by its ratio and advantage: `clip` (`losses.surrogate`), `weight`
        (`losses.weighted`), `gate` (`losses.gated`) or `geometric_mean` (`losses.geometric_mean`).
      aggregation: of tokens to a loss: see `losses.token_weights`.
      count_empty: whether responses without tokens count in means.
      clip_low, clip_high: bounds of ratios below and above one; for `geometric_mean`, of their logarithms.
      gate_positive, gate_negative: tau of a `gate`, by the sign of the advantage.
      dual_clip: bound on the loss of a token with negative advantage, in multiples of its advantage; None for
        none.
      kl_coefficient: beta, the weight of the KL to the reference; 0 for no reference.
      kl_estimator: k1, k2 or k3.
      kl_in: where it counts: in the `loss` of each token; in the `reward` of a response, summed; or in that
        of each token, summed over later tokens (`reward_to_go`). In rewards it has no gradient.
      overlong_buffer: share of the longest response over which a length penalty grows; 0 for none.
      overlong_coefficient: the full penalty.
      mask_truncated: whether truncated responses have no loss.
      dynamic_sampling: the factor of additional prompts, from which those with differing rewards are
        preferred; tokens of others do not count. 0: no additional prompts.
      correction: importance weights for the difference between the acting and the learning policy.
      correction_cap: the bound of these weights.
    """

    baseline: Baseline = "group"
    scale: Scale = "group"
    guard: float = 1e-6
    unbiased_deviation: bool = True
    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    aggregation: Aggregation = "sequence_mean"
    count_empty: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    dual_clip: float | None = None
    kl_coefficient: float = 0.04
    kl_estimator: Estimator = "k3"
    kl_in: Penalised = "loss"
    overlong_buffer: float = 0.0
    overlong_coefficient: float = 1.0
    mask_truncated: bool = False
    dynamic_sampling: int = 0
    correction: Correction = "none"
    correction_cap: float = 2.0

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
        """Where a ratio is out of range on the side of its advantage: `[N, R]` bool."""
        match self.surrogate:
            case "gate":
                return jax.numpy.zeros(log_ratio.shape, bool)
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

        Args:
          reward: `[N]` float32.
          log_prob, reference_log_prob: `[N, R]` float32, of the acting policy and the reference; used if the
            KL is in rewards.
          mask: `[N, R]` bool.
          group: responses to each prompt.
          given: `[N]` bool, which responses have a reward; None: all.
        """
        penalty = None
        if self.kl_coefficient and self.kl_in != "loss":
            kl = divergence(log_prob, reference_log_prob, self.kl_estimator)
            penalty = self.kl_coefficient * jax.numpy.where(mask, kl, 0.0)
        if penalty is not None and self.kl_in == "reward":
            reward = reward - penalty.sum(axis=1)
        whole = group_advantage(
            reward, group, self.baseline, self.scale, self.guard, self.unbiased_deviation, given
        )
        advantage = jax.numpy.where(mask, whole[:, None], 0.0)
        if penalty is not None and self.kl_in == "reward_to_go":
            advantage = advantage - still_to_come(penalty, mask)
        if self.scale == "tokens":
            advantage = whiten(advantage, mask)
        return jax.lax.stop_gradient(advantage)


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
    # MiniMax-M1 2025, arXiv 2506.13585, equations 4 and 5: no lower bound. The upper one is not stated: 5 is
    # that of Khatri et al. 2025, arXiv 2510.13786.
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
    # The same with the mean of the group, for rewards that are right or wrong; its KL is in the loss, as k2.
    "reinforce_plus_plus_baseline": {
        "baseline": "group",
        "scale": "tokens",
        "aggregation": "token_mean",
        "kl_coefficient": 0.01,
        "kl_estimator": "k2",
    },
}

# Read off trl 1.16.0, verl 0.8 and google-tunix 0.1.7: what each does where a user says nothing.
CONVENTIONS: dict[str, Mapping[str, Any]] = {
    "paper": {},
    "trl": {"guard": 1e-4},
    "verl": {"count_empty": False, "dual_clip": 3.0},
    "tunix": {"count_empty": False, "kl_estimator": "k1"},
}
# What of these a variant has for a reason of its own.
_OWN = {"rloo": ("kl_estimator",)} | dict.fromkeys(
    ("reinforce_plus_plus", "reinforce_plus_plus_baseline"), ("kl_estimator",)
)


def objective(variant: Variant = "grpo", convention: Convention = "paper", **values: Any) -> Objective:
    """The objective of a variant with a library's convention and explicit values.

    Raises:
      FdgError: there is no such variant, convention or value; suggests the nearest.

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


GRPO = objective("grpo")
DR_GRPO = objective("dr_grpo")
DAPO = objective("dapo")
GSPO = objective("gspo")
GMPO = objective("gmpo")
CISPO = objective("cispo")
SAPO = objective("sapo")
RLOO = objective("rloo")
REINFORCE_PLUS_PLUS = objective("reinforce_plus_plus")
REINFORCE_PLUS_PLUS_BASELINE = objective("reinforce_plus_plus_baseline")
