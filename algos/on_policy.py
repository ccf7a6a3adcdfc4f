"""One iteration of learning on policy, as functions: a rollout of all environments, then what it teaches.

    begin -> State,    iteration: State -> act and step, T times -> learn -> State

Letters in shapes: `T` steps of a rollout, `B` environments, `N` rows of any origin.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from algos.networks import Network
from algos.normalize import RunningStatistics
from algos.rollout import environment_major, rollout, time_major
from envs import Observation, TimeStep, features_and_mask


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any  # RunningStatistics of [*obs], or of each part of it; None if there are none
    return_statistics: RunningStatistics | None  # of the discounted return that rewards are scaled by, if any
    running_return: jax.Array | None  # [B] float32, that return so far
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    known: Any = None  # of an exploration bonus (`algos.rnd`): what it learned, without parameters
    running_novelty: jax.Array | None = None  # [B] float32, of the same: the discounted return of novelty


class Trajectory(NamedTuple):
    """A rollout. The loss sees observations and rewards normalised, if that is switched on."""

    observation: Observation  # [T, B, *obs]
    action: jax.Array  # [T, B, *action]
    decision: Any  # [T, B], what the actor recorded with the action; None if nothing
    time_step: TimeStep  # [T, B], what came of the action


def begin(
    key: jax.Array,
    reset: Callable[[jax.Array], tuple[Any, Observation]],
    network: Network,
    optimizer: optax.GradientTransformation,
    statistics: Any,
    returns: tuple[RunningStatistics | None, jax.Array | None],
    begin_bonus: Callable[[jax.Array, Any, Observation], tuple[Any, Any]] | None = None,
) -> State:
    """The state before the first iteration.

    Args:
      key: one key.
      reset: `key -> env_state [B, ...], observation [B, *obs]`.
      network: whose parameters are learned.
      optimizer: of these parameters.
      statistics: of no observations.
      returns: statistics of no returns, and the returns so far.
      begin_bonus: `(key, parameters, observation) -> (parameters, known)` of an exploration bonus, if any.
    """
    parameter_key, env_key, key = jax.random.split(key, 3)
    env_state, observation = reset(env_key)
    parameters = network.init(parameter_key, features_and_mask(observation)[0])
    known = None
    if begin_bonus is not None:
        parameters, known = begin_bonus(jax.random.fold_in(parameter_key, 1), parameters, observation)
    return State(
        parameters=parameters,
        optimizer_state=optimizer.init(parameters),
        observation_statistics=statistics,
        return_statistics=returns[0],
        running_return=returns[1],
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        known=known,
        running_novelty=None if known is None else jnp.zeros(jax.tree.leaves(observation)[0].shape[0]),
    )


def iteration(
    state: State,
    act: Callable[..., tuple[jax.Array, Any]],
    step: Callable[..., tuple[Any, TimeStep]],
    learn: Callable[..., tuple[tuple[Any, ...], Any, dict[str, jax.Array]]],
    num_steps: int,
) -> tuple[State, dict[str, jax.Array]]:
    """The state after one rollout of all environments and what is learned from it, and metrics.

    Args:
      state: a `State`.
      act: `(parameters, observation_statistics, observation [B, *obs], keys [B]) -> (action, decision)`.
      step: `(keys [B], env_state, action) -> (env_state, TimeStep [B])`.
      learn: `((parameters, optimizer_state, observation_statistics, return_statistics), running_return,
        Trajectory [T, B], key)` to the first two after it, and metrics. With an exploration bonus, `known` is
        last of the first, and the second is `(running_return, running_novelty)`.
      num_steps: T.
    """
    key, rollout_key, learn_key = jax.random.split(state.key, 3)
    env_state, observation, ((observations, actions), decisions, time_steps) = rollout(
        act=lambda observation, keys: act(state.parameters, state.observation_statistics, observation, keys),
        step=step,
        key=rollout_key,
        env_state=state.env_state,
        observation=state.observation,
        num_steps=num_steps,
    )
    has_bonus = state.known is not None
    learned: Any = (
        state.parameters,
        state.optimizer_state,
        state.observation_statistics,
        state.return_statistics,
    )
    learned, running, metrics = learn(
        (*learned, state.known) if has_bonus else learned,
        (state.running_return, state.running_novelty) if has_bonus else state.running_return,
        Trajectory(observations, actions, decisions, time_steps),
        learn_key,
    )
    known, running_novelty = None, None
    if has_bonus:
        *learned, known = learned
        running, running_novelty = running
    parameters, optimizer_state, observation_statistics, return_statistics = learned
    state = state._replace(
        parameters=parameters,
        optimizer_state=optimizer_state,
        observation_statistics=observation_statistics,
        return_statistics=return_statistics,
        running_return=running,
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=state.iteration + 1,
        known=known,
        running_novelty=running_novelty,
    )
    return state, metrics


def over_time(function: Callable[[Observation], Any], observation: Observation) -> Any:
    """A function of rows `[N, *obs]`, of observations `[T, B, *obs]`: its results have axes `[T, B]`."""
    num_steps = jax.tree.leaves(observation)[0].shape[0]
    of_rows = function(jax.tree.map(environment_major, observation))
    return jax.tree.map(lambda x: time_major(x, num_steps), of_rows)
