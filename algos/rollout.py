"""Acting in an environment: actors, and rollouts for training.

Shapes: `T` steps, `B` or `N` environments, `A` agents in each (multi-agent environments only).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos import registry
from algos.values import Policy
from envs import TimeStep, features_and_mask
from fdg.arguments import checked_names
from fdg.settings.moved import moved

# Names that moved: "old=module:new"; "module:name" if the name is the same; "name" if it is in algos.rings.
_MOVED = "in_parts of_parts time_first time_major algos.evaluation:evaluate"
_MOVED += " algos.losses:values_after chosen=algos.rollout:choose_actions algos.on_policy:without_memory"
_MOVED += " algos.on_policy:environment_major"
__getattr__ = moved(__name__, "algos.rings", _MOVED)


class _Actor(NamedTuple):
    memory: Callable[[int], Any]
    act: Callable[[Any, Any, jax.Array, jax.Array, bool], tuple[jax.Array, Any]]


@checked_names
class Actor(_Actor):
    """A policy with its parameters, normalisers and initial memory, as two pure functions:

    - `memory(N) -> memory`: the initial memory, a pytree with leading axis `N`; `()` without memory.
    - `act(memory, observation [N, (A,) *obs], start [N] bool, keys [N], greedy) -> action [N, (A,) *action],
      memory`. Actions are within the environment's bounds. Where `start` is True an episode begins, and the
      previous memory is ignored. `greedy` is a Python bool: True for the most probable (or best) action,
      False for an action sampled as in training.

    Raises:
      FdgError: at construction, if a function does not take these arguments in this order; when acting, if
        `act` does not return a pair.
    """

    __slots__ = ()

    def __new__(cls, memory: Any, act: Any) -> "Actor":
        """Checks the arguments of both functions."""
        return super().__new__(cls, memory, registry.option("checks").check_and_wrap_act(memory, act))


def choose_actions(policy: Policy, keys: jax.Array, greedy: bool) -> jax.Array:
    """The most probable action of each of `[N]` distributions, or an action sampled with each key."""
    return policy.mode() if greedy else policy.sample(keys)


def empty_memory(num_envs: int) -> tuple[()]:
    """The initial memory, `()`, of an actor that has no memory."""
    return ()


class Recollection(NamedTuple):
    """The recurrent state of an actor, and where it must be reset."""

    memory: Any  # leading axis B
    start: jax.Array  # [B] bool: an episode starts; `memory` is still the last episode's, and is ignored


def rollout(act: Callable, *arguments: Any, **named: Any) -> tuple[Any, Any, tuple[Any, Any, TimeStep]]:
    """`rollout_with_memory` for an `act` without a memory, `(observation, keys) -> (action, extras)`."""
    env_state, observation, _, steps = rollout_with_memory(ignoring_memory(act), *arguments, **named)
    return env_state, observation, steps


def ignoring_memory(act: Callable) -> Callable:
    """Converts an `act` for `rollout` to an `act` for `rollout_with_memory`."""
    return lambda observation, recollection, keys: (*act(observation, keys), None)


def rollout_with_memory(
    act: Callable,
    step: Callable | tuple[Callable, ...],
    key: jax.Array,
    env_state: Any,
    observation: Any,
    num_steps: int,
    rings: int = 1,
    segment: Callable | None = None,
    recollection: Recollection | None = None,
) -> tuple[Any, Any, Any, tuple[Any, Any, TimeStep]]:
    """Steps a batch of environments `num_steps` times.

    Args:
      act: `(observation [B, ...], Recollection, keys [B]) -> (action [B, ...], extras [B, ...], memory)`.
        `act` resets the memory where `start` is True. The rollout itself does not reset it at the end of an
        episode, so that the episode's final memory can still be read.
      step: `(keys [B], env_state, action [B, ...]) -> (env_state, TimeStep [B])`; or the step in two parts,
        `(send, recv)`, and possibly a third function, `ready`.
      key: one key for the whole rollout, from which each environment and step gets its own key.
      env_state, observation, recollection: from `env.reset` or a previous rollout; leading axis `B`. Without
        a memory, `recollection` is None.
      rings: the number of parts of the environments that take turns: while one steps, the others act.
      segment: a function with which the environments' workers act and step (see `algos.rings`).

    Returns:
      The environments' state, observation and `Recollection` after the last step, and `((observation,
      action), extras, time_step)` of each step, `[T, B, ...]`. The time step's `observation` is None, because
      the next row already has it.
    """
    keys = jax.random.split(key, (num_steps, 2, jax.tree.leaves(observation)[0].shape[0]))
    carry = env_state, observation, recollection
    if rings > 1 or segment is not None or not callable(step):
        return registry.option("rings").rollout(act, step, keys, carry, rings, segment)

    def one_step(carry, keys):
        env_state, observation, recollection = carry
        action, extras, memory = act(observation, recollection, keys[0])
        env_state, time_step = step(keys[1], env_state, action)
        recollection = None if recollection is None else Recollection(memory, time_step.done)
        # The next row records the observation after this step, so this row does not.
        row = (observation, action), extras, time_step._replace(observation=None)
        return (env_state, time_step.observation, recollection), row

    (env_state, observation, recollection), steps = jax.lax.scan(one_step, carry, keys)
    return env_state, observation, recollection, steps


def episode_metrics(time_step: TimeStep) -> dict[str, jax.Array]:
    """Mean return and length of the episodes that ended in a rollout `[T, B]`, by masked sums.

    Returns:
      `episode_return`, `episode_length`, and `episode_NAME` for other metrics of environments
      (`TimeStep.episode_info`): scalar float32, nan if no episode ended; `episodes`: how many ended. With
      masked actions, `no_action_step`: the first step (counted from 1) whose new observation allows no
      action although the episode continues; nan if there is no such step.
    """
    episodes = jnp.sum(time_step.done.astype(jnp.float32))

    # `of_ended` is zero at steps where no episode ended, so a plain sum is the sum over episodes.
    def mean(of_ended):
        return jnp.where(episodes > 0, jnp.sum(of_ended) / jnp.maximum(episodes, 1), jnp.nan)

    return {
        "episode_return": mean(time_step.episode_return),
        "episode_length": mean(time_step.episode_length.astype(jnp.float32)),
        "episodes": episodes,
        **{
            f"episode_{name}": _mean_over_ended(time_step.done, x)
            for name, x in time_step.episode_info.items()
        },
        **_no_action_metric(time_step),
    }


def _no_action_metric(time_step: TimeStep) -> dict[str, jax.Array]:
    """The metric `no_action_step`, if actions are masked."""
    mask, done = features_and_mask(time_step.final_observation)[1], time_step.done
    if mask is None:
        return {}
    no_action = ~jnp.any(mask, axis=tuple(range(done.ndim, mask.ndim))) & ~done
    step = jnp.arange(1, len(done) + 1, dtype=jnp.float32).reshape(-1, *(1,) * (done.ndim - 1))
    first = jnp.min(jnp.where(no_action, step, jnp.inf))
    return {"no_action_step": jnp.where(jnp.isinf(first), jnp.nan, first)}


def _mean_over_ended(done: jax.Array, values: jax.Array) -> jax.Array:
    """The mean of values at steps where an episode ended, without values that are nan."""
    is_counted = done & ~jnp.isnan(values)
    return jnp.sum(jnp.where(is_counted, values, 0.0)) / jnp.sum(is_counted.astype(jnp.float32))
