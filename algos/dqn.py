"""Deep Q-learning (Mnih et al. 2015, Nature 518, "Human-level control through deep reinforcement learning").

Options: double Q-learning, dueling networks, n-step returns, prioritised replay.

For `MultiDiscrete` actions, the network has one value for each option of each choice, so the number of values
is the sum of the numbers of options, not their product. Each choice is a branch with its own values and its
own exploration (Tavakoli et al. 2018, arXiv 1711.08946). All branches are fitted to one target, the mean of
their best values (equation 6).

Shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch, `M` choices.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import registry, replaying
from algos.agent import Agent, Rollouts
from algos.replaying import ExplorerChoice, MemoryChoice, ReplayUpdates, State, StepReplay, Transition
from algos.rollout import Actor
from algos.values import NETWORK, AnyNetwork, ClippedOptimizer, Discount, Layers, Normalizers, Transforming
from envs import Discrete, Environment, MultiDiscrete, Observation, features_and_mask
from fdg.settings.fields import hyperparameter, require, require_positive, require_within
from fdg.settings.parts import Part

linear = replaying.linear  # its name in the previous release was `algos.exploration.linear`

# --- acting: epsilon-greedy ---


@dataclasses.dataclass(frozen=True)
class Exploration(Part):
    """The schedule of random actions."""

    epsilon_start: float = hyperparameter(1.0, "initial probability of a random action")
    epsilon_end: float = hyperparameter(0.05, "final probability of a random action")
    exploration_fraction: float = hyperparameter(0.5, "share of the run over which it falls linearly")

    def epsilon(self, iteration: jax.Array, num_iterations: int) -> jax.Array:
        """Probability of a random action in an iteration: `[]` float32."""
        duration = self.exploration_fraction * num_iterations
        return replaying.linear(self.epsilon_start, self.epsilon_end, duration, iteration)

    def check(self, algorithm: Any) -> None:
        """Refuses a probability or a fraction outside of [0, 1]."""
        require_within(algorithm, 0, 1, "epsilon_start", "epsilon_end", "exploration_fraction")


def epsilon_greedy(values: jax.Array, epsilon: float | jax.Array) -> Any:
    """The distribution that takes the best action, or with probability `epsilon` a random allowed one.

    Watkins 1989, section 8.1. `values [..., n]` float32 are `-inf` where an action is not allowed. If
    `epsilon` is below one, `mode()` of the result is the best action.

    >>> policy = epsilon_greedy(jnp.array([[1.0, 3.0, 2.0, -jnp.inf]]), 0.3)
    >>> [round(float(p), 3) for p in jnp.exp(policy.logits[0])]
    [0.1, 0.8, 0.1, 0.0]
    """
    allowed = values > -jnp.inf
    uniform = allowed / jnp.sum(allowed, axis=-1, keepdims=True)
    best = jax.nn.one_hot(jnp.argmax(values, axis=-1), values.shape[-1], dtype=values.dtype)
    probability = (1.0 - epsilon) * best + epsilon * uniform
    return registry.option("distributions").Categorical(jnp.log(probability))


# --- values of actions ---


def discrete_space(env: Environment) -> Discrete | MultiDiscrete:
    """The environment's action space; the algorithm's constructor has checked it."""
    space = env.action_space
    assert isinstance(space, Discrete | MultiDiscrete)
    return space


def action_values(
    network: Any, parameters: Any, observation: Observation, space: Discrete | MultiDiscrete
) -> jax.Array:
    """Q of every action `[N, n]`, for observations `[N, *obs]` after normalisation.

    With several choices the values are `[N, M, n]`, where n is the largest number of options. Values are
    `-inf` for actions that are not allowed, and for padding.
    """
    features, action_mask = features_and_mask(observation)
    outputs = network.apply(parameters, features)
    return registry.option("distributions").allowed_values(space, outputs, action_mask)


def mean_over_choices(values: jax.Array) -> jax.Array:
    """Averages values of several choices `[N, M]` to `[N]`; values of one choice, `[N]`, are unchanged.

    >>> mean_over_choices(jnp.array([[1.0, 3.0]])).tolist(), mean_over_choices(jnp.array([1.0, 3.0])).tolist()
    ([2.0], [1.0, 3.0])
    """
    return values if values.ndim == 1 else jnp.mean(values, -1)


def broadcast_to_choices(x: jax.Array, values: jax.Array) -> jax.Array:
    """Reshapes `x [N]` to broadcast with `values`, `[N]` or `[N, M]`."""
    return x if values.ndim == 1 else x[:, None]


# --- replay with a target network: `DQN` and its variants, `VDN` and `QMIX` ---


class Learned(NamedTuple):
    """Everything that gradient steps change."""

    parameters: Any
    target_parameters: Any  # older parameters, for targets
    optimizer_state: Any
    updates: jax.Array  # int32, gradient steps so far


def init_learned(parameters: Any, optimizer: optax.GradientTransformation) -> Learned:
    """The initial `Learned`, with copied parameters as targets."""
    return Learned(parameters, jax.tree.map(jnp.copy, parameters), optimizer.init(parameters), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class TargetUpdates(Part):
    """How the target network follows the trained network."""

    target_period: int = hyperparameter(50, "gradient steps between updates of the target network")
    target_rate: float = hyperparameter(
        1.0, "step size of each update: 1 copies; a small one with target_period=1 is Polyak averaging"
    )

    def advance(self, learned: Learned, parameters: Any, optimizer_state: Any, ready: jax.Array) -> Learned:
        """The state after a gradient step to these parameters; unchanged unless the buffer is `ready`."""
        updates = learned.updates + ready
        rate = jnp.where(ready & (updates % self.target_period == 0), self.target_rate, 0.0)
        target_parameters = optax.incremental_update(parameters, learned.target_parameters, rate)
        return Learned(parameters, target_parameters, optimizer_state, updates)

    def check(self, algorithm: Any) -> None:
        """Refuses a period that is not positive, and a rate outside of [0, 1]."""
        require_positive(algorithm, "target_period")
        require_within(algorithm, 0, 1, "target_rate")


def gradient_steps(
    self: Any, state: Any, replay: Any, key: jax.Array
) -> tuple[Learned, Any, dict[str, jax.Array]]:
    """Takes all gradient steps of an iteration of `self`, the algorithm, one after another.

    `replay` is the buffer's state. Returns the parameters with their optimiser state, the buffer's state, and
    the mean losses.
    """
    buffer, keys = self.buffer, jax.random.split(key, self.updates_per_iteration)
    ready, beta = buffer.is_ready(replay), self.priorities.beta(state.iteration, self.num_iterations)

    def one_step(carry, key_or_sample):
        learned, replay = carry
        sample = buffer.sample(replay, key_or_sample) if buffer.has_priorities else key_or_sample
        if buffer.has_priorities:
            minibatches = jax.tree.map(lambda x: x[None], sample.transition)
            minibatches = replaying.transform_and_scale(self, state, minibatches, learned, key_or_sample)
            sample = sample._replace(transition=jax.tree.map(lambda x: x[0], minibatches))
        weight = buffer.weight(sample, beta)
        learned, error, losses = self.learn(
            learned, state.observation_statistics, sample.transition, weight, ready
        )
        # Proportional prioritisation, equation 1 of Schaul et al.; 1e-6 keeps priorities above zero.
        return (learned, buffer.prioritize(replay, sample.indices, jnp.abs(error) + 1e-6)), losses

    # If errors do not change priorities, all minibatches are drawn at once.
    keys_or_samples: Any = keys if buffer.has_priorities else buffer.samples(replay, keys)
    if not buffer.has_priorities:
        rows = replaying.transform_and_scale(self, state, keys_or_samples.transition, state.learned, keys[0])
        keys_or_samples = keys_or_samples._replace(transition=rows)
    (learned, replay), losses = jax.lax.scan(one_step, (state.learned, replay), keys_or_samples)
    return learned, replay, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)


def iteration(self: Any, state: Any, parameters: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Steps all environments into the buffer, then takes gradient steps on minibatches.

    `parameters` are the actor's. `act` takes an `amount` of exploration: the probability of a random action,
    or with a user's explorer the completed fraction of the run.
    """
    key, rollout_key, replay_key = jax.random.split(state.key, 3)
    epsilon, statistics = (
        self.exploration.epsilon(state.iteration, self.num_iterations),
        state.observation_statistics,
    )
    has_explorer = getattr(self, "explore", None) is not None
    amount = state.iteration / self.num_iterations if has_explorer else epsilon
    rows, observations, new_fields, metrics = replaying.collect(
        self, state, lambda *inputs: self.act(parameters, statistics, amount, *inputs), rollout_key
    )
    state = state._replace(returns=new_fields["returns"])
    learned, replay, losses = gradient_steps(self, state, self.buffer.add(state.replay, rows), replay_key)
    # Updated last, so that an iteration normalises all observations with the same statistics.
    if self.normalizers.used:
        statistics = self.observe(statistics, observations)
    new_fields |= {"learned": learned, "replay": replay, "observation_statistics": statistics}
    state = state._replace(key=key, iteration=state.iteration + 1, **new_fields)
    return state, {**metrics, **losses, "epsilon": epsilon, "updates": learned.updates}


