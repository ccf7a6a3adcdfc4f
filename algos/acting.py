"""How a trained algorithm acts, as a value: what evaluation, videos, exports and a loop of your own need.

An algorithm of this package, or of a user's own, says it in one method:

    actor(state) -> Actor

Letters in shapes: `N` environments, `A` agents in each (only where an environment has several).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from envs import Observation
from fdg.arguments import check_takes


class _Actor(NamedTuple):
    memory: Callable[[int], Any]
    act: Callable[[Any, Any, jax.Array, jax.Array, bool], tuple[jax.Array, Any]]


class Actor(_Actor):
    """A policy with all that it needs: parameters, normalisers, and how its memory begins.

    Pure functions of arrays, which trace under `jit`, `vmap` and `scan`:

    - `memory(N) -> memory`: what it remembers before anything was seen, a pytree with leading axis `N`; `()`
      for an actor without memory.
    - `act(memory, observation [N, (A,) *obs], start [N] bool, keys [N], greedy) -> action [N, (A,) *action],
      memory`. Actions are such as the environment takes: within its bounds. Where `start` is true an episode
      begins, and what the memory held before counts for nothing. `greedy` is a Python bool: the most probable
      (or best) action, else one drawn as in training, from one key for each environment.

    Raises:
      FdgError: (construction) a function takes other arguments, or these in another order.
    """

    __slots__ = ()

    def __new__(cls, memory: Any, act: Any) -> "Actor":
        """Checks what both take."""
        check_takes(memory, ("num_envs",), "memory of algos.Actor")
        check_takes(act, ("memory", "observation", "start", "keys", "greedy"), "act of algos.Actor")
        return super().__new__(cls, memory, act)


class Policy(Protocol):
    """A distribution over actions, as far as acting needs it: see `algos.distributions.Distribution`."""

    def sample(self, keys: jax.Array) -> jax.Array:
        """Random actions `[..., *action]`; `keys` is one key, or one per element of the leading axes."""

    def mode(self) -> jax.Array:
        """The most probable action: `[..., *action]`."""


def without_memory(
    policy: Callable[[Observation], Policy], deliver: Callable[[jax.Array], jax.Array]
) -> Actor:
    """The actor of a feed-forward policy.

    Args:
      policy: from observations `[N, *obs]` to a distribution over actions, `[N]`.
      deliver: from its actions to those that the environment takes, say clipped to their bounds.
    """

    def act(memory, observation, start, keys, greedy):
        return deliver(chosen(policy(observation), keys, greedy)), memory

    return Actor(empty_memory, act)


def chosen(policy: Policy, keys: jax.Array, greedy: bool) -> jax.Array:
    """The most probable action of each of `[N]` distributions, or one drawn with the key of each."""
    return policy.mode() if greedy else policy.sample(keys)


def empty_memory(num_envs: int) -> tuple[()]:
    """The memory of who remembers nothing."""
    return ()
