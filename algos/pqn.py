"""Parallelised Q-network, PQN (Gallici et al. 2025, ICLR, "Simplifying Deep Temporal Difference Learning").

Q-learning without replay and without a target network (arXiv 2407.04811): many environments provide fresh
samples, and layer normalisation prevents divergence. Targets are lambda-returns, as in Q(lambda) of Peng and
Williams 1994.

Shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import dqn, networks, on_policy, optimizers
from algos.agent import Agent, Rollouts
from algos.checks import check_divides, check_q_network
from algos.distributions import Categorical
from algos.dqn import Exploration, broadcast_to_choices, discrete_space, epsilon_greedy, mean_over_choices
from algos.losses import values_after
from algos.networks import select_values
from algos.normalize import normalize_rollout
from algos.on_policy import Epochs, State, environment_major
from algos.returns import lambda_returns
from algos.rollout import Actor, empty_memory, episode_metrics
from algos.values import NETWORK, ClippedOptimizer, Discount, Layers, Network, Normalizers, Transforming
from envs import Discrete, Environment, MultiDiscrete, Observation, TimeStep
from fdg.settings.fields import hyperparameter, require_positive, require_within


class Minibatch(NamedTuple):
    """Samples for one gradient step."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, *action] int32
    target: jax.Array  # [N] float32, of Q(observation, action)


@dataclasses.dataclass(frozen=True)
class PQN(Agent, presets="PQN"):
    """PQN for discrete and multi-discrete actions (one branch for each choice, see `algos/dqn.py`).

    Defaults are those of the authors' PureJaxQL for CartPole, with narrower layers.

    >>> import envs
    >>> PQN(env=envs.make("CartPole-v1")).num_iterations
    244
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete)

    env: Environment
    rollouts = Rollouts(num_envs=32, num_steps=64, total_steps=500_000)
    epochs = Epochs(num_minibatches=16)
    optimizer_settings = ClippedOptimizer(learning_rate=1e-4, anneal_learning_rate=True, max_grad_norm=10.0)
    discounting = Discount()
    q_lambda: float = hyperparameter(0.95, "lambda of the returns; 0: one step, 1: whole rollouts")
    reward_scale: float = hyperparameter(0.1, "factor of rewards, for values of moderate size")
    exploration = Exploration(epsilon_end=0.2, exploration_fraction=0.2)
    dueling: bool = hyperparameter(False, "dueling network: a state value, and advantages of actions")
    normalizers = Normalizers()
    layers = Layers(activation="relu", layer_norm=True)
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        check_divides(self, self.num_steps)
        require_positive(self, "reward_scale")
        require_within(self, 0, 1, "q_lambda")

    updates_per_iteration = property(lambda self: self.epochs.updates)

    init = on_policy.begin

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        epsilon = self.exploration.epsilon(state.iteration, self.num_iterations)

        def act(parameters, statistics, observation, keys):
            return self.act(parameters, statistics, epsilon, observation, keys)

        state, metrics = on_policy.iteration(self, state, act)
        return state, {**metrics, "epsilon": epsilon}

    def actor(self, state: State) -> Actor:
        """The actor with these parameters; without `greedy`, it explores as in this iteration."""
        epsilon = self.exploration.epsilon(state.iteration, self.num_iterations)

        def act(memory, observation, start, keys, greedy):
            normalized = self.normalizers.seen(state.observation_statistics, observation)
            values = self._values(state.parameters, normalized)
            policy = Categorical(values) if greedy else epsilon_greedy(values, epsilon)
            return self._choose_actions(policy, keys, greedy), memory

        return Actor(empty_memory, act)

    # --- fragments; `step` and `update` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0))
    def act(self, parameters, statistics, epsilon, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and the best action's value `[B]`."""
        values = self._values(parameters, self.normalizers.seen(statistics, observation))
        return epsilon_greedy(values, epsilon).sample(keys), _max_value(values)

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`; also updates the statistics.

        `learned` are the parameters, the optimiser's state, and the statistics of observations and returns;
        `running [B]` are the returns of the running episodes, for these statistics.
        """
        parameters, optimizer_state, *statistics = learned
        normalized, running, statistics = normalize_rollout(
            self.normalizers, statistics, running, trajectory, self.discount
        )
        observation, action, value, time_step = normalized
        target = self._target(parameters, value, time_step)
        samples = jax.tree.map(environment_major, Minibatch(observation, action, target))
        parameters, optimizer_state, losses = self.epochs.learn(
            key, samples, self.num_envs, parameters, optimizer_state, self.gradient, self.update
        )
        learned = (parameters, optimizer_state, *statistics)
        return learned, running, {**episode_metrics(time_step), **losses}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Gradient of the loss over a minibatch `[N]`, and the terms of the loss."""
        return jax.grad(self.loss, has_aux=True)(parameters, minibatch)

    def loss(self, parameters, minibatch: Minibatch):
        """Half the mean squared error of the values of the actions taken (the last line of algorithm 1)."""
        value = select_values(self._values(parameters, minibatch.observation), minibatch.action)
        loss = 0.5 * jnp.mean(jnp.square(value - broadcast_to_choices(minibatch.target, value)))
        return loss, {"loss": loss, "value": jnp.mean(value)}

    def _target(self, parameters, value: jax.Array, time_step: TimeStep) -> jax.Array:
        """Lambda-returns `[T, B]` over max-Q values; a truncation bootstraps from its final observation."""
        next_value = values_after(value, time_step, lambda final: _max_value(self._values(parameters, final)))
        return lambda_returns(
            self.reward_scale * time_step.reward, next_value,
            time_step.terminated, time_step.truncated, self.discount, self.q_lambda,
        )  # fmt: skip

    def _values(self, parameters: Any, observation: Observation) -> jax.Array:
        """Q of every action, for observations `[N, *obs]` (`dqn.action_values`)."""
        return dqn.action_values(self._network, parameters, observation, discrete_space(self.env))

    def check_when_traced(self, state: State) -> None:
        """Refuses a network without a value for each action."""
        check_q_network(self, state, state.parameters)

    _memory = None
    _outputs = property(lambda self: discrete_space(self.env))
    _network = property(networks.q_network_of)

    @property
    def _default_optimizer(self) -> optax.GradientTransformation:
        return optimizers.clipped_radam(optimizers.step_size_of(self), self.max_grad_norm)


def _max_value(values: jax.Array) -> jax.Array:
    """The best action's value `[N]`, from values `[N, n]`, or `[N, M, n]` with several choices."""
    return mean_over_choices(jnp.max(values, axis=-1))
