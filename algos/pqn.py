"""Parallelised Q-network, PQN (Gallici et al. 2025, ICLR, "Simplifying Deep Temporal Difference Learning").

Q-learning without replay and without a target network (arXiv 2407.04811): many environments give fresh
samples, and layer normalisation keeps the values from diverging. Targets are lambda-returns, as in Q(lambda)
of Peng and Williams 1994.

This file has the targets and the updates, top to bottom; `algos/q_learning.py` has the acting. Nothing here
refers to devices: each `fdg.fragment` names a part of the algorithm, and the batch axis of its arrays.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import optimizers
from algos.acting import Actor
from algos.agent import Rollouts
from algos.exploration import Exploration, epsilon_greedy
from algos.hyperparameters import NETWORK, hyperparameter, require, require_positive, require_within
from algos.layers import Layers
from algos.minibatches import own_blocks, shuffled_rows, take, updated
from algos.networks import Network, of_action
from algos.normalizing import Normalizers
from algos.optimizers import ClippedOptimizer
from algos.q_learning import QLearning, for_each_choice, over_choices
from algos.returns import lambda_returns
from algos.rollout import environment_major, episode_metrics, rollout, values_after
from envs import Environment, Observation, TimeStep, features_and_mask


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any  # as of `PPO`; None where observations are not normalised
    return_statistics: Any  # RunningStatistics of []; None where rewards are not scaled
    running_return: Any  # [B] float32; likewise
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32


class Trajectory(NamedTuple):
    """A rollout. The loss sees observations and rewards normalised, if that is switched on."""

    observation: Observation  # [T, B, *obs]
    action: jax.Array  # [T, B, *action] int32
    value: jax.Array  # [T, B] float32, what the best action there is worth
    time_step: TimeStep  # [T, B], what came of the action


class Minibatch(NamedTuple):
    """Samples that a gradient is taken over."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, *action] int32
    target: jax.Array  # [N] float32, what Q(observation, action) is fitted to


