"""Cooperative value learning: `VDN`, and the base of `QMIX`.

Each agent has values of its own actions; a function of all agents' values, the mixture, is fitted to the
team's reward. The mixture increases with every agent's value, so the agents' greedy actions together are the
team's best action: agents act on their own observations and learn together ("centralised training,
decentralised execution"). Replay stores sequences (`algos/sequences.py`), for recurrent agents and multi-step
targets; gradient steps and the target network are those of DQN (`algos/dqn.py`).

For `MultiDiscrete` actions, each choice has values and is mixed like an agent: the number of values is the
sum of the numbers of options, not their product.

Shapes: `T` steps of a rollout, `B` environments, `A` agents, `M` choices of all agents (`A` if an action is
one choice), `n` actions of a choice, `L` steps of a sequence, `N` sequences of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import fdg
from algos import distributions, layers, networks
from algos.agent import Agent, Rollouts
from algos.checks import check_recurrent_values, check_sequences
from algos.distributions import Categorical, allowed_values, sizes
from algos.dqn import DQN, Exploration, TargetUpdates, discrete_space, epsilon_greedy, init_learned, iteration
from algos.layers import with_widths
from algos.memories import MemoryKind, MemoryTrunk, RecurrentNetwork, merge_axes, of_module, step_types
from algos.networks import actor_features, select_values
from algos.on_policy import environment_major
from algos.recurrent import AgentValues, as_recurrent
from algos.replaying import NetworkMemory, ReplayChoice, State
from algos.returns import lambda_returns
from algos.rings import time_first, time_major
from algos.rollout import Actor, Recollection
from algos.sequences import SequenceReplay, Sequences
from algos.values import NETWORK, AnyNetwork, ClippedOptimizer, Discount, Layers, Normalizers, Transforming
from envs import Discrete, Environment, MultiDiscrete, Observation, features_and_mask, num_agents
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require_positive, require_within


class Parameters(NamedTuple):
    """The trained parameters."""

    agents: Any  # of the network that all agents share
    mixer: Any  # of the mixture; an empty tuple if the mixture has no parameters


@dataclasses.dataclass(frozen=True)
class ValueDecomposition(Agent):
    """Base of `VDN` and `QMIX`: discrete actions of several agents, feed-forward or recurrent.

    The team's reward, and `episode_return`, are means over agents. Agents share parameters. Defaults are
    those of JaxMARL's `ql_rnn_mpe.yaml` (Rutherford et al. 2024, arXiv 2311.10090), but without a memory and
    with more gradient steps.

    A subclass defines the mixture by `_mix`, and by `_mixer_parameters` if the mixture has parameters.
    """

    several_agents: ClassVar[bool] = True
    default_env: ClassVar[str] = "MPE_simple_spread_v3"
    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete)

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=32, total_steps=500_000)
    buffer_size: int = hyperparameter(
        130_000, "capacity of the replay buffer in steps, over all environments"
    )
    batch_size: int = hyperparameter(32, "sequences of a gradient step, equally many from each environment")
    sequence_length: int | None = hyperparameter(
        None,
        "length of stored and sampled sequences, for backpropagation through time; None: a whole rollout",
    )
    learning_starts: int = hyperparameter(10_000, "environment steps before the first gradient step")
    num_updates: int = hyperparameter(4, "gradient steps in one iteration")
    optimizer_settings = ClippedOptimizer(learning_rate=5e-3, anneal_learning_rate=True, max_grad_norm=25.0)
    discounting = Discount()
    q_lambda: float = hyperparameter(0.0, "lambda of the targets; 0: one step, 1: whole sequences")
    reward_scale: float = hyperparameter(1.0, "factor of rewards, for values of moderate size")
    targets = TargetUpdates(target_period=200)
    exploration = Exploration(epsilon_end=0.05, exploration_fraction=0.1)
    double: bool = hyperparameter(
        True, "double Q-learning: one network selects the action, the other evaluates it"
    )
    dueling: bool = hyperparameter(False, "dueling network: a state value, and advantages of actions")
    priorities = ReplayChoice()
    agent_identity: bool = hyperparameter(True, "append each agent's one-hot index to its observation")
    memory_settings = NetworkMemory(memory_size=64)
    normalizers = Normalizers()
    layers = Layers(activation="relu")
    network: AnyNetwork | None = dataclasses.field(default=None, metadata=NETWORK)
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        require_positive(self, "reward_scale", "num_updates")
        require_within(self, 0, 1, "q_lambda")
        check_sequences(self)
        _ = self.buffer  # refuses sizes that do not fit

    updates_per_iteration = property(lambda self: self.num_updates)
    _first_learning_iteration = property(lambda self: self.buffer.first_ready_iteration(self.num_steps))

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        agents_key, mixer_key, env_key, key = jax.random.split(key, 4)
        env_state, observation = self._reset(env_key)
        features, _ = features_and_mask(observation)
        agents = self._network.init(agents_key, jax.tree.map(lambda x: x[None], features))
        memory = self._network.memory(self.num_envs)
        reward = jnp.zeros(self._reward_shape, jnp.float32)
        action = jnp.zeros((*reward.shape, *self.env.action_space.shape), jnp.int32)
        values = action.reshape(self.num_envs, -1).astype(jnp.float32)
        return State(
            learned=init_learned(
                Parameters(agents, self._mixer_parameters(mixer_key, values, observation)), self._optimizer
            ),
            observation_statistics=self.normalizers.begin(self.env.observation_space),
            replay=self.buffer.init_of(memory, observation, action, reward),
            env_state=env_state,
            observation=observation,
            recollection=Recollection(memory, jnp.ones(self.num_envs, bool)),
            key=key,
            iteration=jnp.int32(0),
            bonus=self._initial_bonus_state(observation, key),
            returns=self.normalizers.begin_returns(self._reward_shape),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Steps all environments into the buffer, then takes gradient steps on sequences."""
        return iteration(self, state, state.learned.parameters.agents)

    def actor(self, state: State) -> Actor:
        """Acts with each agent's best action, or samples as in training."""

        def act(memory, observation, start, keys, greedy):
            values, memory = self._one_step(
                state.learned.parameters.agents,
                self.normalizers.seen(state.observation_statistics, observation),
                Recollection(memory, start),
            )
            epsilon = self.exploration.epsilon(state.iteration, self.num_iterations)
            policy = Categorical(values) if greedy else epsilon_greedy(values, epsilon)
            return self._choose_actions(policy, keys, greedy), memory

        return Actor(self._network.memory, act)

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0, 0))
    def act(self, agents, statistics, epsilon, observation, recollection, keys):
        """`observation [B, A, *obs]`, `keys [B]` -> `action [B, A, *action]`, memory `[B, ...]`."""
        values, memory = self._one_step(agents, self.normalizers.seen(statistics, observation), recollection)
        return epsilon_greedy(values, epsilon).sample(keys), memory

    learn, gradient, update = DQN.learn, DQN.gradient, DQN.update

    def check_when_traced(self, state: State) -> None:
        """Refuses a network without a value for each action of each agent."""
        types = step_types(self._network, state.learned.parameters.agents, state)
        actions = sum(sizes(discrete_space(self.env)))
        check_recurrent_values(types, actions, (1, self.num_envs, self._num_agents))

    # --- defined by subclasses ---

    def _mixer_parameters(self, key: jax.Array, values: jax.Array, observation: Observation) -> Any:
        """Initial parameters of the mixture, for `values [N, M]` at `observation [N, A, *obs]`."""
        return ()

    def _mix(self, mixer: Any, values: jax.Array, observation: Observation) -> jax.Array:
        """The joint value, `[N]`, of the agents' values `[N, M]`.

        `observation [N, A, *obs]` are the observations of all agents, `privileged` parts included.
        """
        raise NotImplementedError

    def _loss(self, *arguments):
        return self.loss(*arguments)

    def loss(self, parameters: Parameters, target_parameters: Parameters, minibatch: Sequences, weight):
        """Half the mean squared error of the joint values of the actions taken (QMIX's paper, equation 6)."""
        sequences = jax.tree.map(time_first, minibatch._replace(memory=None))
        steps = sequences.steps
        values, memories = self._unroll(
            parameters.agents, minibatch.memory, steps.observation, sequences.start
        )
        taken = select_values(values, steps.action).reshape(*steps.terminated.shape, -1)
        rows = jax.tree.map(environment_major, (taken, steps.observation))
        value = time_major(self._mix(parameters.mixer, *rows), len(values))
        target = self._target(parameters, target_parameters, minibatch.memory, sequences, memories)
        error = jax.lax.stop_gradient(target) - value  # [L, N]
        loss = jnp.mean(weight * jnp.mean(0.5 * jnp.square(error), axis=0))
        metrics = {"loss": loss, "value": jnp.mean(value)}
        return loss, (jnp.mean(jnp.abs(error), axis=0), metrics)

    def _target(
        self,
        parameters: Parameters,
        target_parameters: Parameters,
        memory: Any,
        sequences: Sequences,
        memories: Any,
    ) -> jax.Array:
        """The targets of the joint values: `[L, N]`.

        `memory [N, ...]` is the memory before each of the sequences `[L, N]`; `memories [L, N, ...]` are the
        trained agents' memories after each step.
        """
        steps, start = sequences.steps, sequences.start
        _, target_memories = self._unroll(target_parameters.agents, memory, steps.observation, start)

        # Values at the observations after each step, with the memory after that step, before any reset.
        def next_values(agents: Any, memories: Any) -> jax.Array:
            final, recollection = jax.tree.map(
                environment_major, (steps.final_observation, Recollection(memories, start))
            )
            recollection = recollection._replace(start=jnp.zeros_like(recollection.start))
            values, _ = self._one_step(agents, final, recollection)
            return values  # [N * L, A, ..., n]

        values = next_values(target_parameters.agents, target_memories)
        # Double Q-learning: van Hasselt, Guez and Silver 2016, arXiv 1509.06461, equation 4.
        choosing_values = next_values(parameters.agents, memories) if self.double else values
        best = select_values(values, jnp.argmax(choosing_values, axis=-1))
        final = jax.tree.map(environment_major, steps.final_observation)
        next_value = self._mix(target_parameters.mixer, best.reshape(best.shape[0], -1), final)
        return lambda_returns(
            self.reward_scale * jnp.mean(steps.reward, axis=-1),
            time_major(next_value, self._steps_per_sequence),
            steps.terminated, steps.truncated, self.discount, self.q_lambda,
        )  # fmt: skip

    def _mixer_state(self, observation: Observation) -> jax.Array:
        """Concatenates all agents' observations, `privileged` parts included: `[N, S]` float32."""
        features, _ = features_and_mask(observation)
        agents = jax.tree.map(merge_axes, features)
        flat = jax.tree.leaves(layers.features(agents, self.env.observation_space, convolve=False))
        rows = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1)
        return rows.reshape(-1, self._num_agents * rows.shape[-1])

    def _unroll(self, agents, memory, observation, start):
        """Values of all actions `[T, B, A, n]`, and the memory after each step.

        Values are `-inf` for actions that are not allowed. `MultiDiscrete` actions have values `[T, B, A,
        choices, n]`, padded with `-inf`.
        """
        features, action_mask = features_and_mask(observation)
        values, memories = self._network.unroll(agents, memory, features, start)
        return allowed_values(discrete_space(self.env), values, action_mask), memories

    def _one_step(self, agents, observation, recollection: Recollection):
        """Values of all actions `[B, A, ..., n]` at observations `[B, A, *obs]`, and the next memory."""
        memory, start = recollection
        observation, start = jax.tree.map(lambda x: x[None], (observation, start))
        return jax.tree.map(lambda x: x[0], self._unroll(agents, memory, observation, start))

    @property
    def _steps_per_sequence(self) -> int:
        return self.num_steps if self.sequence_length is None else self.sequence_length

    @property
    def _num_agents(self) -> int:
        agents = num_agents(self.env)
        assert agents is not None  # checked when constructed
        return agents

    @property
    def buffer(self) -> SequenceReplay:
        """The replay buffer of sequences."""
        return self.priorities.of(
            self,
            kind=SequenceReplay,
            buffer_size=self.buffer_size,
            batch_size=self.batch_size,
            learning_starts=self.learning_starts,
            sequence_length=self._steps_per_sequence,
        )

    @property
    def _network(self) -> RecurrentNetwork:
        network = networks.user_network(self, "network", "actor")
        if network is not None:
            return networks.with_precision(self, as_recurrent(network, leading_axes=3, actor_critic=False))
        layers, memory, space = self.layers, self._memory_kind, self.env.observation_space
        if memory is not None and layers.hidden is None:
            layers = dataclasses.replace(layers, hidden=(memory.size,))
        module = AgentQNetwork(
            space, sizes(discrete_space(self.env)), self._num_agents, with_widths(layers, space),
            memory, self.dueling, self.agent_identity,
        )  # fmt: skip
        return networks.with_precision(self, of_module(module))

    @property
    def _memory_kind(self) -> MemoryKind | None:
        return None if self.memory is None else MemoryKind.of(self.memory_settings, self.memory)


