"""Variants (papers) of group-relative training, conventions of libraries, and rewards and advantages.

An objective has three layers, of which later ones take precedence: a variant (a paper), a convention (a
library's choices where papers leave room, or differ), and explicit values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from algos.rlhf.objective import Objective, masked_mean
from fdg.errors import FdgError, nearest
from fdg.settings.fields import hyperparameter, require, require_within
from fdg.settings.parts import Part

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

# The fields of `Objective` that each variant changes.
VARIANTS: dict[str, Mapping[str, Any]] = {
    # Shao et al. 2024, arXiv 2402.03300, equations 3 and 4.
    "grpo": {},
    # Liu et al. 2025, arXiv 2503.20783: no division by lengths or deviations, and no reference.
    "dr_grpo": {"scale": "none", "aggregation": "constant", "kl_coefficient": 0.0},
    # Yu et al. 2025, arXiv 2503.14476, equations 8 to 13.
    "dapo": {
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "kl_coefficient": 0.0,
        "overlong_buffer": 0.2,
        "dynamic_sampling": 2,
    },
    # Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7, with the clip range of its section 5.1.
    "gspo": {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coefficient": 0.0},
    # Zhao et al. 2025, arXiv 2507.20673, equation 4; its range is exp(-0.4) to exp(0.4).
    "gmpo": {"surrogate": "geometric_mean", "clip_low": 0.4, "clip_high": 0.4, "kl_coefficient": 0.0},
    # MiniMax-M1 2025, arXiv 2506.13585, equations 4 and 5: no lower bound. The paper does not state the upper
    # bound; 5 is from Khatri et al. 2025, arXiv 2510.13786.
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
    # REINFORCE++ with the group's mean as baseline, for binary rewards; the KL is in the loss, as k2.
    "reinforce_plus_plus_baseline": {
        "baseline": "group",
        "scale": "tokens",
        "aggregation": "token_mean",
        "kl_coefficient": 0.01,
        "kl_estimator": "k2",
    },
}

# The fields that each convention changes: defaults of trl 1.16.0, verl 0.8 and google-tunix 0.1.7.
CONVENTIONS: dict[str, Mapping[str, Any]] = {
    "paper": {},
    "trl": {"guard": 1e-4},
    "verl": {"count_empty": False, "dual_clip": 3.0},
    "tunix": {"count_empty": False, "kl_estimator": "k1"},
}
# Settings that define a variant, so that conventions do not change them.
_FIXED_BY_VARIANT = {"rloo": ("kl_estimator",)} | dict.fromkeys(
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
    settings = VARIANTS[variant]
    convention_values = {
        name: value
        for name, value in CONVENTIONS[convention].items()
        if name not in _FIXED_BY_VARIANT.get(variant, ())
    }
    return Objective(**{**settings, **convention_values, **values})


# A part with the fields of `Objective` that have a help text, each None by default.
ObjectiveChoices: Any = dataclasses.make_dataclass(
    "ObjectiveChoices",
    [
        (
            field.name,
            cast(Any, field.type) | None,
            hyperparameter(None, f"{text} (None: the {whose}'s)", field.metadata.get("structural")),
        )
        for field in dataclasses.fields(Objective)
        if (text := field.metadata.get("help"))
        for whose in ("convention" if field.name in ("guard", "dual_clip") else "variant",)
    ],
    bases=(Part,),
    frozen=True,
)


@dataclasses.dataclass(frozen=True)
class Family(Part):
    """The variant and the convention of an objective, before explicit values."""

    variant: Variant = hyperparameter("grpo", "algorithm of the family")
    convention: Convention = hyperparameter("paper", "implementation to follow where papers leave a choice")

    def objective(self, choices: Any) -> Objective:
        """The objective with the `ObjectiveChoices` that are not None."""
        values = {name: x for name, x in vars(choices).items() if x is not None}
        return objective(self.variant, self.convention, **values)

    @staticmethod
    def variant_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values that the variant named in the fields `values` sets; empty if they name no variant."""
        return VARIANTS.get(str(values.get("variant")), {})

    @classmethod
    def oversampling_factor(cls, values: Mapping[str, Any]) -> int:
        """The oversampling factor of dynamic sampling, from the fields `values`, or else their variant."""
        times = values.get("dynamic_sampling")
        times = cls.variant_values(values).get("dynamic_sampling", 0) if times is None else times
        return max(1, times) if isinstance(times, int) else 1


