"""Exploration strategies as values.

`explore=` of DQN, SAC, TD3 and their variants (such as C51 and CrossQ) takes an `Explorer`, a pair of pure
functions that replaces the algorithm's own exploration. Each environment has its own explorer state.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from algos.distributions import Categorical
from algos.interfaces import Explorer
from fdg.arguments import quoted
from fdg.errors import FdgError


def boltzmann(temperature: float = 1.0) -> Explorer:
    """Samples actions with probabilities proportional to `exp(value / temperature)`.

    Only for algorithms that learn values of actions.

    >>> explorer, policy = boltzmann(0.5), Categorical(jnp.array([[0.0, 100.0]]))
    >>> keys, start = jax.random.split(jax.random.key(0), 1), jnp.zeros(1, bool)
    >>> explorer.apply((), policy, start, keys, jnp.float32(0))[1].tolist()
    [1]
    """
    _require("boltzmann: temperature", temperature, lambda x: 0 < x < math.inf, "a finite number above 0")

    def apply(state, policy, start, keys, progress):
        if not hasattr(policy, "logits"):
            raise FdgError(
                "explore=boltzmann(...) needs values of actions, which DQN, QR-DQN and C51 learn: give"
                " correlated_noise(...) to SAC, TD3 and CrossQ"
            )
        return state, Categorical(policy.logits / temperature).sample(keys)

    return Explorer(lambda action: (), apply)


def correlated_noise(deviation: float = 0.2, decay: float = 0.85) -> Explorer:
    """Adds time-correlated (Ornstein-Uhlenbeck) noise to the best action.

    `noise' = decay * noise + deviation * sqrt(1 - decay ** 2) * normal`; `noise` is 0 at an episode's start
    (Lillicrap et al. 2016, "Continuous control with deep reinforcement learning", arXiv 1509.02971, section
    3, in discrete time). The stationary standard deviation is `deviation`.
    """
    _require("correlated_noise: deviation", deviation, lambda x: 0 <= x < math.inf, "a finite number from 0")
    _require("correlated_noise: decay", decay, lambda x: -1 < x < 1, "a number above -1 and below 1")

    def init(action):
        if not jnp.issubdtype(action.dtype, jnp.floating):
            raise FdgError(
                f"explore=correlated_noise(...) adds noise to actions, but these are {action.dtype}: for"
                " discrete actions give boltzmann(...)"
            )
        return jnp.zeros_like(action)

    def apply(noise, policy, start, keys, progress):
        normal = jax.vmap(lambda key, row: jax.random.normal(key, row.shape, row.dtype))(keys, noise)
        previous = jnp.where(start.reshape(-1, *(1,) * (noise.ndim - 1)), 0.0, noise)
        noise = decay * previous + deviation * (1.0 - decay**2) ** 0.5 * normal
        return noise, jnp.clip(policy.mode() + noise, -1.0, 1.0)

    return Explorer(init, apply)


def _require(what: str, value: Any, is_valid: Callable[[Any], bool], kind: str) -> None:
    """Refuses a value that is no number of this kind; arrays, possibly traced, are not checked."""
    if not isinstance(value, jax.Array) and not (isinstance(value, numbers.Real) and is_valid(value)):
        raise FdgError(f"{what}={quoted(value)}: give {kind}")


# Large noise that changes slowly, for presets of tasks that reward only a long swing (MountainCarContinuous).
SWINGING = correlated_noise(deviation=0.9, decay=0.98)
