"""Targets for value functions and advantages for policy gradients, from whole trajectories.

Every array is time-major, `[T, B]`: `T` steps of `B` environments. A step's `next_value` is the value of the
state that the step led to, before any automatic reset; with it, episode ends inside a trajectory need no
special case.

Two ways for an episode to end, never to be confused:

- *terminated*: the process ended; what follows is worth zero.
- *truncated*: only the recording ended (a time limit); what follows is worth `next_value`.

Either way the next row belongs to another episode, so no reward and no error flows back across it
(Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv 1712.00378).
"""

import jax
import jax.numpy as jnp


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

    Args:
        reward: `[T, B]` float32, paid by step t.
        value: `[T, B]` float32, V(s_t).
        next_value: `[T, B]` float32, V of the observation that step t led to, before any automatic reset.
        terminated: `[T, B]` bool (or 0/1 float), step t ended the process.
        truncated: `[T, B]` bool (or 0/1 float), step t was the last before a time limit.
        discount: scalar in [0, 1], the gamma of the paper.
        lambda_: scalar in [0, 1]; 0 gives the one-step error, 1 the Monte-Carlo return minus the value.

    Returns:
        `advantage` and `target`, both `[T, B]` float32; `target = advantage + value` is the lambda-return
        that the value function is fitted to.

    >>> one = jnp.ones((1, 1))
    >>> never = jnp.zeros((1, 1), bool)
    >>> advantage, target = generalized_advantage_estimation(one, 2 * one, 4 * one, never, never, 0.5, 0.95)
    >>> float(advantage[0, 0]), float(target[0, 0])  # 1 + 0.5 * 4 - 2, and that plus 2
    (1.0, 3.0)
    """
    delta = reward + discount * next_value * _continues(terminated) - value
    weight = discount * lambda_ * _continues(jnp.logical_or(terminated, truncated))
    advantage = _accumulate_backwards(delta, weight, jnp.zeros_like(delta[-1]))
    return advantage, advantage + value


def discounted_returns(
    reward: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    next_value: jax.Array,
    discount: float | jax.Array,
) -> jax.Array:
    """Discounted sum of rewards to the end of the episode, completed by a value where that end is not seen.

    `return[t] = reward[t] + discount * return[t + 1]` with, in place of `return[t + 1]`: zero where step t
    terminated, `next_value[t]` where it was truncated, `bootstrap_value` after the last row
    (Sutton and Barto 2018, equation 3.9; truncation as in the module's docstring).

    Args:
        reward: `[T, B]` float32.
        bootstrap_value: `[B]` float32, V of the observation that the last step led to.
        terminated: `[T, B]` bool (or 0/1 float).
        truncated: `[T, B]` bool (or 0/1 float).
        next_value: `[T, B]` float32, V of the observation that step t led to; read only where truncated.
        discount: scalar in [0, 1].

    Returns:
        `[T, B]` float32.
    """
    # A step that both terminated and ran out of time has terminated: nothing follows it.
    cut_short = jnp.logical_and(truncated, jnp.logical_not(terminated))
    term = reward + discount * jnp.where(cut_short, next_value, 0.0)
    weight = discount * _continues(jnp.logical_or(terminated, truncated))
    return _accumulate_backwards(term, weight, bootstrap_value)


def _continues(ended: jax.Array) -> jax.Array:
    """1.0 where the episode goes on, 0.0 where it `ended`: `[T, B]` float32."""
    return 1.0 - ended.astype(jnp.float32)


def _accumulate_backwards(term: jax.Array, weight: jax.Array, last: jax.Array) -> jax.Array:
    """`x[t] = term[t] + weight[t] * x[t + 1]` for every t, with `x[T] = last`.

    `term` and `weight` are `[T, B]`, `last` is `[B]`, the result `[T, B]`. A plain scan: on a CPU
    (T = 128; B = 4, 64, 1024) neither unrolling it nor an associative scan was quicker.
    """

    def step(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        term_t, weight_t = row
        current = term_t + weight_t * following
        return current, current

    return jax.lax.scan(step, last, (term, weight), reverse=True)[1]
