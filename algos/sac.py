"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), with a learned temperature.

SAC has two critics of observations and actions, target critics, a squashed Gaussian actor, and a temperature,
the weight of the actor's entropy. Equations are numbered as in the paper.

Shapes: `B` environments, `U` gradient steps of an iteration, `N` samples of a minibatch.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import off_policy, registry
from algos.agent import Agent, Rollouts
from algos.off_policy import PolyakTargets, ReturnGrid
from algos.replaying import MemoryChoice, ReplayUpdates, Transition
from algos.values import Discount, Layers, OptimizerSettings
from envs import Environment, Observation
from fdg.settings.fields import hyperparameter, require_positive
from fdg.settings.parts import Part

_LOG_STD_BOUNDS = (-20.0, 2.0)  # as in the authors' code, github.com/rail-berkeley/softlearning


class Parameters(NamedTuple):
    """The trained parameters."""

    actor: Any
    critics: Any  # of both critics
    log_temperature: jax.Array  # [] float32, log alpha


@dataclasses.dataclass(frozen=True)
class Entropy(Part):
    """Settings of the entropy bonus and its temperature."""

    initial_temperature: float = hyperparameter(1.0, "initial alpha, the weight of the entropy")
    target_entropy: float | None = hyperparameter(
        None, "target entropy in nats, of actions in [-1, 1]; None: -1 per component"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses a temperature that is not positive."""
        require_positive(algorithm, "initial_temperature")

    def begin(self) -> jax.Array:
        """The initial log temperature: `[]` float32."""
        return jnp.log(jnp.float32(self.initial_temperature))

    def losses(
        self, log_temperature: jax.Array, log_prob: jax.Array, value: jax.Array, shape: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The losses of the actor and of the temperature, and metrics.

        Each loss has gradients for its own parameters only. `log_temperature` is `[]`; `log_prob` and `value`
        are `[N]`, of sampled actions. The default target entropy is -1 per component of `shape` (appendix D).
        """
        target = -float(math.prod(shape)) if self.target_entropy is None else self.target_entropy
        temperature = jnp.exp(jax.lax.stop_gradient(log_temperature))
        actor_loss = jnp.mean(temperature * log_prob - value)  # equations 7 and 9
        entropy = -jnp.mean(jax.lax.stop_gradient(log_prob))
        temperature_loss = jnp.exp(log_temperature) * (entropy - target)  # equation 18
        metrics = {"actor_loss": actor_loss, "value": jnp.mean(value), "entropy": entropy}
        return actor_loss, temperature_loss, {**metrics, "temperature": temperature}


def squashed(output: jax.Array, shape: tuple[int, ...]) -> Any:
    """The distribution over actions in [-1, 1] (a `TanhNormal`) for an actor's outputs `[N, 2 * D]`."""
    mean, log_std = jnp.split(output, 2, axis=-1)
    return registry.option("distributions").TanhNormal(mean, jnp.clip(log_std, *_LOG_STD_BOUNDS), shape)


class Learned(NamedTuple):
    """All values that an update changes."""

    parameters: Any  # `Parameters`
    target_critics: Any  # moving average of `parameters.critics`
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class SAC(Agent, driver=off_policy, presets="SAC"):
    """SAC for continuous actions within bounds.

    Defaults are those of the paper (table 1), except that four environments run in parallel, and learning
    starts as in CleanRL (Huang et al. 2022, JMLR 23(274)). An iteration takes `updates_per_step` gradient
    steps per environment step.

    >>> import envs
    >>> algorithm = SAC(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=2)
    >>> algorithm.updates_per_iteration, algorithm.num_iterations
    (8, 125000)
    """

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=1, total_steps=1_000_000)
    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=5_000, updates_per_step=1.0
    )
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discounting = Discount()
    entropy = Entropy()
    grid = ReturnGrid()
    layers = Layers(hidden=(256, 256), activation="relu")
    targets = PolyakTargets()
    memory_settings = MemoryChoice()

    _keys_per_sample = 2  # keys per sample of a gradient step

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("gradient", in_axes=(None, None, 0, 1), out_axes=(None, 0, None))
    def gradient(self, parameters, target_critics, minibatch, keys):
        """Gradient over a minibatch `[N]` with `keys [2, N]`; also errors `[N]`, and losses."""
        transition, keys = self.buffer.transitions_and_keys(minibatch, keys)
        gradient, losses = jax.grad(self.loss, has_aux=True)(parameters, target_critics, transition, keys)
        return gradient, *off_policy.split_off_error(self, losses)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, learned):
        """One step of Adam on all parameters, then of the target critics."""
        parameters, optimizer_state = self._one_update(gradient, learned.optimizer_state, learned.parameters)
        # The last line of algorithm 1.
        critics = optax.incremental_update(parameters.critics, learned.target_critics, self.target_rate)
        return Learned(parameters, critics, optimizer_state)

    def _init_learned(self, actor_key, critics_key, observation, action) -> Learned:
        critics = self._critics.init(critics_key, observation, action)
        parameters = Parameters(self._actor.init(actor_key, observation), critics, self.entropy.begin())
        return Learned(parameters, jax.tree.map(jnp.copy, critics), self._optimizer.init(parameters))

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, Any, Any]:
        gradient, error, losses = self.gradient(learned.parameters, learned.target_critics, transition, keys)
        return self.update(gradient, learned), error, losses

    def loss(
        self, parameters: Parameters, target_critics: Any, transition: Transition, keys: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum of three losses, each with gradients for its own parameters only.

        So one gradient step updates all parameters; algorithm 1 updates them in turn.
        """
        constant = jax.lax.stop_gradient(parameters)

        # Critics: equation 5.
        next_policy = self._policy(constant.actor, transition.next_observation)
        next_action, next_log_prob = next_policy.sample_with_log_prob(keys[0])
        next_values = self._critics.apply(target_critics, transition.next_observation, next_action)
        # Equations 2 and 3, with the lower value (section 6); the discount is zero only after terminations.
        entropy_cost = jnp.exp(constant.log_temperature) * next_log_prob
        target = self.grid.critic_kind.target(
            transition.reward, transition.discount, *next_values, entropy_cost
        )
        values = self._critics.apply(parameters.critics, transition.observation, transition.action)
        critic_loss, error = self.grid.critic_kind.errors(
            values, jax.lax.stop_gradient(target), transition.weight
        )

        # Actor and temperature, with the lower value of both critics (section 6).
        policy = self._policy(parameters.actor, transition.observation)
        action, log_prob = policy.sample_with_log_prob(keys[1])
        value = self.grid.critic_kind.lower(
            self._critics.apply(constant.critics, transition.observation, action)
        )
        actor_loss, temperature_loss, metrics = self.entropy.losses(
            parameters.log_temperature, log_prob, value, self.env.action_space.shape
        )
        return critic_loss + actor_loss + temperature_loss, {"critic_loss": critic_loss, **metrics, **error}

    def _policy(self, actor: Any, observation: Observation) -> Any:
        """Distribution over actions in [-1, 1], for observations `[N, *obs]`."""
        return squashed(self._actor_output(actor, observation), self.env.action_space.shape)
