"""Actor-critics that learn from replay (SAC, CrossQ, TD3), as functions: acting, storing, gradient steps.

An iteration steps all environments, adds the steps to the replay buffer, and takes gradient steps on
minibatches drawn from all that it holds. Between the fragments actions are in [-1, 1]; `step` stretches them
to the environment's bounds, so that its units count for nothing. What is replayed are observations as they
were; networks see them by the statistics of the moment.

Letters in shapes: `B` environments, `U` gradient steps of an iteration, `N` samples of a minibatch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos import given
from algos.replay import Replay, ReplayState, Step, Transition
from algos.rollout import Policy, episode_metrics, rollout
from envs import Box, Observation
from fdg.settings.fields import require


class State(NamedTuple):
    """All that the next iteration needs."""

    learned: Any  # all that an update changes
    observation_statistics: Any  # as of `PPO`; None where observations are not normalised
    replay: ReplayState  # rows of B
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    bonus: Any = None  # what `Agent.bonus` knows


def check(algorithm: Any) -> None:
    """Refuses actions without bounds, and sizes that do not divide."""
    space, num_envs, batch_size = algorithm.env.action_space, algorithm.num_envs, algorithm.batch_size
    require(
        algorithm,
        isinstance(space, Box) and space.is_bounded and np.issubdtype(np.dtype(space.dtype), np.floating),
        f"cannot act in the action space {space}: give it finite bounds and a floating dtype",
    )
    require(
        algorithm,
        batch_size % num_envs == 0,
        f"num_envs={num_envs} does not divide batch_size={batch_size}: choose a divisor",
    )
    _ = algorithm.buffer  # refuses sizes that do not fit


def buffer(algorithm: Any) -> Replay:
    """The buffer, no longer than a run fills it; draws the minibatches of all gradient steps at once."""
    return Replay(
        num_envs=algorithm.num_envs,
        buffer_size=min(algorithm.buffer_size, algorithm.num_iterations * algorithm.steps_per_iteration),
        batch_size=algorithm.updates_per_iteration * algorithm.batch_size,
        discount=algorithm.discount,
    )


def begin(
    algorithm: Any, key: jax.Array, first: Callable[[jax.Array, jax.Array, Observation, jax.Array], Any]
) -> State:
    """The state before the first iteration.

    Args:
      algorithm: whose environments, buffer and normalisers they are.
      key: one key.
      first: `(actor_key, critics_key, observation [B, *obs], action [B, *action])` to all that an update
        changes; of observations and actions only types count.
    """
    actor_key, critics_key, env_key, key = jax.random.split(key, 4)
    env_state, observation = algorithm._reset(env_key)
    action = jnp.zeros((algorithm.num_envs, *algorithm.env.action_space.shape))
    return State(
        learned=first(actor_key, critics_key, observation, action),
        observation_statistics=algorithm.normalizers.begin(algorithm.env.observation_space),
        replay=algorithm.buffer.init(observation, action),
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        bonus=algorithm._first_bonus(observation),
    )


def iteration(algorithm: Any, state: State, actor: Any) -> tuple[State, dict[str, jax.Array]]:
    """Some steps of all environments, and all gradient steps that they are due.

    Args:
      algorithm: with the fragments `act`, `step`, `learn` and `observe`.
      state: before the iteration.
      actor: what of `state.learned` acts.
    """
    key, rollout_key, sample_key, learn_key = jax.random.split(state.key, 4)
    statistics, replay = state.observation_statistics, algorithm.buffer
    learning = state.iteration >= math.ceil(algorithm.learning_starts / algorithm.steps_per_iteration)
    env_state, observation, ((observations, actions), _, time_steps) = rollout(
        act=lambda observation, keys: (algorithm.act(actor, statistics, learning, observation, keys), None),
        step=algorithm.step,
        key=rollout_key,
        env_state=state.env_state,
        observation=state.observation,
        num_steps=algorithm.num_steps,
    )
    bonus, time_steps, paid = algorithm._paid(state.bonus, time_steps)
    replay_state = replay.add(state.replay, Step.of(observations, actions, time_steps))
    samples = replay.sample(replay_state, sample_key).transition
    drawn = jax.tree.map(
        lambda x: minibatches(x, algorithm.num_envs, algorithm.updates_per_iteration), samples
    )
    learned, losses = algorithm.learn(state.learned, statistics, drawn, learn_key, learning)
    # Only now, so that all that one iteration acts on and learns from is normalised alike.
    if algorithm.normalize_observation:
        statistics = algorithm.observe(statistics, observations)
    state = State(learned, statistics, replay_state, env_state, observation, key, state.iteration + 1, bonus)
    return state, {**episode_metrics(time_steps), **losses, **paid}


def minibatches(x: jax.Array, num_envs: int, updates: int) -> jax.Array:
    """Samples `[U * N, ...]` into minibatches `[U, N, ...]`, both environment-major."""
    by_environment = x.reshape(num_envs, updates, -1, *x.shape[1:])
    return by_environment.swapaxes(0, 1).reshape(updates, -1, *x.shape[1:])


def explored(policy: Policy, keys: jax.Array, learning: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Actions `[B, *shape]` in [-1, 1]: of the policy, and uniform until learning begins."""
    # One key for both, of which only one is used.
    uniform = jax.vmap(Box(-1.0, 1.0, shape).sample)(keys)
    return jnp.where(learning, policy.sample(keys), uniform)


def learned_from(
    one_step: Callable[[Any, Transition, jax.Array], tuple[Any, dict[str, jax.Array]]],
    learned: Any,
    minibatches: Transition,
    see: Callable[[Observation], Observation],
    keys: jax.Array,
    learning: jax.Array,
) -> tuple[Any, dict[str, jax.Array]]:
    """One gradient step for each of the minibatches `[U, N]`, and the means of their losses.

    Args:
      one_step: `(learned, minibatch [N], keys) -> (learned, losses)`.
      learned: before them.
      minibatches: as they were stored.
      see: observations as networks see them.
      keys: `[U, ...]`.
      learning: `[]` bool, whether learning has begun.
    """
    minibatches = minibatches._replace(
        observation=see(minibatches.observation), next_observation=see(minibatches.next_observation)
    )
    after, losses = jax.lax.scan(
        lambda learned, minibatch: one_step(learned, *minibatch), learned, (minibatches, keys)
    )
    # Before learning begins steps are taken too, and thrown away: fragments in a branch could not be placed
    # apart.
    learned = jax.tree.map(lambda new, old: jnp.where(learning, new, old), after, learned)
    return learned, jax.tree.map(lambda x: jnp.where(learning, jnp.mean(x, axis=0), jnp.nan), losses)


def check_critics(algorithm: Any, critics: Callable[..., Any], state: State) -> None:
    """Refuses critics that do not give two values: `critics(learned, observation, action)`."""
    count, space = algorithm.num_envs, algorithm.env.action_space
    action = jax.ShapeDtypeStruct((count, *space.shape), jnp.float32)
    found = jax.eval_shape(critics, state.learned, state.observation, action)
    given.twins(found, count, algorithm.grid.reading.outputs)
