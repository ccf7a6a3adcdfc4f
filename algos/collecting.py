"""Acting for replay: a rollout with a memory or without, the bonus on it, and what of it is stored.

Letters in shapes: `T` steps of a rollout, `B` environments, `L` steps of a sequence, `C = T / L` sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.explorers import Remembered
from algos.replay import Step
from algos.rollout import Recollection, episode_metrics, rollout, rollout_with_memory


class Collected(NamedTuple):
    """What a rollout leaves."""

    env_state: Any  # leading axis B
    observation: Any  # [B, *obs], after the last step
    recollection: Recollection | None  # after the last step
    bonus: Any  # what `Agent.bonus` knows
    rows: Any  # [T, B] or [C, B], for `Replay.add`
    observations: Any  # [T, B, *obs], what the actions answered to
    metrics: dict[str, jax.Array]


def collect(
    algorithm: Any, state: Any, act: Callable[..., tuple[jax.Array, Any]], key: jax.Array
) -> Collected:
    """Steps all environments `num_steps` times.

    Args:
      algorithm: with a `buffer`.
      state: with `env_state`, `observation`, `recollection` (None: nothing is remembered) and `bonus`.
      act: `(observation [B], recollection [B], keys [B]) -> (action [B], memory [B])`.
      key: one.
    """
    buffer, first = algorithm.buffer, state.recollection
    each = getattr(buffer, "sequence_length", None)
    one_sequence = each == algorithm.num_steps

    def acting(observation: Any, recollection: Any, keys: jax.Array) -> tuple[Any, Any, Any]:
        action, memory = act(observation, recollection, keys)
        # Of a rollout that is one sequence only the first memory is stored.
        if each is None:
            return action, (None, None), memory
        return action, (recollection.start, None if one_sequence else stored(recollection)), memory

    begun = {"key": key, "env_state": state.env_state, "observation": state.observation}
    if first is None:
        env_state, observation, steps = rollout(
            lambda observation, keys: acting(observation, None, keys)[:2], **begun, **algorithm._rolling
        )
        recollection = None
    else:
        env_state, observation, recollection, steps = rollout_with_memory(
            acting, recollection=first, **begun, **algorithm._rolling
        )
    (observations, actions), (start, before), time_steps = steps
    if one_sequence:
        before = jax.tree.map(lambda x: x[None], stored(first))
    elif each is not None:
        before = jax.tree.map(lambda x: x[::each], before)
    bonus, time_steps, paid = algorithm._paid(state.bonus, time_steps)
    rows = buffer.cut(before, start, Step.of(observations, actions, time_steps))
    metrics = {**episode_metrics(time_steps), **paid}
    return Collected(env_state, observation, recollection, bonus, rows, observations, metrics)


def stored(recollection: Recollection) -> Any:
    """What of a memory is stored: that of the network."""
    memory = recollection.memory
    return memory.network if isinstance(memory, Remembered) else memory


def begin(network_memory: Any, explorer: Any, num_envs: int) -> Recollection | None:
    """What is remembered before the first step; None if nothing ever is."""
    if network_memory is None and explorer is None:
        return None
    return Recollection(Remembered(network_memory, explorer), jnp.ones(num_envs, bool))


def stored_memory(recollection: Recollection | None) -> tuple[Any, ...]:
    """The memory that `Replay.init` takes, of a network that has one; else nothing."""
    memory = None if recollection is None else stored(recollection)
    return () if memory is None else (memory,)
