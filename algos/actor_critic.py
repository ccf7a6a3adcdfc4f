"""What actor-critics share that take one gradient step after each rollout: `A2C`, `A3C` and `IMPALA`.

Here are the state, the network, `init`, `iterate`, and the fragments other than the actor; in their own
files, how they act and what their loss is.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` rows of any origin.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import networks, optimizers, outputs
from algos.acting import Actor, without_memory
from algos.distributions import Distribution
from algos.hyperparameters import require_positive
from algos.networks import Network
from algos.normalize import RunningStatistics
from algos.normalizing import NormalizedAgent
from algos.rollout import environment_major, episode_metrics, rollout, time_major, values_after
from envs import Box, Discrete, MultiDiscrete, Observation, TimeStep, composite, features_and_mask


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any  # as of `PPO`; None where observations are not normalised
    return_statistics: RunningStatistics | None  # of the discounted return that rewards are scaled by, if any
    running_return: jax.Array | None  # [B] float32, that return so far
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32


class Trajectory(NamedTuple):
    """A rollout. The loss sees observations and rewards normalised, if that is switched on."""

    observation: Observation  # [T, B, *obs]
    action: jax.Array  # [T, B, *action]
    log_prob: Any  # [T, B] float32, of the action when it was taken; None where the loss has no use for it
    time_step: TimeStep  # [T, B], what came of the action


class ActorCritic(NormalizedAgent):
    """Base of actor-critics on one feed-forward network, with RMSProp.

    A subclass has also the fields annotated here, the actor `act`, and `_loss`.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    max_grad_norm: float  # global norm that gradients are clipped to
    network: Network | None  # any (init, apply) pair, in place of the default actor-critic

    def init(self, key: jax.Array) -> Any:
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

    def iterate(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        """One rollout of all environments, and one update on it."""
        key, rollout_key = jax.random.split(state.key)
        env_state, observation, ((observations, actions), log_probs, time_steps) = rollout(
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
            Trajectory(observations, actions, log_probs, time_steps),
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

    def actor(self, state: Any) -> Actor:
        """How it acts with these parameters and statistics."""

        def policy(observation):
            return self._policy(state.parameters, self._seen(state.observation_statistics, observation))[0]

        return without_memory(policy, self._for_environment)

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return 1

    # --- fragments; `step` and `update` are those of every agent ---

    @fdg.fragment("learner", in_axes=(None, 0, 1), out_axes=(None, 0, None))
    def learn(self, learned, running_return, trajectory):
        """One update of parameters and optimiser on a rollout `[T, B]`; statistics change after it."""
        parameters, optimizer_state, *statistics = learned
        seen, running_return, statistics = self._normalized(statistics, running_return, trajectory)
        gradient, losses = self.gradient(parameters, seen)
        learned = (*self.update(gradient, optimizer_state, parameters), *statistics)
        return learned, running_return, {**episode_metrics(trajectory.time_step), **losses}

    @fdg.fragment("gradient", in_axes=(None, 1), out_axes=None)
    def gradient(self, parameters, trajectory):
        """Gradient of the loss over a rollout `[T, B]`, and what the loss is made of."""
        return jax.grad(self._loss, has_aux=True)(parameters, trajectory)

    # --- parts ---

    # A fragment: `parameters`, `statistics`, `observation [B, *obs]`, `keys [B]` -> `action [B, *action]`,
    # and its log-probability `[B]` where the loss has a use for it, else None.
    act: Callable[..., tuple[jax.Array, jax.Array | None]]

    def _loss(self, parameters: Any, trajectory: Trajectory) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a rollout, and what it is made of: scalars."""
        raise NotImplementedError

    def _policy(self, parameters: Any, observation: Observation) -> tuple[Distribution, jax.Array]:
        """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
        return networks.policy_and_value(self._network, parameters, observation, self.env.action_space)

    def _policy_over_time(self, parameters: Any, observation: Observation) -> tuple[Distribution, jax.Array]:
        """Distribution over actions and value `[T, B]`, for observations `[T, B, *obs]`."""
        num_steps = jax.tree.leaves(observation)[0].shape[0]
        of_rows = self._policy(parameters, jax.tree.map(environment_major, observation))
        return jax.tree.map(lambda x: time_major(x, num_steps), of_rows)

    def _next_value(self, parameters: Any, value: jax.Array, time_step: TimeStep) -> jax.Array:
        """Value of what each step led to, before any reset: `[T, B]`. No gradient flows into it.

        `value [T, B]` is that of what each step answered to, by the same parameters.
        """
        constant, value = jax.lax.stop_gradient((parameters, value))
        return values_after(value, time_step, lambda final: self._policy(constant, final)[1])

    def _check_common(self) -> None:
        super()._check_common()
        require_positive(self, "max_grad_norm")

    def check_when_traced(self, state: Any) -> None:
        """Refuses a network whose results do not fit the action space."""
        features = composite.types(self.env.observation_space, (self.num_envs,))
        output = jax.eval_shape(self._network.apply, state.parameters, features)
        outputs.actor_and_critic(output, self.env.action_space, (self.num_envs,))

    @property
    def _network(self) -> Network:
        return self._computing(
            self._own("network")
            or networks.actor_critic(self.env.observation_space, self.env.action_space, **vars(self.layers))
        )

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optimizers.clipped_rmsprop(self._step_size, self.max_grad_norm)
