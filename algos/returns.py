"""Multi-step returns and targets: discounted returns, lambda-returns, V-trace (n-step: see `algos.buffers`).

Arrays are time-major, `[T, B]`: `T` steps of `B` environments. Arguments of all functions:

- `reward`, `value`, `next_value`: `[T, B]` float32. `value` is V of the observation before a step,
  `next_value` V of the observation after it, before any automatic reset.
- `terminated`, `truncated`: `[T, B]` bool (or 0/1 float). After a termination the value is zero. A
  truncation, such as by a time limit, does not end the task, so the value after it is `next_value`. In both
  cases the next row belongs to another episode, so no reward or error propagates across the end (Pardo et al.
  2018, "Time Limits in Reinforcement Learning", arXiv 1712.00378).
- `discount`, `lambda_`: scalars in [0, 1].

Results are `[T, B]` float32.
"""

import jax
import jax.numpy as jnp

from algos.losses import accumulate_backwards, generalized_advantage_estimation, not_ended
from fdg.settings.moved import moved

__all__ = [
    "discounted_returns",
    "generalized_advantage_estimation",
    "lambda_returns",
    "rescaled",
    "unrescaled",
    "v_trace",
]

# n_step_sums and n_step_returns have moved to `algos.buffers`.
__getattr__ = moved(__name__, "algos.buffers")


def discounted_returns(
    reward: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    next_value: jax.Array,
    discount: float | jax.Array,
) -> jax.Array:
    """Discounted sum of rewards to the end of the episode, with bootstrapping.

    `return[t] = reward[t] + discount * return[t + 1]`, where `return[t + 1]` is zero if step t terminated,
    `next_value[t]` if it was truncated, and `bootstrap_value [B]` after the last row (Sutton and Barto 2018,
    equation 3.9). `next_value` is used only at truncations.
    """
    # A step that both terminated and was truncated counts as terminated.
    only_truncated = jnp.logical_and(truncated, jnp.logical_not(terminated))
    term = reward + discount * jnp.where(only_truncated, next_value, 0.0)
    weight = discount * not_ended(jnp.logical_or(terminated, truncated))
    return accumulate_backwards(term, weight, bootstrap_value)


def lambda_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    discount: float | jax.Array,
    lambda_: float | jax.Array,
) -> jax.Array:
    """Lambda-returns (Sutton and Barto 2018, equation 12.20), of V or of Q.

    `return[t] = reward[t] + discount * ((1 - lambda_) * next_value[t] + lambda_ * return[t + 1])`. The second
    term is zero after a termination, and `discount * next_value[t]` after a truncation and in the last row.

    If `next_value` is V, these are the targets of `generalized_advantage_estimation`. If it is the maximum of
    Q over actions, they are Peng and Williams's Q(lambda) (1994, Machine Learning 22), the targets of PQN.

    >>> reward, next_value, never = jnp.ones((2, 1)), jnp.full((2, 1), 4.0), jnp.zeros((2, 1), bool)
    >>> lambda_returns(reward, next_value, never, never, 0.5, 0.5)[:, 0].tolist()
    [2.75, 3.0]
    """
    continues = lambda_ * not_ended(jnp.logical_or(terminated, truncated))
    term = reward + discount * (1.0 - continues) * not_ended(terminated) * next_value
    return accumulate_backwards(term, discount * continues, next_value[-1])


def v_trace(
    ratio: jax.Array,
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    discount: float | jax.Array,
    lambda_: float | jax.Array = 1.0,
    rho_clip: float | jax.Array = 1.0,
    c_clip: float | jax.Array = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561): values of a policy from the actions of another one.

    This is equation 1 in the recursive form of Remark 1, cut where the episode ended at `t`. With `rho[t] =
    min(rho_clip, ratio[t])` and `c[t] = lambda_ * min(c_clip, ratio[t])`:

    `target[t] = value[t] + rho[t] * delta[t] + discount * c[t] * (target[t + 1] - value[t + 1])`,
    `delta[t] = reward[t] + discount * next_value[t] * (1 - terminated[t]) - value[t]`.

    The advantage is that of section 4.2, `rho[t] * (reward[t] + discount * following[t] - value[t])`, with
    `following[t] = lambda_ * target[t + 1] + (1 - lambda_) * next_value[t]`, as in rlax. If both policies are
    equal (`ratio = 1`, clips of at least 1), results are those of `generalized_advantage_estimation`.

    Args:
      ratio: `[T, B]` float32, the action's probability under the evaluated policy, divided by its probability
        under the acting policy.
      reward, value, next_value, terminated, truncated, discount, lambda_: as in the module's docstring.
      rho_clip: rho-bar of the paper, above 0; determines the policy whose value the targets approach.
      c_clip: c-bar of the paper, above 0 and at most `rho_clip`; determines how far errors propagate back.

    Returns:
        `advantage` and `target`. Both carry gradients; use `stop_gradient`.
    """
    rho = jnp.minimum(rho_clip, ratio)
    c = lambda_ * jnp.minimum(c_clip, ratio)
    continues = not_ended(jnp.logical_or(terminated, truncated))
    delta = reward + discount * next_value * not_ended(terminated) - value
    correction = accumulate_backwards(rho * delta, discount * c * continues, jnp.zeros_like(delta[-1]))
    next_correction = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    advantage = rho * (delta + discount * lambda_ * continues * next_correction)
    return advantage, value + correction


# --- value rescaling (Pohlen et al. 2018, arXiv 1805.11593, section 3.2 and proposition A.2) ---

_SLOPE = 1e-3  # epsilon, as in MuZero (arXiv 1911.08265, appendix F)


def rescaled(x: jax.Array) -> jax.Array:
    """`h(x) = sign(x) * (sqrt(|x| + 1) - 1) + 0.001 * x`, of values or rewards of unknown size: `[...]`.

    >>> float(rescaled(jnp.float32(3.0)).round(6))
    1.003000020980835
    """
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + _SLOPE * x


def unrescaled(x: jax.Array) -> jax.Array:
    """The inverse of `rescaled`, in a form without numerical cancellation near zero."""
    shifted = jnp.abs(x) + 1.0 + _SLOPE
    root = 2.0 * shifted / (1.0 + jnp.sqrt(1.0 + 4.0 * _SLOPE * shifted))
    return jnp.sign(x) * (jnp.square(root) - 1.0)
