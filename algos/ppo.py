"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), clipped form.

One file, top to bottom: state, act, advantages, loss, update, iterate. Nothing here knows of devices:
the `fdg.fragment`s say what the parts are, and which axis of their arrays is the batch. Two of them, `step`
and `update`, are the same for every algorithm: `algos/agent.py`.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import distributions, networks, normalize, optimizers
from algos.agent import Agent
from algos.hyperparameters import hyperparameter, require, require_positive, require_within
from algos.losses import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate,
    clipped_value_error,
    explained_variance,
    standardize,
    value_error,
)
from algos.minibatches import shuffled_rows, take, take_of_every_env
from algos.networks import Network
from algos.normalize import RunningStatistics
from algos.returns import generalized_advantage_estimation
from algos.rollout import environment_major, episode_metrics, evaluate, rollout, time_major
from envs import (
    Box,
    Discrete,
    Environment,
    MultiDiscrete,
    Observation,
    TimeStep,
    features_and_mask,
    map_features,
)


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: RunningStatistics  # of [*obs]
    return_statistics: RunningStatistics  # of the discounted return that rewards are scaled by
    running_return: jax.Array  # [B] float32, that return so far
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32


class Decision(NamedTuple):
    """What the actor knew when it acted."""

    log_prob: jax.Array  # [...] float32, of the action taken
    value: jax.Array  # [...] float32, V(observation)


class Minibatch(NamedTuple):
    """Samples that a gradient is taken over."""

    observation: Observation  # [N, *obs], normalised if observations are
    action: jax.Array  # [N, *action]
    decision: Decision  # [N]
    advantage: jax.Array  # [N] float32
    target: jax.Array  # [N] float32, what the value is fitted to


