"""Deep Q-learning (Mnih et al. 2015, Nature 518, "Human-level control through deep reinforcement learning").

Options: double Q-learning, dueling networks, n-step returns, prioritised replay.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import distributions, networks, q_learning
from algos.agent import Agent, Rollouts
from algos.distributions import Categorical, sizes
from algos.explorers import ExplorerChoice, Remembered, State, begin, empty, first_state
from algos.layers import Layers
from algos.memories import RecurrentNetwork, step_types
from algos.networks import NETWORK, Network, of_action
from algos.normalize import ObservationNormalizer, Transforming
from algos.optimizers import ClippedOptimizer
from algos.q_learning import (
    Exploration,
    StepPriorities,
    TargetUpdates,
    choices,
    epsilon_greedy,
    for_each_choice,
    over_choices,
)
from algos.replay import Replay, ReplayUpdates, Transition, whole_updates
from algos.rollout import Actor, Recollection
from algos.sequences import SequenceMemory, memory_after, one_step, over_sequences, remembering_trunk
from envs import Discrete, Environment, MultiDiscrete, Observation, features_and_mask
from fdg.settings.fields import hyperparameter, require


@dataclasses.dataclass(frozen=True)
class DQN(Agent):
    """Deep Q-learning for discrete actions; of several choices with a branch for each (BDQ).

    Defaults are close to those of CleanRL's `dqn.py` (Huang et al. 2022, JMLR 23(274)), with eight
    environments. Errors are not clipped: the few large errors of an episode's last steps keep CartPole's
    values from growing without bound.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> DQN(env=envs.make("CartPole-v1")).updates_per_iteration
    8
    """

    presets_of: ClassVar[str] = "DQN"
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
        None, "error beyond which the loss goes on as a line (Mnih et al.: 1); None: squared throughout"
    )
    discount: float = hyperparameter(0.99, "gamma")
    targets = TargetUpdates(target_period=50)
    exploration = Exploration(epsilon_end=0.05, exploration_fraction=0.5)
    double: bool = hyperparameter(False, "double Q-learning: one network chooses, the other values")
    dueling: bool = hyperparameter(False, "dueling network: a value, and advantages of actions")
    priorities = StepPriorities()
    normalizers = ObservationNormalizer()
    layers = Layers(activation="relu")
    network: RecurrentNetwork | Network | None = dataclasses.field(default=None, metadata=NETWORK)
    explorer = ExplorerChoice()
    remembering = SequenceMemory(memory_size=64)
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        require(
            self,
            self.max_error is None or self.max_error > 0,
            f"max_error={self.max_error}: it must be above zero, or None",
        )
        _ = self.buffer  # refuses sizes that do not fit

    updates_per_iteration = property(whole_updates)

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self._reset(env_key)
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        recollection = self._first_recollection(self.num_envs)
        action = jnp.zeros((self.num_envs, *self.env.action_space.shape), jnp.int32)
        learned = q_learning.begin(parameters, self._optimizer)
        return first_state(self, learned, env_state, observation, action, recollection, key)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """A few steps of all environments into the buffer, and gradient steps on minibatches out of it."""
        return q_learning.iteration(self, state, state.learned.parameters)

    def actor(self, state: State) -> Actor:
        """How it acts with these values of actions."""

        epsilon = self.exploration.epsilon(state.iteration, self.num_iterations)
        progress = state.iteration / self.num_iterations
        amount = epsilon if self.explore is None else progress

        def act(memory, observation, start, keys, greedy):
            seen = self.normalizers.seen(state.observation_statistics, observation)
            recollection = None if memory == () else Recollection(memory, start)
            values, after = self._at_work(state.learned.parameters, seen, recollection)
            if greedy:
                action, explorer = Categorical(values).mode(), getattr(memory, "explorer", None)
            else:
                action, explorer = self._drawn(values, amount, recollection, keys)
            remembered = () if memory == () else Remembered(after, explorer)
            return self._for_environment(action), remembered

        return Actor(lambda num_envs: empty(self._first_recollection(num_envs)), act)

    # --- fragments; `step` and `observe` are those of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0, 0))
    def act(self, parameters, statistics, amount, observation, recollection, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and what is remembered, `[B]`."""
        seen = self.normalizers.seen(statistics, observation)
        values, memory = self._at_work(parameters, seen, recollection)
        action, explorer = self._drawn(values, amount, recollection, keys)
        return action, None if recollection is None else Remembered(memory, explorer)

    learn, gradient, update = q_learning.learn, q_learning.gradient, q_learning.update

    def _drawn(self, values, amount, recollection, keys) -> tuple[jax.Array, Any]:
        """Actions as in training, of `values [B, n]`, and the explorer's state after them."""

        def greedy_but(keys):
            return epsilon_greedy(values, amount).sample(keys)

        return self.explorer.drawn(Categorical(values), greedy_but, recollection, keys, amount)

    def _at_work(self, parameters, observation, recollection) -> tuple[jax.Array, Any]:
        """Values of actions for observations `[B, *obs]`, and the network's memory after them."""
        if self._recurrent is None:
            return self._values(parameters, observation), None
        observed = one_step(observation, recollection.memory.network, recollection.start)
        return self._values(parameters, observed), memory_after(self._recurrent, parameters, observed)

    def _first_recollection(self, num_envs: int) -> Recollection | None:
        action = jnp.zeros((num_envs, *self.env.action_space.shape), jnp.int32)
        memory = None if self._recurrent is None else self._recurrent.memory(num_envs)
        return begin(memory, self.explorer.begin(action), num_envs)

    def _loss(self, parameters, target_parameters, minibatch, weight):
        """`loss` over a minibatch of steps or of sequences; an error for each sample."""
        transition, weights = self.buffer.transitions(minibatch, weight)
        assert weights is not None
        loss, (error, metrics) = self.loss(parameters, target_parameters, transition, weights)
        return loss, (self.buffer.priority(error), metrics)

    def loss(
        self, parameters: Any, target_parameters: Any, transition: Transition, weight: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        """The loss over a minibatch `[N]` with weights `[N]`; each sample's error `[N]`, and metrics."""
        value = of_action(self._values(parameters, transition.observation), transition.action)
        target = jax.lax.stop_gradient(self._target(parameters, target_parameters, transition))
        error = for_each_choice(target, value) - value
        # The loss L_i of Mnih et al. ("Training algorithm for deep Q-networks"), halved; weighted as in
        # Schaul et al., algorithm 1, line 12. To clip the error, as the former do, is to let the square go on
        # as a line.
        squared = 0.5 * jnp.square(error)
        if self.max_error is not None:
            squared = optax.losses.huber_loss(error, delta=self.max_error)
        loss = jnp.mean(weight * over_choices(squared))
        # Priorities of several choices: Tavakoli et al., section "Error for experience prioritization".
        error = error if error.ndim == 1 else jnp.sum(jnp.abs(error), axis=-1)
        return loss, (error, {"loss": loss, "value": jnp.mean(value)})

    def _target(self, parameters, target_parameters, transition: Transition) -> jax.Array:
        """What `Q(observation, action)` should be: `[N]`."""
        next_values = self._values(target_parameters, transition.next_observation)
        if self.double:  # van Hasselt, Guez and Silver 2016, arXiv 1509.06461, equation 4
            best = jnp.argmax(self._values(parameters, transition.next_observation), axis=-1)
            next_value = of_action(next_values, best)
        else:  # the same paper, equation 2 with the target network of Mnih et al.
            next_value = jnp.max(next_values, axis=-1)
        return transition.reward + transition.discount * over_choices(next_value)

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        return q_learning.values(self._network, parameters, observation, choices(self.env))

    def check_when_traced(self, state: Any) -> None:
        """Refuses a network that does not give a number for each output."""
        parameters, space = state.learned.parameters, self._outputs
        if self._recurrent is None:
            q_learning.check_values(self._network, parameters, self.env, self.num_envs, space)
            return
        found = step_types(self._recurrent, parameters, state, state.recollection.memory.network)
        distributions.check_remembered_values(found, sum(sizes(space)), (1, self.num_envs))

    @property
    def _outputs(self) -> Discrete | MultiDiscrete:
        return choices(self.env)

    @property
    def _network(self) -> Network:
        recurrent = self._recurrent
        if recurrent is not None:
            return over_sequences(recurrent)
        default = networks.q_network(
            self.env.observation_space, self._outputs, dueling=self.dueling, **vars(self.layers)
        )
        return self._computing(self._own("network", "actor") or default)

    @property
    def _recurrent(self) -> RecurrentNetwork | None:
        """The network with a memory; None if it has none."""
        own, memory = self._own("network", "actor"), self.remembering.kind
        if own is not None:
            return self._computing(own) if hasattr(own, "unroll") else None
        if memory is None:
            return None
        each = sizes(self._outputs)
        return self._computing(remembering_trunk(
            self.env.observation_space, sum(each), self.layers, memory,
            dueling=each if self.dueling else None,
        ))  # fmt: skip

    @property
    def buffer(self) -> Replay:
        """Where steps are kept, or sequences, and minibatches are drawn from."""
        return self.priorities.of(
            self,
            buffer_size=self.buffer_size,
            batch_size=self.batch_size,
            learning_starts=self.learning_starts,
            n_step=self.n_step,
            **self.remembering.sizes(self, self._recurrent is not None),
        )
