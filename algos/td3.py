"""Twin delayed deep deterministic policy gradient (TD3; Fujimoto, van Hoof and Meger 2018, arXiv 1802.09477).

A deterministic actor that explores with noise, two critics fitted to the lower of two targets, whose actions
are smoothed by noise, and an actor that is updated less often than they are.

Letters in shapes: `D` components of an action, `N` samples of a minibatch.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import off_policy
from algos.agent import Agent, Rollouts
from algos.critic_readings import ReturnGrid
from algos.distributions import Normal
from algos.explorers import ExplorerChoice
from algos.layers import Layers
from algos.normalize import ObservationNormalizer, Transforming
from algos.off_policy import ActorAndCritics
from algos.optimizers import OptimizerSettings
from algos.recurrent import RecurrentNetwork
from algos.replay import ReplayUpdates, StepReplay, Transition, whole_updates
from algos.sequences import SequenceMemory
from envs import Box, Environment
from fdg.settings.fields import hyperparameter, require_not_negative, require_positive
from fdg.settings.parts import Part


class Parameters(NamedTuple):
    """Of the networks that act and value, or of those that follow them slowly."""

    actor: Any
    critics: Any  # of both


class Learned(NamedTuple):
    """All that an update changes."""

    parameters: Parameters
    targets: Parameters  # follow `parameters` slowly
    optimizer_state: Parameters  # of each part by itself, for they are updated at different times
    updates: jax.Array  # int32, gradient steps of the critics so far


class NoisyAction(NamedTuple):
    """An action in [-1, 1], and Gaussian noise about it, cut off at these bounds."""

    action: jax.Array  # [..., D] float32
    noise: Any  # [] float32, standard deviation
    shape: tuple[int, ...]

    def sample(self, keys: jax.Array) -> jax.Array:
        """Random actions `[..., *shape]`; `keys` is one, or one per element of the leading axes."""
        log_std = jnp.broadcast_to(jnp.log(self.noise), self.action.shape)
        return jnp.clip(Normal(self.action, log_std, self.shape).sample(keys), -1.0, 1.0)

    def mode(self) -> jax.Array:
        """The action without noise, `[..., *shape]`."""
        return self.action.reshape(*self.action.shape[:-1], *self.shape)


@dataclasses.dataclass(frozen=True)
class DelayedTargets(Part):
    """Noise of actions, in training and in targets, and when the actor and the targets are updated."""

    target_rate: float = hyperparameter(0.005, "tau: the part of the way that targets go at an update")
    exploration_noise: float = hyperparameter(0.1, "standard deviation of actions in [-1, 1], in training")
    target_noise: float = hyperparameter(0.2, "standard deviation of the targets' actions")
    target_noise_clip: float = hyperparameter(0.5, "what that noise is cut off at")
    policy_delay: int = hyperparameter(2, "updates of the critics for each of the actor and the targets")

    def check(self, algorithm: Any) -> None:
        """Refuses deviations below zero, and an exploration that has none."""
        require_positive(algorithm, "exploration_noise")
        require_not_negative(algorithm, "target_noise", "target_noise_clip")


@dataclasses.dataclass(frozen=True)
class TD3(Agent):
    """TD3 for continuous actions within bounds.

    Defaults are those of the paper (section 6.1 and its supplement C) as CleanRL has them, but for four
    environments that are stepped together. Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> TD3(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=2).updates_per_iteration
    8
    """

    presets_of: ClassVar[str] = "TD3"
    action_spaces: ClassVar[tuple[type, ...]] = (Box,)
    default_env: ClassVar[str] = "Pendulum-v1"

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=1, total_steps=1_000_000)
    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=25_000, updates_per_step=1.0
    )
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discount: float = hyperparameter(0.99, "gamma")
    delayed = DelayedTargets()
    grid = ReturnGrid()
    normalizers = ObservationNormalizer()
    layers = Layers(hidden=(256, 256), activation="relu")
    networks = ActorAndCritics()
    transforming = Transforming()
    replays = StepReplay()
    explorer = ExplorerChoice()
    remembering = SequenceMemory()

    def __post_init__(self):
        self._check()
        off_policy.check(self)

    # --- what all have that learn off policy: `algos/off_policy.py` ---

    updates_per_iteration = property(whole_updates)
    buffer = property(off_policy.buffer)
    init, iterate, actor = off_policy.init, off_policy.iterate, off_policy.actor
    act, learn = off_policy.act, off_policy.learn
    _actor, _critics = property(off_policy.deterministic_actor), property(off_policy.twin_critics)
    _for_environment, _default_optimizer = off_policy.for_environment, property(off_policy.adam)
    _acting, check_when_traced = off_policy.actor_parameters, off_policy.check_deterministic
    _acts, _valued, _check_critics = off_policy.actor_output, off_policy.valued, off_policy.check_twins
    _keys = 1  # of each sample of a gradient step

    # --- fragments; `step` and `observe` are those of every agent ---

    @fdg.fragment("gradient", in_axes=(None, None, None, 0, 1), out_axes=(None, 0, None))
    def gradient(self, parameters, targets, is_due, minibatch, keys):
        """Gradients of the losses over a minibatch `[N]`, `keys [1, N]`; the actor's is zero unless due."""
        transition, keys = off_policy.rows(self, minibatch, keys)
        critics, losses = jax.grad(self._critic_loss, has_aux=True)(
            parameters.critics, targets, transition, keys[0]
        )
        actor = jax.lax.cond(
            is_due,
            lambda actor: jax.grad(self._actor_loss)(actor, parameters.critics, transition),
            lambda actor: jax.tree.map(jnp.zeros_like, actor),
            parameters.actor,
        )
        return Parameters(actor, critics), *off_policy.without_error(self, losses)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, learned, is_due):
        """One step of Adam; actor and targets move only where they are due (algorithm 1)."""
        parameters, targets, optimizer_state, updates = learned
        critics, critics_state = self._one_update(
            gradient.critics, optimizer_state.critics, parameters.critics
        )
        actor, actor_state = self._one_update(gradient.actor, optimizer_state.actor, parameters.actor)
        actor, actor_state = jax.tree.map(
            lambda new, old: jnp.where(is_due, new, old),
            (actor, actor_state), (parameters.actor, optimizer_state.actor),
        )  # fmt: skip
        parameters = Parameters(actor, critics)
        targets = self._followed(targets, parameters, is_due)
        return Learned(parameters, targets, Parameters(actor_state, critics_state), updates + 1)

    # --- parts ---

    def _followed(self, targets: Parameters, parameters: Parameters, is_due: jax.Array) -> Parameters:
        """The targets after an update."""
        rate = jnp.where(is_due, self.target_rate, 0.0)
        return optax.incremental_update(parameters, targets, rate)

    def _first(self, actor_key, critics_key, observation, action) -> Learned:
        """All that an update changes, at first; of observations and actions `[B, ...]` only types count."""
        critics = self._critics.init(critics_key, observation, action)
        parameters = Parameters(self._actor.init(actor_key, observation), critics)
        optimizer_state = Parameters(
            self._optimizer.init(parameters.actor), self._optimizer.init(parameters.critics)
        )
        return Learned(parameters, jax.tree.map(jnp.copy, parameters), optimizer_state, jnp.int32(0))

    def _learn_from(
        self, learned: Learned, transition: Transition, keys: jax.Array
    ) -> tuple[Learned, Any, Any]:
        is_due = (learned.updates + 1) % self.policy_delay == 0
        gradient, error, losses = self.gradient(learned.parameters, learned.targets, is_due, transition, keys)
        return self.update(gradient, learned, is_due), error, losses

    def _critic_loss(self, critics: Any, targets: Parameters, transition: Transition, keys: jax.Array):
        """The squared errors of both critics, and what is told of them."""
        target = jax.lax.stop_gradient(self._target(targets, transition, keys))
        given = self._critics.apply(critics, transition.observation, transition.action)
        loss, error = self.grid.errors(given, target, transition.weight)
        return loss, {"critic_loss": loss, "value": jnp.mean(self.grid.lower(given)), **error}

    def _target(self, targets: Parameters, transition: Transition, keys: jax.Array) -> jax.Array:
        """What the critics are fitted to: equation 14, with the clipped noise of target smoothing."""
        smoothed = self._smoothed(targets, transition, keys)
        first, second = self._critics.apply(targets.critics, transition.next_observation, smoothed)
        # The discount is zero where the episode terminated, and not where it was truncated.
        free = jnp.zeros_like(transition.reward)
        return self.grid.reading.target(transition.reward, transition.discount, first, second, free)

    def _smoothed(self, targets: Parameters, transition: Any, keys: jax.Array) -> jax.Array:
        """What the target actor would do next, with clipped noise: `[N, *action]` in [-1, 1]."""
        action = self._policy(targets.actor, transition.next_observation).mode()
        drawn = jax.vmap(lambda key, one: jax.random.normal(key, one.shape))(keys, action)
        noise = jnp.clip(self.target_noise * drawn, -self.target_noise_clip, self.target_noise_clip)
        return jnp.clip(action + noise, -1.0, 1.0)

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Minus the first critic's value of what the actor does: the deterministic policy gradient."""
        action = self._policy(actor, transition.observation).mode()
        first, _ = self._critics.apply(critics, transition.observation, action)
        return -jnp.mean(self.grid.reading.value(first))

    def _policy(self, actor, observation) -> NoisyAction:
        """Actions in [-1, 1] with noise about them, for observations `[N, *obs]`."""
        action = jnp.tanh(self._actor.apply(actor, observation))
        return NoisyAction(action, self.exploration_noise, self.env.action_space.shape)

    @property
    def _recurrent(self) -> tuple[RecurrentNetwork, RecurrentNetwork] | None:
        """Actor and critics with memories; None without."""
        return off_policy.recurrent(self, math.prod(self.env.action_space.shape))
