"""PPO with recurrent actor and critic, for partially observed environments.

PPO learns from sequences of steps, each with the actor's memory at its start. The network is unrolled over
the steps, and its memory is reset where an episode starts. Stored memories become stale as parameters change,
so a sequence can start with the burn-in of R2D2 (Kapturowski et al. 2019, "Recurrent Experience Replay in
Distributed Reinforcement Learning", ICLR, section 3), here for on-policy sequences. A feed-forward network is
treated as recurrent with an empty memory (`algos.recurrent.as_recurrent`).

Shapes: `T` steps of a rollout, `B` environments, `L` steps of a sequence, `K` steps of burn-in, `S`
sequences.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import distributions, on_policy
from algos.agent import Agent, Rollouts
from algos.checks import check_divides, check_sequences
from algos.losses import Advantages, Decision, Distribution, ProximalLoss, explained_variance, values_after
from algos.memories import MemoryKind, RecurrentNetwork
from algos.on_policy import LEARNED, Epochs, PolicyLayers, State, environment_major
from algos.ppo import PPO
from algos.recurrent import check_recurrent_actor_critic, recurrent_actor_critic_of
from algos.replaying import NetworkMemory
from algos.rings import time_first
from algos.rollout import Actor, Recollection, episode_metrics
from algos.values import NETWORK, ClippedOptimizer, Network, Normalizers, Transforming
from envs import (
    Box,
    Discrete,
    Environment,
    MultiDiscrete,
    Observation,
    TimeStep,
    features_and_mask,
    num_agents,
)
from fdg.settings.fields import hyperparameter, require


class Past(NamedTuple):
    """The last steps before a rollout, the burn-in of its first sequences."""

    memory: Any  # [B, ...], before those steps
    observation: Observation  # [B, K, *obs]
    start: jax.Array  # [B, K] bool


class Minibatch(NamedTuple):
    """Sequences for one gradient step."""

    memory: Any  # [S, ...], the actor's before the burn-in; without a burn-in, before the sequence
    burn_in: tuple[Observation, jax.Array] | None  # observation [S, K, *obs] and start [S, K]
    observation: Observation  # [S, L, *obs], normalised if the settings say so
    start: jax.Array  # [S, L] bool, an episode starts at this step
    action: jax.Array  # [S, L, *action]
    decision: Decision  # [S, L]
    advantage: jax.Array  # [S, L] float32
    target: jax.Array  # [S, L] float32


@dataclasses.dataclass(frozen=True)
class RecurrentPPO(Agent, presets="RecurrentPPO"):
    """PPO with a memory in the actor and one in the critic: a GRU, or another kind of `memory`.

    Minibatches consist of whole sequences. Defaults are those of `PPO`, with the 8 environments of CleanRL's
    `ppo_atari_lstm.py`, and the network of PureJaxRL's `ppo_rnn.py`.

    >>> import envs
    >>> RecurrentPPO(env=envs.make("probe:memory"), sequence_length=32).num_iterations
    488
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)
    central_value: ClassVar[bool] = False  # True if one critic sees the observations of all agents

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=128, total_steps=500_000)
    epochs = Epochs()
    optimizer_settings = ClippedOptimizer(learning_rate=2.5e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    advantages = Advantages()
    objective = ProximalLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: RecurrentNetwork | Network | None = dataclasses.field(default=None, metadata=NETWORK)
    memory: Literal["gru", "lstm", "mingru", "transformer"] | None = hyperparameter(
        None, "kind of memory; transformer: a causal one, over a window of steps (None: gru)"
    )
    memory_size: int = hyperparameter(128, "width of the memory and the layer after it")
    memory_settings = NetworkMemory()
    sequence_length: int | None = hyperparameter(
        None, "steps of backpropagation through time; None: the whole rollout"
    )
    burn_in: int = hyperparameter(0, "steps before each sequence that recompute its memory, without gradient")
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        check_sequences(self)
        require(
            self,
            0 <= self.burn_in <= self._steps_per_sequence,
            f"burn_in={self.burn_in}: it must be from 0 to the length of a sequence,"
            f" {self._steps_per_sequence}",
        )
        if self._steps_per_sequence > 1:
            of_env = "num_steps / sequence_length"
            of_all = "the number of sequences, num_envs * num_steps / sequence_length"
            check_divides(self, self.num_steps // self._steps_per_sequence, of_env, of_all)
        else:
            check_divides(self, self.num_steps)

    updates_per_iteration = property(lambda self: self.epochs.updates)

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        state = on_policy.begin(self, key, keep_statistics=True, memory=self._network.memory)
        if not self.burn_in:
            return state
        # There is no past yet. Copies of the first observation fill it; as starts, they reset the memory.
        past = Past(
            state.recollection.memory,
            jax.tree.map(lambda x: jnp.stack([x] * self.burn_in, axis=1), state.observation),
            jnp.ones((self.num_envs, self.burn_in), bool),
        )
        return state._replace(past=past)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)

        def act(observation, recollection, keys):
            action, decision, memory = self.act(
                state.parameters, state.observation_statistics, observation, recollection, keys
            )
            return action, (decision, recollection.start), memory

        trajectory, new_fields, bonus_metrics = on_policy.rollout_with_bonus(self, state, act, rollout_key)
        learned, running_return, past, metrics = self.learn(
            tuple(getattr(state, name) for name in LEARNED[:4]),
            state.running_return,
            state.recollection.memory,
            state.past,
            self.transforming.rows(trajectory, state.parameters, shuffle_key),
            shuffle_key,
        )
        new_fields |= dict(zip(LEARNED[:4], learned, strict=True))
        new_fields |= {"running_return": running_return, "past": past}
        state = state._replace(key=key, iteration=state.iteration + 1, **new_fields)
        return state, {**metrics, **bonus_metrics}

    def actor(self, state: State) -> Actor:
        """The actor with these parameters and statistics; it carries its own memory."""

        def act(memory, observation, start, keys, greedy):
            normalized = self.normalizers.seen(state.observation_statistics, observation)
            policy, _, memory = self._one_step(state.parameters, normalized, Recollection(memory, start))
            return self._choose_actions(policy, keys, greedy), memory

        return Actor(self._network.memory, act)

    # --- fragments; `step` and `update` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0, 0))
    def act(self, parameters, statistics, observation, recollection, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, `Decision [B]`, memory `[B, ...]`."""
        policy, value, memory = self._one_step(
            parameters, self.normalizers.seen(statistics, observation), recollection
        )
        action = policy.sample(keys)
        return action, Decision(policy.log_prob(action), value), memory

    @fdg.fragment("learner", in_axes=(None, 0, 0, 0, 1, None), out_axes=(None, 0, 0, None))
    def learn(self, learned, running_return, memory, past, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]` that began with a memory `[B, ...]`."""
        parameters, optimizer_state, observation_statistics, return_statistics = learned
        observation, action, (decision, start), time_step = trajectory
        per_agent_step = ends_per_agent(time_step)
        reward, running_return, return_statistics = self.normalizers.reward(
            per_agent_step, running_return, return_statistics, self.discount
        )
        normalized = self.normalizers.seen(observation_statistics, observation)
        _, _, memories = self._unroll(parameters, memory, normalized, start)
        next_value = self._next_value(parameters, observation_statistics, decision.value, time_step, memories)
        advantage, target = self.advantage(reward, decision.value, next_value, per_agent_step)

        before = jax.tree.map(lambda first, x: jnp.concatenate([first[None], x[:-1]]), memory, memories)
        sequences = (normalized, start, action, decision, advantage, target)
        samples = Minibatch(
            self._memory_before_each(memory if past is None else past.memory, before),
            self._burn_in(past, observation_statistics, observation, start),
            *jax.tree.map(
                lambda x: _sequence_rows(x.reshape(-1, self._steps_per_sequence, *x.shape[1:])), sequences
            ),
        )
        parameters, optimizer_state, losses = self.epochs.learn(
            key, samples, self.num_envs, parameters, optimizer_state, self.gradient, self.update
        )
        observation_statistics = self.normalizers.update(observation_statistics, observation)
        metrics = {
            **episode_metrics(time_step),
            **losses,
            "explained_variance": explained_variance(target, decision.value),
        }
        return (
            (parameters, optimizer_state, observation_statistics, return_statistics),
            running_return,
            self._next_past(before, observation, start),
            metrics,
        )

    gradient, advantage = PPO.gradient, PPO.advantage

    def check_when_traced(self, state: State) -> None:
        """Refuses a network whose `unroll` gives no `Output`, or one unfit for the action space."""
        check_recurrent_actor_critic(self, self._network, state)

    def loss(self, parameters: Any, minibatch: Minibatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """PPO's loss over a minibatch of sequences `[S]`, and its terms."""
        policy, value = self._predict(parameters, minibatch)
        return self.objective.of(policy, value, minibatch)

    def _predict(self, parameters: Any, minibatch: Minibatch) -> tuple[Distribution, jax.Array]:
        """Distribution over actions, and value, of each step of the sequences, `[S, L]`."""
        memory = minibatch.memory
        if minibatch.burn_in is not None:
            # R2D2, section 3: the burn-in only updates the memory.
            _, _, memories = self._unroll(parameters, memory, *jax.tree.map(time_first, minibatch.burn_in))
            memory = jax.lax.stop_gradient(jax.tree.map(lambda x: x[-1], memories))
        steps = jax.tree.map(time_first, (minibatch.observation, minibatch.start))
        policy, value, _ = self._unroll(parameters, memory, *steps)
        return jax.tree.map(time_first, (policy, value))

    def _next_value(self, parameters, statistics, value, time_step, memories):
        """Value of the observation after each step, before any reset: `[T, B]`.

        The critic uses its memory after that step, `[T, B, ...]`, even at the end of an episode.
        """

        def value_of(final):
            observation, memory = final
            recollection = Recollection(memory, jnp.zeros(self.num_envs, bool))
            return self._one_step(parameters, self.normalizers.seen(statistics, observation), recollection)[1]

        return values_after(value, time_step, value_of, (time_step.final_observation, memories))

    def _unroll(self, parameters, memory, observation, start):
        """Distribution over actions and value `[T, B]`, and the memory after each step `[T, B, ...]`."""
        features, action_mask = features_and_mask(observation)
        output = self._network.unroll(parameters, memory, features, start)
        policy = distributions.for_space(self.env.action_space).distribution(output.policy)
        return distributions.masked(policy, action_mask), output.value, output.memory

    def _one_step(self, parameters, observation, recollection: Recollection):
        """Distribution over actions, value, and next memory, all `[B]`, for observations `[B, *obs]`."""
        memory, start = recollection
        observation, start = jax.tree.map(lambda x: x[None], (observation, start))
        return jax.tree.map(lambda x: x[0], self._unroll(parameters, memory, observation, start))

    def _memory_before_each(self, first, before):
        """The memory at the start of each sequence, or of its burn-in: `[S, ...]`.

        `first [B, ...]` is the memory before the rollout, or before the burn-in of its first sequences;
        `before [T, B, ...]` is the memory before each step of the rollout.
        """
        if self._steps_per_sequence == self.num_steps:  # each sequence is a whole rollout
            return first
        start, stop = self._steps_per_sequence - self.burn_in, self.num_steps - self.burn_in
        return jax.tree.map(
            lambda first, x: environment_major(
                jnp.concatenate([first[None], x[start : stop : self._steps_per_sequence]])
            ),
            first,
            before,
        )

    def _burn_in(self, past: Past | None, statistics, observation, start):
        """The burn-in of each sequence: normalised observations `[S, K, *obs]`, and starts `[S, K]`."""
        if past is None:
            return None
        earlier = jax.tree.map(time_first, (past.observation, past.start))
        # Rows are counted from the oldest step of `past`, so the burn-in of a sequence that starts at step
        # `t` of the rollout consists of the rows from `t` to before `t + K`.
        starts = range(0, self.num_steps, self._steps_per_sequence)
        rows = jnp.stack([jnp.arange(t, t + self.burn_in) for t in starts])
        observation, start = jax.tree.map(
            lambda old, new: _sequence_rows(jnp.concatenate([old, new])[rows]), earlier, (observation, start)
        )
        return self.normalizers.seen(statistics, observation), start

    def _next_past(self, before, observation, start) -> Past | None:
        """The burn-in of the next rollout's first sequences: the last steps of this one."""
        if not self.burn_in:
            return None
        last = jax.tree.map(lambda x: time_first(x[-self.burn_in :]), (observation, start))
        return Past(jax.tree.map(lambda x: x[-self.burn_in], before), *last)

    _has_memory = property(lambda self: True)  # a subclass may have feed-forward networks

    @property
    def _steps_per_sequence(self) -> int:
        if not self._has_memory:
            return 1
        return self.num_steps if self.sequence_length is None else self.sequence_length

    @property
    def _network(self) -> RecurrentNetwork:
        kind = self._memory_kind if self._has_memory else None
        return recurrent_actor_critic_of(self, kind, num_agents(self.env), self.central_value)

    @property
    def _memory_kind(self) -> MemoryKind:
        return MemoryKind.of(self.memory_settings, self.memory or "gru")


def ends_per_agent(time_step: TimeStep) -> TimeStep:
    """Broadcasts the ends of episodes `[T, B]` to the shape of rewards; with several agents `[T, B, A]`."""

    def broadcast(ended: jax.Array) -> jax.Array:
        agent_axes = time_step.reward.ndim - ended.ndim
        return jnp.broadcast_to(ended.reshape(*ended.shape, *(1,) * agent_axes), time_step.reward.shape)

    return time_step._replace(
        terminated=broadcast(time_step.terminated), truncated=broadcast(time_step.truncated)
    )


def _sequence_rows(x: jax.Array) -> jax.Array:
    """Reshapes sequences `[C, L, B, ...]`, C per environment, to environment-major rows `[B * C, L, ...]`."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(-1, *x.shape[2:])