@dataclasses.dataclass(frozen=True)
class PPO(Agent):
    """PPO for discrete, multi-discrete and continuous actions.

    Defaults are those of CleanRL's `ppo.py` (Huang et al. 2022, JMLR 23(274)); `PPO.preset(env_name)` has
    those found good for one environment. Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> PPO(env=envs.make("CartPole-v1")).num_iterations
    976
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    env: Environment
    num_envs: int = hyperparameter(4, "environments stepped together")
    num_steps: int = hyperparameter(128, "steps of each environment in one iteration")
    total_steps: int = hyperparameter(500_000, "environment steps of the whole run; annealing ends there")
    num_epochs: int = hyperparameter(4, "passes over each rollout")
    num_minibatches: int = hyperparameter(4, "gradient steps in one pass")
    shuffle: Literal["all", "time"] = hyperparameter(
        "all", "what a pass shuffles: all samples, or time steps only (no exchange where the batch is split)"
    )
    learning_rate: float = hyperparameter(2.5e-4, "Adam's step size")
    anneal_learning_rate: bool = hyperparameter(True, "let the step size fall linearly to zero")
    discount: float = hyperparameter(0.99, "gamma")
    gae_lambda: float = hyperparameter(0.95, "lambda of generalised advantage estimation")
    clip_ratio: float = hyperparameter(0.2, "epsilon: how far the probability ratio may go")
    clip_value: bool = hyperparameter(True, "clip the change of the value by the same epsilon")
    normalize_advantage: bool = hyperparameter(True, "zero mean, unit variance in each minibatch")
    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")
    max_grad_norm: float = hyperparameter(0.5, "global norm that gradients are clipped to")
    normalize_observation: bool = hyperparameter(False, "by running mean and variance")
    normalize_reward: bool = hyperparameter(False, "by the running deviation of the discounted return")
    hidden: tuple[int, ...] | None = hyperparameter(None, "widths of the layers; None: chosen by observation")
    activation: Literal["tanh", "relu", "silu", "gelu", "elu"] = hyperparameter("tanh", "of the layers")
    initial_log_std: float = hyperparameter(0.0, "log of the first standard deviation (continuous actions)")
    convolve: bool = hyperparameter(True, "convolve images; else flatten them")
    network: Network | None = None  # any (init, apply) pair, in place of the default actor-critic

    def __post_init__(self):
        self._check_common()
        require_positive(self, "num_epochs", "num_minibatches", "clip_ratio", "max_grad_norm")
        require_within(self, 0, 1, "gae_lambda")
        require(
            self, self.shuffle in ("all", "time"), f"shuffle={self.shuffle!r}: it must be 'all' or 'time'"
        )
        shuffled, what = self._shuffled
        require(
            self,
            shuffled % self.num_minibatches == 0,
            f"num_minibatches={self.num_minibatches} does not divide {what}={shuffled}: choose a divisor",
        )
        seen = self.env.observation_space
        require(
            self,
            isinstance(seen, Box) or not self.normalize_observation,
            f"normalize_observation=True: {seen} has no mean or variance; leave it False",
        )

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return self.num_epochs * self.num_minibatches

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self.env.reset(jax.random.split(env_key, self.num_envs))
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        return State(
            parameters=parameters,
            optimizer_state=self._optimizer.init(parameters),
            observation_statistics=normalize.init(self.env.observation_space.shape),
            return_statistics=normalize.init(()),
            running_return=jnp.zeros(self.num_envs),
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=jnp.int32(0),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)
        env_state, observation, ((observations, actions), decisions, time_steps) = rollout(
            act=lambda observation, keys: self.act(
                state.parameters, state.observation_statistics, observation, keys
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
            (observations, actions, decisions, time_steps),
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
        return state, metrics

    def evaluate(self, state: State, key: jax.Array, episodes: int) -> dict[str, jax.Array]:
        """Plays whole episodes with the most probable action; see `algos.rollout.evaluate`."""

        def act(observation, keys):
            policy, _ = self._policy(state.parameters, self._seen(state.observation_statistics, observation))
            return distributions.bounded(policy.mode(), self.env.action_space)

        return evaluate(self.env, act, key, episodes)

    # --- fragments ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, `Decision [B]`."""
        policy, value = self._policy(parameters, self._seen(statistics, observation))
        action = policy.sample(keys)
        return action, Decision(policy.log_prob(action), value)

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running_return, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`."""
        parameters, optimizer_state, observation_statistics, return_statistics = learned
        observation, action, decision, time_step = trajectory
        reward, running_return, return_statistics = self._reward(time_step, running_return, return_statistics)
        # What the actor saw: statistics change only once the rollout is used up.
        seen = self._seen(observation_statistics, observation)
        final = self._seen(observation_statistics, time_step.final_observation)
        _, next_value = self._policy(parameters, jax.tree.map(environment_major, final))
        advantage, target = self._advantage(
            reward, decision.value, time_major(next_value, self.num_steps), time_step
        )
        # Environment-major and flat: a split of the environments stays a split of the samples, and
        # products of flat matrices are what XLA is quick at.
        samples = jax.tree.map(environment_major, Minibatch(seen, action, decision, advantage, target))
        parameters, optimizer_state, losses = self._updated(parameters, optimizer_state, samples, key)
        observation_statistics = self._with_observed(observation_statistics, observation)
        metrics = {
            **episode_metrics(time_step),
            **losses,
            "explained_variance": explained_variance(target, decision.value),
        }
        return (
            (parameters, optimizer_state, observation_statistics, return_statistics),
            running_return,
            metrics,
        )

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Gradient of the loss over a minibatch `[N]`, and what the loss is made of."""
        return jax.grad(self._loss, has_aux=True)(parameters, minibatch)

    # --- parts ---

    def _loss(self, parameters, minibatch: Minibatch):
        """Equation 9 of the paper, negated, and its parts."""
        policy, value = self._predict(parameters, minibatch)
        log_ratio = policy.log_prob(minibatch.action) - minibatch.decision.log_prob
        advantage = minibatch.advantage
        if self.normalize_advantage:
            advantage = standardize(advantage)
        policy_loss = clipped_surrogate(log_ratio, advantage, self.clip_ratio)  # equation 7
        if self.clip_value:
            old_value = minibatch.decision.value
            value_loss = clipped_value_error(value, old_value, minibatch.target, self.clip_ratio)
        else:
            value_loss = value_error(value, minibatch.target)
        entropy = jnp.mean(policy.entropy())
        loss = policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": approximate_kl(log_ratio),
            "clip_fraction": clip_fraction(log_ratio, self.clip_ratio),
        }

    def _predict(self, parameters, minibatch):
        """Distribution over actions, and value, of each sample."""
        return self._policy(parameters, minibatch.observation)

    def _reward(self, time_step: TimeStep, running_return, return_statistics):
        """Rewards `[T, B]` that are learned from; and, where they are scaled, what their scale comes from."""
        if not self.normalize_reward:
            return time_step.reward, running_return, return_statistics
        running_return, returns = normalize.accumulate_returns(
            running_return, time_step.reward, time_step.done, self.discount
        )
        return_statistics = normalize.update(return_statistics, returns)
        return normalize.scale(return_statistics, time_step.reward), running_return, return_statistics

    def _advantage(self, reward, value, next_value, time_step: TimeStep):
        """Advantage and value target, both `[T, B]`; a truncation is followed by its observation's value."""
        return generalized_advantage_estimation(
            reward, value, next_value, time_step.terminated, time_step.truncated,
            self.discount, self.gae_lambda,
        )  # fmt: skip

    def _updated(self, parameters, optimizer_state, samples, key):
        """Parameters and optimiser state after all epochs, and the mean losses."""

        def one_update(carry, rows):
            parameters, optimizer_state = carry
            gradient, losses = self.gradient(parameters, self._take(samples, rows))
            return self.update(gradient, optimizer_state, parameters), losses

        rows = shuffled_rows(key, self._shuffled[0], self.num_epochs, self.num_minibatches)
        (parameters, optimizer_state), losses = jax.lax.scan(one_update, (parameters, optimizer_state), rows)
        return parameters, optimizer_state, jax.tree.map(jnp.mean, losses)

    def _take(self, samples, rows):
        """The minibatch of some rows; of time steps, those of every environment."""
        if self.shuffle == "all":
            return take(samples, rows)
        return take_of_every_env(samples, rows, self.num_envs)

    @property
    def _shuffled(self) -> tuple[int, str]:
        """How many rows an epoch shuffles, and what makes that number."""
        if self.shuffle == "all":
            return self.steps_per_iteration, "num_envs * num_steps"
        return self.num_steps, "num_steps"

    def _policy(self, parameters, observation):
        """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
        return networks.policy_and_value(self._network, parameters, observation, self.env.action_space)

    def _seen(self, statistics, observation):
        """Observations `[..., *obs]` as the networks see them."""
        if not self.normalize_observation:
            return observation
        return map_features(lambda features: normalize.normalize(statistics, features), observation)

    def _with_observed(self, statistics, observation):
        """The statistics after the observations `[T, B, *obs]` too."""
        if not self.normalize_observation:
            return statistics
        return normalize.update(statistics, features_and_mask(observation)[0])

    @property
    def _network(self) -> Network:
        return self.network or networks.actor_critic(
            self.env.observation_space,
            self.env.action_space,
            self.hidden,
            self.activation,
            self.initial_log_std,
            self.convolve,
        )

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optimizers.clipped_adam(self._step_size, self.max_grad_norm)
