"""Losses that several algorithms share, and advantages.

Losses are means over samples, which may have any axes `[...]`. Advantages are time-major, `[T, B]`;
see `algos.returns` for returns and the ends of episodes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from algos.values import Discount, Policy
from envs import TimeStep
from fdg.settings.fields import hyperparameter, require_positive, require_within
from fdg.settings.moved import moved
from fdg.settings.parts import Part

# Names that moved to `algos.one_update`, or to the module before the colon.
_MOVED = "WeightedLoss weighted_sum proximal_loss algos.distributional:quantile_error"
__getattr__ = moved(__name__, "algos.one_update", _MOVED)


class Distribution(Policy, Protocol):
    """A distribution over actions; `algos.distributions` has one for each kind of action space."""

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log of the probability (or density) of `action [..., *action]`: `[...]` float32."""

    def entropy(self) -> jax.Array:
        """Entropy in nats: `[...]` float32."""

    def kl(self, other: Any) -> jax.Array:
        """KL(self || other) in nats, `[...]` float32; `other` has the same type."""


class Decision(NamedTuple):
    """The actor's outputs for an action that it took."""

    log_prob: jax.Array  # [...] float32, of the action taken
    value: jax.Array  # [...] float32, V(observation)


@dataclasses.dataclass(frozen=True)
class ProximalLoss(Part):
    """The loss of PPO (Schulman et al. 2017, arXiv 1707.06347, equation 9, negated)."""

    clip_ratio: float = hyperparameter(
        0.2, "epsilon: the probability ratio is clipped to [1 - epsilon, 1 + epsilon]"
    )
    clip_value: bool = hyperparameter(True, "clip the change of the value by the same epsilon")
    normalize_advantage: bool = hyperparameter(
        True, "normalise advantages to zero mean and unit variance in each minibatch"
    )
    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")

    def check(self, algorithm: Any) -> None:
        """Refuses a `clip_ratio` that is not positive."""
        require_positive(algorithm, "clip_ratio")

    def of(
        self, policy: Distribution, value: jax.Array, minibatch: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a minibatch, and its terms; `policy` and `value [...]` are from the current network.

        `minibatch` has the fields `action [..., *action]`, `decision` (a `Decision [...]`), `advantage` and
        `target`, the regression target of the value, both `[...]` float32.
        """
        decision, target = minibatch.decision, minibatch.target
        log_ratio = policy.log_prob(minibatch.action) - decision.log_prob
        # As in Stable-Baselines3, a single advantage is not normalised: the result would always be zero.
        normalizes = self.normalize_advantage and minibatch.advantage.size > 1
        advantage = standardize(minibatch.advantage) if normalizes else minibatch.advantage
        policy_loss = clipped_surrogate(log_ratio, advantage, self.clip_ratio)
        clip_args = decision.value, target, self.clip_ratio
        value_loss = clipped_value_error(value, *clip_args) if self.clip_value else value_error(value, target)
        entropy = jnp.mean(policy.entropy())
        loss = policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": approximate_kl(log_ratio),
            "clip_fraction": clip_fraction(log_ratio, self.clip_ratio),
        }


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, clip_ratio: float) -> jax.Array:
    """Clipped surrogate objective of PPO, negated (Schulman et al. 2017, arXiv 1707.06347, equation 7).

    The objective is the minimum of `ratio * advantage` and `clipped_ratio * advantage`; the clipped ratio is
    from `1 - clip_ratio` to `1 + clip_ratio`. `log_ratio` and `advantage` are `[...]` float32.

    >>> # The action is twice as likely as before, so the ratio 2 is clipped to 1.2.
    >>> print(f"{clipped_surrogate(jnp.log(jnp.array([2.0])), jnp.array([1.0]), clip_ratio=0.2):.2f}")
    -1.20
    """
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage))


def value_error(value: jax.Array, target: jax.Array) -> jax.Array:
    """Half the mean squared error of values `[...]` float32 to `target [...]`.

    >>> float(value_error(jnp.array([1.0]), jnp.array([2.0])))
    0.5
    """
    return 0.5 * jnp.mean(jnp.square(value - target))


def clipped_value_error(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float) -> jax.Array:
    """Like `value_error`, but takes each sample's larger error: of its value, or of its clipped value.

    The clipped value differs from `old_value` by at most `clip`. The code of PPO clips values (`ppo2` of
    OpenAI's baselines); the paper does not.

    >>> one = jnp.ones(1)
    >>> float(clipped_value_error(one, 0.0 * one, 2.0 * one, clip=0.5))  # 0.5 * (2 - 0.5)^2
    1.125
    """
    clipped = old_value + jnp.clip(value - old_value, -clip, clip)
    return 0.5 * jnp.mean(jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)))


def standardize(advantage: jax.Array) -> jax.Array:
    """Rescales advantages to zero mean and unit variance over all samples (as in OpenAI's baselines)."""
    return (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)


def approximate_kl(log_ratio: jax.Array) -> jax.Array:
    """Estimates KL(acting policy || current policy) by Schulman's k3 (2020, joschu.net/blog/kl-approx.html).

    >>> float(approximate_kl(jnp.zeros(3)))
    0.0
    """
    return jnp.mean((jnp.exp(log_ratio) - 1.0) - log_ratio)


def clip_fraction(log_ratio: jax.Array, clip_ratio: float) -> jax.Array:
    """Fraction of samples whose ratio is outside `1 - clip_ratio` to `1 + clip_ratio`."""
    return jnp.mean(jnp.abs(jnp.exp(log_ratio) - 1.0) > clip_ratio, dtype=jnp.float32)


def explained_variance(target: jax.Array, value: jax.Array) -> jax.Array:
    """A metric: the fraction of the target's variance that the value explains (1: all of it, 0: none)."""
    return 1.0 - jnp.var(target - value) / (jnp.var(target) + 1e-8)


# --- returns and advantages ---


@dataclasses.dataclass(frozen=True)
class Advantages(Discount):
    """Settings of the discount and of generalised advantage estimation."""

    gae_lambda: float = hyperparameter(0.95, "lambda of generalised advantage estimation")

    def check(self, algorithm: Any) -> None:
        """Refuses a lambda out of range."""
        require_within(algorithm, 0, 1, "gae_lambda")

    def of(
        self, reward: jax.Array, value: jax.Array, next_value: jax.Array, time_step: TimeStep
    ) -> tuple[jax.Array, jax.Array]:
        """Advantage and value target of a rollout; arguments and results are `[T, B]`."""
        return generalized_advantage_estimation(
            reward, value, next_value, time_step.terminated, time_step.truncated,
            self.discount, self.gae_lambda,
        )  # fmt: skip


def generalized_advantage_estimation(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    discount: float | jax.Array,
    lambda_: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equations 11 to 16).

    `advantage[t] = delta[t] + discount * lambda_ * advantage[t + 1]`, cut where the episode ended at `t`,
    with `delta[t] = reward[t] + discount * next_value[t] * (1 - terminated[t]) - value[t]` (equation 11).
    Arguments are as in `algos.returns`. With `lambda_` 0 the advantage is the one-step error, with 1 the
    Monte-Carlo return minus the value. Also returns `target = advantage + value`, the lambda-return.

    >>> one = jnp.ones((1, 1))
    >>> never = jnp.zeros((1, 1), bool)
    >>> advantage, target = generalized_advantage_estimation(one, 2 * one, 4 * one, never, never, 0.5, 0.95)
    >>> float(advantage[0, 0]), float(target[0, 0])  # 1 + 0.5 * 4 - 2, and that plus 2
    (1.0, 3.0)
    """
    delta = reward + discount * next_value * not_ended(terminated) - value
    weight = discount * lambda_ * not_ended(jnp.logical_or(terminated, truncated))
    advantage = accumulate_backwards(delta, weight, jnp.zeros_like(delta[-1]))
    return advantage, advantage + value


def values_after(
    value: jax.Array, time_step: TimeStep, value_of: Callable[[Any], jax.Array], final: Any = None
) -> jax.Array:
    """The value of the observation after each step of a rollout, before any reset: `[T, B, ...]` float32.

    Within an episode this is the value of the next row. For the last row and for truncated steps, `value_of`
    computes it: one call for the last row of all environments, then one for the first truncation of each
    environment, one for the second, and so on. After a termination the result has no meaning.

    Args:
      value: `[T, B]` float32 (with several agents `[T, B, A]`), of the observation before each step.
      time_step: `[T, B]`.
      value_of: maps entries of `final`, one for each environment `[B, ...]`, to their values `[B, ...]`.
      final: `[T, B, ...]`, the observation after each step, for a recurrent critic with its memory; None:
        `time_step.final_observation`.
    """
    final = time_step.final_observation if final is None else final
    next_value = jnp.concatenate([value[1:], value_of(jax.tree.map(lambda x: x[-1], final))[None]])
    row = jax.lax.broadcasted_iota(jnp.int32, value.shape[:2], 0)

    def any_pending(carry):
        return jnp.any(carry[1])

    def evaluate_first_pending(carry):
        next_value, pending = carry
        first = jnp.argmax(pending, axis=0)
        rows = jax.tree.map(lambda x: jax.vmap(lambda x, i: x[i], in_axes=(1, 0))(x, first), final)
        is_first = pending & (row == first[None])
        is_replaced = is_first.reshape(*is_first.shape, *(1,) * (next_value.ndim - 2))  # an axis for agents
        return jnp.where(is_replaced, value_of(rows)[None], next_value), pending & ~is_first

    pending = time_step.truncated & ~time_step.terminated & (row < value.shape[0] - 1)
    return jax.lax.while_loop(any_pending, evaluate_first_pending, (next_value, pending))[0]


def not_ended(ended: jax.Array) -> jax.Array:
    """0.0 where the episode `ended`, else 1.0: `[T, B]` float32."""
    return 1.0 - ended.astype(jnp.float32)


def accumulate_backwards(term: jax.Array, weight: jax.Array, last: jax.Array) -> jax.Array:
    """`x[t] = term[t] + weight[t] * x[t + 1]` for every t, with `x[T] = last`: `[T, B]`; `last` is `[B]`.

    A plain scan: on a CPU (T = 128; B = 4, 64, 1024) neither an unrolled nor an associative scan was faster.
    """

    def step(later: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        term_t, weight_t = row
        current = term_t + weight_t * later
        return current, current

    return jax.lax.scan(step, last, (term, weight), reverse=True)[1]