@dataclasses.dataclass(frozen=True)
class VDN(ValueDecomposition, presets="VDN"):
    """VDN for discrete actions of several agents, feed-forward or recurrent (`memory`).

    Sunehag et al. 2018, "Value-Decomposition Networks For Cooperative Multi-Agent Learning", arXiv
    1706.05296.

    >>> import envs
    >>> VDN(env=envs.make("probe:agents")).steps_per_iteration
    256
    """

    def _mix(self, mixer, values: jax.Array, observation) -> jax.Array:
        """The sum of values (the paper's section 3, "the joint action-value function")."""
        return jnp.sum(values, axis=-1)


# --- values of the actions of each agent ---


class AgentQNetwork(nn.Module):
    """The values of each agent's actions, by one trunk that all agents share.

    The trunk has dense layers (after a convolution, for images), optionally a memory and a dense layer, and a
    head, as in QMIX (Rashid et al. 2018, figure 2c). Inputs exclude `privileged` parts; with `identity` they
    include each agent's index, one-hot.
    """

    observation_space: ObservationSpace
    choices: tuple[int, ...]
    num_agents: int
    layers: Layers
    memory_kind: MemoryKind | None
    dueling: bool
    identity: bool

    @nn.compact
    def __call__(self, memory: Any, observation: Any, start: jax.Array) -> AgentValues:  # noqa: D102
        # Without a memory, rows are environment-major, so that a sharding of environments becomes a sharding
        # of rows.
        environments_first = self.memory_kind is None
        if environments_first:
            observation, start = jax.tree.map(time_first, (observation, start))
        count = start.size * self.num_agents
        flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[3:]), observation)
        inputs = [actor_features(flat, self.observation_space, self.layers.convolve)]
        if self.identity:
            inputs.append(jnp.tile(jnp.eye(self.num_agents, dtype=jnp.float32), (start.size, 1)))
        outputs = sum(self.choices) + self.dueling
        trunk = MemoryTrunk(self.layers, self.memory_kind, outputs, 1.0, self.num_agents, name="q")
        values, memories = trunk(memory, inputs, start)
        if self.dueling:
            values = distributions.dueling(values, self.choices)
        return AgentValues(time_first(values) if environments_first else values, memories)

    def initial_memory(self, num_envs: int) -> Any:
        """The initial memory."""
        return () if self.memory_kind is None else self.memory_kind.empty((num_envs, self.num_agents))
