"""Actor-critics that learn from replay (SAC, CrossQ, TD3), as functions: acting, storing, gradient steps.

An iteration steps all environments, adds the steps to the replay buffer, and takes gradient steps on
minibatches drawn from all that it holds. Between the fragments actions are in [-1, 1]; `step` stretches them
to the environment's bounds, so that its units count for nothing. What is replayed are observations as they
were; networks see them by the statistics of the moment.

Letters in shapes: `B` environments, `U` gradient steps of an iteration, `N` samples of a minibatch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos import given
from algos.replay import Replay, ReplayState, Step
from algos.rollout import Actor, episode_metrics, rollout, without_memory
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
    """Where steps are kept, as many as a run takes; draws the minibatches of all gradient steps at once."""
    return Replay(
        num_envs=algorithm.num_envs,
        buffer_size=min(algorithm.buffer_size, algorithm.num_iterations * algorithm.steps_per_iteration),
        batch_size=algorithm.updates_per_iteration * algorithm.batch_size,
        discount=algorithm.discount,
    )


# --- methods, which classes take as their own: `init = off_policy.init` ---
#
# An algorithm says all that an update changes, `_first(actor_key, critics_key, observation [B, *obs],
# action [B, *action])`, of which only types count; what of it acts, `_acting(learned)`; one gradient step,
# `_learn_from(learned, minibatch [N], keys)`; and how many keys each sample of that takes, `_keys`.


def init(self: Any, key: jax.Array) -> State:
    """The state before the first iteration."""
    actor_key, critics_key, env_key, key = jax.random.split(key, 4)
    env_state, observation = self._reset(env_key)
    action = jnp.zeros((self.num_envs, *self.env.action_space.shape))
    return State(
        learned=self._first(actor_key, critics_key, observation, action),
        observation_statistics=self.normalizers.begin(self.env.observation_space),
        replay=self.buffer.init(observation, action),
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        bonus=self._first_bonus(observation),
    )


def iterate(self: Any, state: State) -> tuple[State, dict[str, jax.Array]]:
    """Some steps of all environments, and all gradient steps that they are due."""
    key, rollout_key, sample_key, learn_key = jax.random.split(state.key, 4)
    acting, statistics, replay = self._acting(state.learned), state.observation_statistics, self.buffer
    learning = state.iteration >= math.ceil(self.learning_starts / self.steps_per_iteration)
    env_state, observation, ((observations, actions), _, time_steps) = rollout(
        act=lambda observation, keys: (self.act(acting, statistics, learning, observation, keys), None),
        key=rollout_key,
        env_state=state.env_state,
        observation=state.observation,
        **self._rolling,
    )
    bonus, time_steps, paid = self._paid(state.bonus, time_steps)
    replay_state = replay.add(state.replay, Step.of(observations, actions, time_steps))
    samples = replay.sample(replay_state, sample_key).transition
    drawn = jax.tree.map(lambda x: minibatches(x, self.num_envs, self.updates_per_iteration), samples)
    drawn = self.transforming.rows(drawn, state.learned, learn_key)
    learned, losses = self.learn(state.learned, statistics, drawn, learn_key, learning)
    # Only now, so that all that one iteration acts on and learns from is normalised alike.
    if self.normalize_observation:
        statistics = self.observe(statistics, observations)
    state = State(learned, statistics, replay_state, env_state, observation, key, state.iteration + 1, bonus)
    return state, {**episode_metrics(time_steps), **losses, **paid}


def actor(self: Any, state: State) -> Actor:
    """How it acts with these parameters and statistics; `greedy` is without noise."""

    def policy(observation):
        seen = self.normalizers.seen(state.observation_statistics, observation)
        return self._policy(self._acting(state.learned), seen)

    return without_memory(policy, self._for_environment)


@fdg.fragment("actor", in_axes=(None, None, None, 0, 0))
def act(self, actor, statistics, learning, observation, keys):
    """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`: uniform until learning begins."""
    policy = self._policy(actor, self.normalizers.seen(statistics, observation))
    # One key for both, of which only one is used.
    uniform = jax.vmap(Box(-1.0, 1.0, self.env.action_space.shape).sample)(keys)
    return jnp.where(learning, policy.sample(keys), uniform)


@fdg.fragment("learner", in_axes=(None, None, 1, None, None), out_axes=None)
def learn(self, learned, statistics, minibatches, key, learning):
    """One gradient step for each of the stored minibatches `[U, N]`, and the means of the losses."""
    see = functools.partial(self.normalizers.seen, statistics)
    keys = jax.random.split(key, (self.updates_per_iteration, self._keys, self.batch_size))
    minibatches = minibatches._replace(
        observation=see(minibatches.observation), next_observation=see(minibatches.next_observation)
    )
    after, losses = jax.lax.scan(
        lambda learned, minibatch: self._learn_from(learned, *minibatch), learned, (minibatches, keys)
    )
    # Before learning begins steps are taken too, and thrown away: fragments in a branch could not be placed
    # apart.
    learned = jax.tree.map(lambda new, old: jnp.where(learning, new, old), after, learned)
    return learned, jax.tree.map(lambda x: jnp.where(learning, jnp.mean(x, axis=0), jnp.nan), losses)


def minibatches(x: jax.Array, num_envs: int, updates: int) -> jax.Array:
    """Samples `[U * N, ...]` into minibatches `[U, N, ...]`, both environment-major."""
    by_environment = x.reshape(num_envs, updates, -1, *x.shape[1:])
    return by_environment.swapaxes(0, 1).reshape(updates, -1, *x.shape[1:])


def check_critics(algorithm: Any, critics: Callable[..., Any], state: State) -> None:
    """Refuses critics that do not give two values: `critics(learned, observation, action)`."""
    count, space = algorithm.num_envs, algorithm.env.action_space
    action = jax.ShapeDtypeStruct((count, *space.shape), jnp.float32)
    found = jax.eval_shape(critics, state.learned, state.observation, action)
    given.twins(found, count, algorithm.grid.reading.outputs)
