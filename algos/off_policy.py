"""What off-policy actor-critics share (SAC, CrossQ, TD3): acting, storing, minibatches for all updates.

An iteration steps all environments, adds the steps to the replay buffer, and takes gradient steps on
minibatches drawn from all that it holds. Between the fragments actions are in [-1, 1]; `step` stretches them
to the environment's bounds, so that its units count for nothing. What is replayed are observations as they
were; networks see them by the statistics of the moment.

Letters in shapes: `B` environments, `U` updates of an iteration, `N` samples of a minibatch.
"""

import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos import distributions, networks, outputs
from algos.acting import Actor, Policy, without_memory
from algos.agent import Agent
from algos.critic_readings import Distributions, Values, reading
from algos.hyperparameters import require, require_positive, whole_updates
from algos.networks import Network
from algos.replay import Replay, ReplayState, Step, Transition
from algos.rollout import episode_metrics, rollout
from envs import Box, Observation


class State(NamedTuple):
    """All that the next iteration needs."""

    learned: Any  # all that an update changes
    observation_statistics: Any  # as of `PPO`; None where observations are not normalised
    replay: ReplayState  # rows of B
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32


class OffPolicy(Agent):
    """Base of algorithms with an actor and two critics that learn from replay, for bounded actions.

    A subclass has also the fields annotated here, a `_begin`, a `_policy`, an `_actor`, a `_learn_from`, and
    says how many keys a sample of a minibatch gets: `keys_a_sample`.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Box,)
    default_env: ClassVar[str] = "Pendulum-v1"
    keys_a_sample: ClassVar[int]

    critic_network: Network | None  # of observations and actions, two values, each [N]

    @property
    def updates_per_iteration(self) -> int:
        """U, gradient steps in one iteration."""
        return whole_updates(self)

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        actor_key, critics_key, env_key, key = jax.random.split(key, 4)
        env_state, observation = self._reset(env_key)
        action = jnp.zeros((self.num_envs, *self.env.action_space.shape))
        return State(
            learned=self._first(actor_key, critics_key, observation, action),
            observation_statistics=self.normalizers.begin(self.env.observation_space),
            replay=self._replay.init(observation, action),
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=jnp.int32(0),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Some steps of all environments, and all updates that they are due."""
        key, rollout_key, sample_key, learn_key = jax.random.split(state.key, 4)
        actor, statistics = self._acting(state.learned), state.observation_statistics
        learning = state.iteration >= math.ceil(self.learning_starts / self.steps_per_iteration)
        env_state, observation, ((observations, actions), _, time_steps) = rollout(
            act=lambda observation, keys: (self.act(actor, statistics, learning, observation, keys), None),
            step=self.step,
            key=rollout_key,
            env_state=state.env_state,
            observation=state.observation,
            num_steps=self.num_steps,
        )
        replay = self._replay.add(state.replay, Step.of(observations, actions, time_steps))
        minibatches = jax.tree.map(self._cut, self._replay.sample(replay, sample_key).transition)
        learned, losses = self.learn(state.learned, statistics, minibatches, learn_key, learning)
        # Only now, so that all that one iteration acts on and learns from is normalised alike.
        if self.normalize_observation:
            statistics = self.observe(statistics, observations)
        state = State(learned, statistics, replay, env_state, observation, key, state.iteration + 1)
        return state, {**episode_metrics(time_steps), **losses}

    def actor(self, state: State) -> Actor:
        """How it acts with these parameters and statistics; `greedy` is without noise."""
        actor = self._acting(state.learned)

        def policy(observation):
            return self._policy(actor, self.normalizers.seen(state.observation_statistics, observation))

        return without_memory(policy, self._for_environment)

    # --- fragments; `step` is that of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0))
    def act(self, actor, statistics, learning, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`: uniform until learning begins."""
        # One key for both, of which only one is used.
        uniform = jax.vmap(Box(-1.0, 1.0, self.env.action_space.shape).sample)(keys)
        policy = self._policy(actor, self.normalizers.seen(statistics, observation))
        return jnp.where(learning, policy.sample(keys), uniform)

    @fdg.fragment("learner", in_axes=(None, None, 1, None, None), out_axes=None)
    def learn(self, learned, statistics, minibatches, key, learning):
        """One update for each of the minibatches `[U, N]`."""
        minibatches = minibatches._replace(
            observation=self.normalizers.seen(statistics, minibatches.observation),
            next_observation=self.normalizers.seen(statistics, minibatches.next_observation),
        )
        keys = jax.random.split(key, (self.updates_per_iteration, self.keys_a_sample, self.batch_size))
        updated, losses = jax.lax.scan(
            lambda learned, minibatch: self._learn_from(learned, *minibatch), learned, (minibatches, keys)
        )
        # Before learning begins updates are made too, and thrown away: fragments in a branch could not be
        # placed apart.
        learned = jax.tree.map(lambda new, old: jnp.where(learning, new, old), updated, learned)
        return learned, jax.tree.map(lambda x: jnp.where(learning, jnp.mean(x), jnp.nan), losses)

    def check_when_traced(self, state: State) -> None:
        """Refuses critics that do not give two values; a subclass also looks at its actor."""
        count, space = self.num_envs, self.env.action_space
        action = jax.ShapeDtypeStruct((count, *space.shape), jnp.float32)
        critics = jax.eval_shape(self._valued, state.learned, state.observation, action)
        outputs.twins(critics, count, self._reading.outputs)

    # --- what a subclass says ---

    def _first(self, actor_key: jax.Array, critics_key: jax.Array, observation: Any, action: Any) -> Any:
        """All that an update changes, at first; of observations and actions `[B, ...]` only types count."""
        actor = self._actor.init(actor_key, observation)
        return self._begin(actor, self._critics.init(critics_key, observation, action))

    def _begin(self, actor: Any, critics: Any) -> Any:
        """The same, from the first parameters."""
        raise NotImplementedError

    def _learn_from(self, learned: Any, transition: Transition, keys: jax.Array) -> tuple[Any, Any]:
        """One update on a minibatch `[N]`, `keys [keys_a_sample, N]`; its losses."""
        raise NotImplementedError

    def _policy(self, actor: Any, observation: Observation) -> Policy:
        """Distribution over actions in [-1, 1], for observations `[N, *obs]`."""
        raise NotImplementedError

    def _acting(self, learned: Any) -> Any:
        """What of all that is learned acts: `actor` of `_policy`."""
        return learned.parameters.actor

    def _valued(self, learned: Any, observation: Observation, action: jax.Array) -> Any:
        """What the critics say of actions `[N, *action]`: two values, each `[N]`."""
        return self._critics.apply(learned.parameters.critics, observation, action)

    @property
    def _actor(self) -> Network:
        raise NotImplementedError

    # --- parts ---

    def _check(self) -> None:
        super()._check()
        require_positive(self, "batch_size")
        space = self.env.action_space
        require(
            self,
            isinstance(space, Box) and space.is_bounded and np.issubdtype(np.dtype(space.dtype), np.floating),
            f"cannot act in the action space {space}: give it finite bounds and a floating dtype",
        )
        require(
            self,
            self.batch_size % self.num_envs == 0,
            f"num_envs={self.num_envs} does not divide batch_size={self.batch_size}: choose a divisor",
        )
        require(self, self.learning_starts >= 0, f"learning_starts={self.learning_starts}: it is below zero")
        # Refuse sizes that do not fit.
        _ = self.updates_per_iteration
        _ = self._replay
        _ = self._reading

    @property
    def _reading(self) -> Values | Distributions:
        """How what critics give is read."""
        return reading(self)

    def _lower(self, given: Any) -> jax.Array:
        """Of both critics' values the lower, `[N]`."""
        return jnp.minimum(*map(self._reading.value, given))

    def _errors(self, given: Any, target: jax.Array) -> jax.Array:
        """How far both critics are from their target, together."""
        first, second = given
        return self._reading.error(first, target) + self._reading.error(second, target)

    def _for_environment(self, action):
        return distributions.stretched(action, self.env.action_space)

    def _cut(self, x: jax.Array) -> jax.Array:
        """Samples `[U * N, ...]` into minibatches `[U, N, ...]`, both environment-major."""
        by_environment = x.reshape(self.num_envs, self.updates_per_iteration, -1, *x.shape[1:])
        return by_environment.swapaxes(0, 1).reshape(
            self.updates_per_iteration, self.batch_size, *x.shape[1:]
        )

    @property
    def _replay(self) -> Replay:
        """Draws the minibatches of all updates at once; no longer than the run fills it."""
        return Replay(
            num_envs=self.num_envs,
            buffer_size=min(self.buffer_size, self.num_iterations * self.steps_per_iteration),
            batch_size=self.updates_per_iteration * self.batch_size,
            discount=self.discount,
        )

    @property
    def _critics(self) -> Network:
        return self._computing(self._own("critic_network", "critic") or networks.twin_critics(
            self.env.observation_space, outputs=self._reading.outputs, **vars(self.layers),
        ))  # fmt: skip