def check(algorithm: Any) -> None:
    """Refuses fields of GRPO, and values of its objective, that are out of range or do not fit together."""
    objective, group, size = algorithm.objective, algorithm.group_size, algorithm.dataset_size
    bound, cap, times = objective.dual_clip, objective.correction_cap, objective.dynamic_sampling
    compares = objective.baseline != "none" or objective.scale == "group" or times > 0
    over_actor, clips = algorithm.old_log_prob == "actor", objective.surrogate == "clip"
    rules: list[tuple[Any, str]] = [
        (group >= 1, f"group_size={group}: it must be at least 1"),
        (
            group >= 2 or not compares,
            f"group_size={group}: responses are compared with each other, so it is at least 2",
        ),
        *(
            (value >= 0, f"{name}={value}: it must be 0 or more")
            for name in ("clip_low", "clip_high", "kl_coefficient", "guard")
            for value in (getattr(objective, name),)
        ),
        (cap >= 1, f"correction_cap={cap}: it must be one or above"),
        (times >= 0, f"dynamic_sampling={times}: it must be 0 or more"),
        (bound is None or bound > 1, f"dual_clip={bound}: it must be above one"),
        *(
            (value > 0, f"{name}={value}: it must be above zero")
            for name in ("gate_positive", "gate_negative")
            for value in (getattr(objective, name),)
        ),
        (
            objective.surrogate != "geometric_mean" or objective.ratio_level == "token",
            f"ratio_level={objective.ratio_level!r}: a geometric mean is over ratios of tokens: use 'token'",
        ),
        (
            algorithm.dual_clip is None or clips,
            f"dual_clip={bound} has no effect with surrogate={objective.surrogate!r}: leave it out",
        ),
        (
            not (objective.correction == "decoupled" and over_actor),
            "correction='decoupled' clips ratios over the learner's own policy: use old_log_prob='learner'",
        ),
        (
            algorithm.proximal == "recompute" or (not over_actor and objective.kl_in == "loss"),
            "proximal='interpolate' stands for the learner's own log-probabilities: use"
            " old_log_prob='learner', and kl_in='loss'",
        ),
        (
            size is None or size >= algorithm._candidates,
            f"dataset_size={size} is less than the {algorithm._candidates} prompts that an iteration draws",
        ),
    ]
    require_within(objective, 0, 1, "overlong_buffer")
    for holds, message in rules:
        require(algorithm, holds, message)


# --- rewards and advantages ---


def overlong_penalty(lengths: jax.Array, longest: int, buffer: int) -> jax.Array:
    """DAPO's soft penalty of long responses (arXiv 2503.14476, equation 13): `[N]` float32, from 0 to -1.

    It grows over the last `buffer` of `longest` tokens; a `buffer` of 0 means no penalty. `lengths` is `[N]`
    int32.
    """
    if not buffer:
        return jnp.zeros(lengths.shape, jnp.float32)
    return jnp.clip((longest - buffer - lengths) / buffer, -1.0, 0.0).astype(jnp.float32)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Rescales `x [N, R]` to mean zero and variance one (by `n - 1`) over the mask's tokens; zero elsewhere.

    If all these tokens are equal, the result is exactly zero.
    """
    count = jnp.sum(mask, dtype=jnp.float32)
    all_equal = jnp.max(x, where=mask, initial=-jnp.inf) == jnp.min(x, where=mask, initial=jnp.inf)
    centred = jnp.where(mask & ~all_equal, x - masked_mean(x, mask), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def reversed_cumsum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """At each token, the sum of `x [N, R]` over the mask from this token on: `[N, R]`."""
    return jnp.flip(jnp.cumsum(jnp.flip(jnp.where(mask, x, 0.0), 1), axis=1), 1)


def reward_at_end(reward: jax.Array, mask: jax.Array) -> jax.Array:
    """Rewards `[N]` at the last masked token of each response: `[N, R]` float32."""
    last = mask & (reversed_cumsum(mask.astype(jnp.float32), mask) == 1)
    return jnp.where(last, reward[:, None], 0.0)


def token_advantages(
    reward: jax.Array, value: jax.Array, mask: jax.Array, discount: float, gae_lambda: float
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation over the tokens of responses (Schulman et al. 2016, arXiv 1506.02438).

    The value after the last token is zero. Tokens outside the mask (such as a tool's output) are skipped.
    `reward`, `value` (before each token), `mask` and both results, advantage and value target, are `[N, R]`.
    """

    def one_token(carry, token):
        next_advantage, next_value = carry
        reward, value, mask = token
        advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
        carry = jnp.where(mask, advantage, next_advantage), jnp.where(mask, value, next_value)
        return carry, jnp.where(mask, advantage, 0.0)

    zeros = jnp.zeros(reward.shape[:1], reward.dtype)
    _, advantage = jax.lax.scan(one_token, (zeros, zeros), (reward.T, value.T, mask.T), reverse=True)
    return advantage.T, jnp.where(mask, advantage.T + value, 0.0)
