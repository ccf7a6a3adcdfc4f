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
from fdg.settings.fields import hyperparameter
from fdg.settings.parts import Part

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

    baseline: Baseline = hyperparameter("group", "what a reward is compared with")
    scale: Scale = hyperparameter("group", "what an advantage is divided by")
    guard: float = hyperparameter(1e-6, "added to a deviation")
    unbiased_deviation: bool = True  # deviations are over n - 1
    ratio_level: RatioLevel = hyperparameter("token", "of what ratios are")
    surrogate: Surrogate = hyperparameter("clip", "what a token costs by its ratio and advantage")
    aggregation: Aggregation = hyperparameter("sequence_mean", "how tokens make a loss")
    count_empty: bool = True  # responses without tokens count in means
    clip_low: float = hyperparameter(0.2, "ratios count down to 1 less this")
    clip_high: float = hyperparameter(0.2, "ratios count up to 1 and this")
    gate_positive: float = hyperparameter(1.0, "steepness of a gate where advantages are above zero")
    gate_negative: float = hyperparameter(1.05, "steepness of a gate where advantages are below zero")
    dual_clip: float | None = hyperparameter(None, "most that a token of negative advantage costs, times it")
    kl_coefficient: float = hyperparameter(0.04, "beta: how strongly the reference holds; 0: there is none")
    kl_estimator: Estimator = hyperparameter("k3", "how KL is estimated")
    kl_in: Penalised = hyperparameter("loss", "where KL is counted")
    overlong_buffer: float = hyperparameter(0.0, "share of the longest response over which a penalty grows")
    overlong_coefficient: float = 1.0  # the full penalty
    mask_truncated: bool = hyperparameter(False, "responses without an end have no loss")
    dynamic_sampling: int = hyperparameter(
        0,
        "times as many prompts are responded to, and those kept that teach; 0: take what comes",
    )
    correction: Correction = hyperparameter("none", "importance weights of actor against learner")
    correction_cap: float = hyperparameter(2.0, "their bound")

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
