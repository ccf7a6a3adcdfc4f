"""Exploration as a value: how actions are drawn while training, for any algorithm that learns from replay.

`explore=` of DQN, C51, QR-DQN, SAC, TD3 and CrossQ takes a pair of pure functions, an `Explorer`, in place of
the algorithm's own exploration. Its state is one of each environment and is carried from step to step.

Letters in shapes: `B` environments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.distributions import Categorical
from algos.networks import by_name
from algos.rollout import Policy, Recollection
from fdg.settings.parts import Part

EXPLORER: dict[str, Any] = {
    "help": "module:name of an exploration, an algos.Explorer (None: the algorithm's own)",
    "flag": str | None,
    "holds": "explorer",
}


class Explorer(NamedTuple):
    """How actions are drawn while training, as two pure functions over environments.

    `init(action [B, *action]) -> state [B, ...]`: of the action only shape and dtype count.
    `apply(state [B, ...], policy, start [B], keys [B], progress) -> (state [B, ...], action [B, *action])`:
    `policy` is what the algorithm learned: it has `mode()` and `sample(keys)`, and of a learner of values
    `logits [B, n]`, the values (`-inf`: not allowed). `start` is true where an episode starts; `progress`,
    `[]` float32, goes from 0 to 1 in the course of the run. Actions of SAC, TD3 and CrossQ lie in [-1, 1].
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]

    @staticmethod
    def described() -> str:
        """What messages call it."""
        return "an algos.Explorer(init, apply), 'module:name' of one"


@dataclasses.dataclass(frozen=True)
class ExplorerChoice(Part):
    """The exploration that a user gave, if any."""

    explore: Explorer | None = dataclasses.field(default=None, metadata=EXPLORER)

    def begin(self, action: jax.Array) -> Any:
        """Its state before the first step, for actions `[B, *action]`; None without one."""
        return None if self.explore is None else self._explorer.init(action)

    def drawn(
        self,
        policy: Policy,
        otherwise: Callable[[jax.Array], jax.Array],
        recollection: Recollection | None,
        keys: jax.Array,
        progress: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Actions `[B, *action]` and the state after them; `otherwise(keys)` draws where a user gave none."""
        if self.explore is None or recollection is None:
            return otherwise(keys), None
        state, action = self._explorer.apply(
            recollection.memory.explorer, policy, recollection.start, keys, progress
        )
        return action, state

    @property
    def _explorer(self) -> Explorer:
        return by_name("--explore", self.explore)


class Remembered(NamedTuple):
    """What an actor carries from step to step."""

    network: Any  # [B, ...]; None of a feed-forward network
    explorer: Any  # [B, ...]; None without an explorer


def boltzmann(temperature: float = 1.0) -> Explorer:
    """Draws each action with probability proportional to `exp(value / temperature)`, for learners of values.

    >>> explorer, policy = boltzmann(0.5), Categorical(jnp.array([[0.0, 100.0]]))
    >>> keys, start = jax.random.split(jax.random.key(0), 1), jnp.zeros(1, bool)
    >>> explorer.apply((), policy, start, keys, jnp.float32(0))[1].tolist()
    [1]
    """

    def apply(state, policy, start, keys, progress):
        return state, Categorical(policy.logits / temperature).sample(keys)

    return Explorer(lambda action: (), apply)


def correlated_noise(deviation: float = 0.2, decay: float = 0.85) -> Explorer:
    """Adds noise that is correlated in time, an Ornstein-Uhlenbeck process, to the best action.

    `noise' = decay * noise + deviation * sqrt(1 - decay ** 2) * normal`, zero where an episode starts
    (Lillicrap et al. 2016, "Continuous control with deep reinforcement learning", arXiv 1509.02971,
    section 3, in discrete time). Its stationary standard deviation is `deviation`.
    """

    def apply(noise, policy, start, keys, progress):
        drawn = jax.vmap(lambda key, one: jax.random.normal(key, one.shape))(keys, noise)
        before = jnp.where(start.reshape(-1, *(1,) * (noise.ndim - 1)), 0.0, noise)
        noise = decay * before + deviation * (1.0 - decay**2) ** 0.5 * drawn
        return noise, jnp.clip(policy.mode() + noise, -1.0, 1.0)

    return Explorer(lambda action: jnp.zeros_like(action), apply)