@dataclasses.dataclass(frozen=True)
class DQN(Agent, presets="DQN"):
    """Deep Q-learning for discrete actions; `MultiDiscrete` actions have a branch for each choice (BDQ).

    Defaults are close to those of CleanRL's `dqn.py` (Huang et al. 2022, JMLR 23(274)), with eight
    environments. Errors are not clipped: the few large errors of an episode's last steps keep CartPole's
    values from growing without bound.

    >>> import envs
    >>> DQN(env=envs.make("CartPole-v1")).updates_per_iteration
    8
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete)

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=8, total_steps=500_000)
    replaying = ReplayUpdates(
        buffer_size=10_000, batch_size=128, learning_starts=10_000, updates_per_step=0.125
    )
    optimizer_settings = ClippedOptimizer(
        learning_rate=2.5e-4, anneal_learning_rate=False, max_grad_norm=10.0
    )
    max_error: float | None = hyperparameter(
        None, "delta of the Huber loss (Mnih et al.: 1); None: the squared loss"
    )
    discounting = Discount()
    targets = TargetUpdates(target_period=50)
    exploration = Exploration(epsilon_end=0.05, exploration_fraction=0.5)
    double: bool = hyperparameter(
        False, "double Q-learning: one network selects the action, the other evaluates it"
    )
    dueling: bool = hyperparameter(False, "dueling network: a state value, and advantages of actions")
    priorities = StepReplay()
    normalizers = Normalizers()
    layers = Layers(activation="relu")
    network: AnyNetwork | None = dataclasses.field(default=None, metadata=NETWORK)
    explorer = ExplorerChoice()
    memory_settings = MemoryChoice(memory_size=64)
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        require(
            self,
            self.max_error is None or self.max_error > 0,
            f"max_error={self.max_error}: it must be above zero, or None",
        )
        _ = self.buffer  # refuses sizes that do not fit

    updates_per_iteration = property(lambda self: replaying.whole_updates(self))
    _first_learning_iteration = property(lambda self: self.buffer.first_ready_iteration(self.num_steps))

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self._reset(env_key)
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        learned = init_learned(parameters, self._optimizer)
        return replaying.initial_state(self, learned, env_state, observation, key)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Steps all environments into the buffer, then takes gradient steps on minibatches."""
        return iteration(self, state, state.learned.parameters)

    def actor(self, state: State) -> Actor:
        """The actor with these parameters: epsilon-greedy, as in this iteration, or with the explorer."""
        epsilon = self.exploration.epsilon(state.iteration, self.num_iterations)
        progress = state.iteration / self.num_iterations
        amount = epsilon if self.explore is None else progress
        return replaying.make_actor(self, state, state.learned.parameters, amount)

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0, 0))
    def act(self, parameters, statistics, amount, observation, recollection, keys):
        """Acts in all environments; returns `action [B, *action]`, and the next memory `[B]`.

        Arguments are `observation [B, *obs]`, `recollection [B]` (None without a memory) and `keys [B]`.
        """
        return replaying.compute_actions(
            self, parameters, statistics, observation, recollection, keys, amount
        )

    @fdg.fragment("learner", in_axes=(None, None, 0, 0, None), out_axes=(None, 0, None))
    def learn(self, learned, statistics, minibatch, weight, ready):
        """One gradient step on a minibatch `[N]`, if the buffer is `ready`; also errors `[N]`, and losses."""
        minibatch = self.buffer.map_observations(
            functools.partial(self.normalizers.seen, statistics), minibatch
        )
        gradient, error, losses = self.gradient(
            learned.parameters, learned.target_parameters, minibatch, weight
        )
        parameters, optimizer_state = self.update(
            gradient, learned.optimizer_state, learned.parameters, ready
        )
        return self.targets.advance(learned, parameters, optimizer_state, ready), error, losses

    @fdg.fragment("gradient", in_axes=(None, None, 0, 0), out_axes=(None, 0, None))
    def gradient(self, parameters, target_parameters, minibatch, weight):
        """Gradient of the loss over a minibatch `[N]`, new priorities `[N]`, and the terms of the loss."""
        gradient, (error, losses) = jax.grad(self._loss, has_aux=True)(
            parameters, target_parameters, minibatch, weight
        )
        return gradient, error, losses

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, optimizer_state, parameters, ready):
        """One step of the optimiser, by default clipped Adam; no change unless the buffer is `ready`."""
        new = self._one_update(gradient, optimizer_state, parameters)
        return jax.tree.map(lambda a, b: jnp.where(ready, a, b), new, (parameters, optimizer_state))

    def _policy(self, parameters: Any, observation: Observation) -> Any:
        return registry.option("distributions").Categorical(self._values(parameters, observation))

    def _sample_actions(self, policy: Any, amount: jax.Array, keys: jax.Array) -> jax.Array:
        """Actions as in training: random with probability `amount`."""
        return epsilon_greedy(policy.logits, amount).sample(keys)

    def _loss(self, parameters, target_parameters, minibatch, weight):
        """`loss` over a minibatch of steps or sequences; each sample's error is its new priority."""
        transition, weights = self.buffer.transitions(minibatch, weight)
        assert weights is not None
        loss, (error, metrics) = self.loss(parameters, target_parameters, transition, weights)
        return loss, (self.buffer.priority(error), metrics)

    def loss(
        self, parameters: Any, target_parameters: Any, transition: Transition, weight: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        """The loss over a minibatch `[N]` with weights `[N]`, each sample's error `[N]`, and metrics."""
        value_of = registry.option("networks").select_values
        value = value_of(self._values(parameters, transition.observation), transition.action)
        target = jax.lax.stop_gradient(self._target(parameters, target_parameters, transition))
        error = broadcast_to_choices(target, value) - value
        # The loss L_i of Mnih et al. ("Training algorithm for deep Q-networks"), halved, with the weights of
        # Schaul et al., algorithm 1, line 12. Clipping the error, as Mnih et al. do, makes it a Huber loss.
        squared = 0.5 * jnp.square(error)
        if self.max_error is not None:
            squared = optax.losses.huber_loss(error, delta=self.max_error)
        loss = jnp.mean(weight * mean_over_choices(squared))
        # Priorities with several choices: Tavakoli et al., section "Error for experience prioritization".
        error = error if error.ndim == 1 else jnp.sum(jnp.abs(error), axis=-1)
        return loss, (error, {"loss": loss, "value": jnp.mean(value)})

    def _target(self, parameters, target_parameters, transition: Transition) -> jax.Array:
        """The target of `Q(observation, action)`: `[N]`."""
        next_values = self._values(target_parameters, transition.next_observation)
        if self.double:  # van Hasselt, Guez and Silver 2016, arXiv 1509.06461, equation 4
            best = jnp.argmax(self._values(parameters, transition.next_observation), axis=-1)
            next_value = registry.option("networks").select_values(next_values, best)
        else:  # the same paper, equation 2, with a target network
            next_value = jnp.max(next_values, axis=-1)
        return transition.reward + transition.discount * mean_over_choices(next_value)

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        """Q of every action, for observations `[N, *obs]` (`action_values`)."""
        return action_values(self._network, parameters, observation, discrete_space(self.env))

    def check_when_traced(self, state: Any) -> None:
        """Refuses a network with a wrong number of outputs."""
        registry.option("checks").check_q_network(self, state, state.learned.parameters)

    @property
    def _outputs(self) -> Discrete | MultiDiscrete:
        return discrete_space(self.env)

    @property
    def _heads(self) -> tuple[Any, ...]:
        """The head of the default network with a memory, for `algos.sequences.memory_networks_of`."""
        sizes = registry.option("distributions").sizes(self._outputs)
        return (registry.option("memory").Head(sum(sizes), dueling=sizes if self.dueling else None),)

    _memory = property(lambda self: replaying.memory_of(self))
    _network = property(lambda self: registry.option("networks").q_network_of(self))

    @property
    def buffer(self) -> Any:
        """The replay buffer of steps or sequences."""
        return self.priorities.of(
            self,
            buffer_size=self.buffer_size,
            batch_size=self.batch_size,
            learning_starts=self.learning_starts,
            n_step=self.n_step,
        )