@dataclasses.dataclass(frozen=True)
class PQN(QLearning):
    """PQN for discrete and multi-discrete actions (one branch for each choice, see `algos/q_learning.py`).

    Defaults are those of the authors' PureJaxQL for CartPole, with narrower layers. Frozen and hashable;
    equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> PQN(env=envs.make("CartPole-v1")).num_iterations
    244
    """

    env: Environment
    rollouts = Rollouts(num_envs=32, num_steps=64, total_steps=500_000)
    num_epochs: int = hyperparameter(4, "passes over each rollout")
    num_minibatches: int = hyperparameter(16, "gradient steps in one pass")
    shuffle: Literal["each", "all"] = hyperparameter(
        "each",
        "what a pass shuffles: each environment's samples, or all samples together (devices exchange them)",
    )
    optimizer_settings = ClippedOptimizer(learning_rate=1e-4, anneal_learning_rate=True, max_grad_norm=10.0)
    discount: float = hyperparameter(0.99, "gamma")
    q_lambda: float = hyperparameter(0.95, "lambda of the returns; 0: one step, 1: whole rollouts")
    reward_scale: float = hyperparameter(0.1, "what rewards are multiplied by, for values of moderate size")
    exploration = Exploration(epsilon_end=0.2, exploration_fraction=0.2)
    dueling: bool = hyperparameter(False, "dueling network: a value, and advantages of actions")
    normalizers = Normalizers()
    layers = Layers(activation="relu", layer_norm=True)
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check_common()
        require_positive(self, "num_epochs", "num_minibatches", "reward_scale")
        require_within(self, 0, 1, "q_lambda")
        require(
            self,
            self.steps_per_iteration % self.num_minibatches == 0,
            f"num_minibatches={self.num_minibatches} does not divide num_envs * num_steps="
            f"{self.steps_per_iteration}: choose a divisor",
        )
        require(
            self, self.shuffle in ("each", "all"), f"shuffle={self.shuffle!r}: it must be 'each' or 'all'"
        )

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return self.num_epochs * self.num_minibatches

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self._reset(env_key)
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        return_statistics, running_return = self._first_returns((self.num_envs,))
        return State(
            parameters=parameters,
            optimizer_state=self._optimizer.init(parameters),
            observation_statistics=self._first_statistics(),
            return_statistics=return_statistics,
            running_return=running_return,
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=jnp.int32(0),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)
        epsilon = self._epsilon(state.iteration)
        env_state, observation, ((observations, actions), values, time_steps) = rollout(
            act=lambda observation, keys: self.act(
                state.parameters, state.observation_statistics, epsilon, observation, keys
            ),
            step=self.step,
            key=rollout_key,
            env_state=state.env_state,
            observation=state.observation,
            num_steps=self.num_steps,
        )
        learned, running_return, metrics = self.learn(
            (state.parameters, state.optimizer_state, state.observation_statistics, state.return_statistics),
            state.running_return,
            Trajectory(observations, actions, values, time_steps),
            shuffle_key,
        )
        parameters, optimizer_state, observation_statistics, return_statistics = learned
        state = State(
            parameters=parameters,
            optimizer_state=optimizer_state,
            observation_statistics=observation_statistics,
            return_statistics=return_statistics,
            running_return=running_return,
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=state.iteration + 1,
        )
        return state, {**metrics, "epsilon": epsilon}

    def actor(self, state: State) -> Actor:
        """How it acts with these values of actions."""
        return self._acting(state.parameters, state.observation_statistics, state.iteration)

    # --- fragments; `step` and `update` are those of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0))
    def act(self, parameters, statistics, epsilon, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, value of the best one `[B]`."""
        values = self._values(parameters, self._seen(statistics, observation))
        return epsilon_greedy(values, epsilon).sample(keys), _best(values)

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running_return, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`; statistics change after it."""
        parameters, optimizer_state, *statistics = learned
        seen, running_return, statistics = self._normalized(statistics, running_return, trajectory)
        observation, action, value, time_step = seen
        target = self._target(parameters, value, time_step)
        samples = jax.tree.map(environment_major, Minibatch(observation, action, target))
        blocks = 1
        if self.shuffle == "each":
            blocks = own_blocks(self.num_envs, self.num_steps, self.num_minibatches)
        count = self.steps_per_iteration // blocks
        rows = shuffled_rows(key, count, self.num_epochs, self.num_minibatches, blocks)
        parameters, optimizer_state, losses = updated(
            self.gradient, self.update, parameters, optimizer_state, rows, lambda some: take(samples, some)
        )
        learned = (parameters, optimizer_state, *statistics)
        return learned, running_return, {**episode_metrics(time_step), **losses}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Gradient of the loss over a minibatch `[N]`, and what the loss is made of."""
        return jax.grad(self._loss, has_aux=True)(parameters, minibatch)

    # --- parts ---

    def _loss(self, parameters, minibatch: Minibatch):
        """Half the mean squared error of the values of the actions taken (the last line of algorithm 1)."""
        value = of_action(self._values(parameters, minibatch.observation), minibatch.action)
        loss = 0.5 * jnp.mean(jnp.square(value - for_each_choice(minibatch.target, value)))
        return loss, {"loss": loss, "value": jnp.mean(value)}

    def _target(self, parameters, value: jax.Array, time_step: TimeStep) -> jax.Array:
        """Lambda-returns `[T, B]` over max-Q values; a truncation bootstraps from its final observation."""
        next_value = values_after(value, time_step, lambda final: _best(self._values(parameters, final)))
        return lambda_returns(
            self.reward_scale * time_step.reward, next_value,
            time_step.terminated, time_step.truncated, self.discount, self.q_lambda,
        )  # fmt: skip

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optimizers.clipped_radam(self._step_size, self.max_grad_norm)


def _best(values: jax.Array) -> jax.Array:
    """What the best action is worth: `[N]`, of values `[N, n]`, or `[N, M, n]` of several choices."""
    return over_choices(jnp.max(values, axis=-1))
