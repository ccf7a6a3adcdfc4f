"""Twin delayed deep deterministic policy gradient (Fujimoto, van Hoof and Meger 2018, arXiv 1802.09477).

TD3 has a deterministic actor with exploration noise, and two critics. A critic's target is the lower of both
target critics' values of a smoothed action. The actor is updated less often than the critics.

Shapes: `D` components of an action, `N` samples of a minibatch.
"""

import dataclasses
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
from envs import Environment
from fdg.settings.fields import hyperparameter, require_not_negative, require_positive


class Parameters(NamedTuple):
    """Parameters of the networks, or of their targets."""

    actor: Any
    critics: Any  # of both critics


class Learned(NamedTuple):
    """All values that an update changes."""

    parameters: Parameters
    targets: Parameters  # moving averages of `parameters`
    optimizer_state: Parameters  # two states, since actor and critics are updated at different times
    updates: jax.Array  # int32, gradient steps of the critics so far


class NoisyAction(NamedTuple):
    """An action in [-1, 1] plus Gaussian noise, clipped to [-1, 1]."""

    action: jax.Array  # [..., D] float32
    noise: Any  # [] float32, standard deviation
    shape: tuple[int, ...]

    def sample(self, keys: jax.Array) -> jax.Array:
        """Random actions `[..., *shape]`; `keys` is one, or one per element of the leading axes."""
        log_std = jnp.broadcast_to(jnp.log(self.noise), self.action.shape)
        normal = registry.option("distributions").Normal(self.action, log_std, self.shape)
        return jnp.clip(normal.sample(keys), -1.0, 1.0)

    def mode(self) -> jax.Array:
        """The action without noise, `[..., *shape]`."""
        return self.action.reshape(*self.action.shape[:-1], *self.shape)


@dataclasses.dataclass(frozen=True)
class DelayedTargets(PolyakTargets):
    """Settings of noise, in exploration and in targets, and of the delay of actor and target updates."""

    exploration_noise: float = hyperparameter(
        0.1, "standard deviation of exploration noise, for actions in [-1, 1]"
    )
    target_noise: float = hyperparameter(0.2, "standard deviation of the noise of target actions")
    target_noise_clip: float = hyperparameter(0.5, "bound to which the noise of target actions is clipped")
    policy_delay: int = hyperparameter(2, "critic updates per update of the actor and the targets")

    def check(self, algorithm: Any) -> None:
        """Refuses negative deviations, and exploration without noise."""
        require_positive(algorithm, "exploration_noise")
        require_not_negative(algorithm, "target_noise", "target_noise_clip")


@dataclasses.dataclass(frozen=True)
class TD3(Agent, driver=off_policy, presets="TD3"):
    """TD3 for continuous actions within bounds.

    Defaults are those of the paper (section 6.1 and supplement C) as in CleanRL, but with four environments.

    >>> import envs
    >>> TD3(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=2).updates_per_iteration
    8
    """

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=1, total_steps=1_000_000)
    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=25_000, updates_per_step=1.0
    )
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discounting = Discount()
    delayed = DelayedTargets()
    grid = ReturnGrid()
    layers = Layers(hidden=(256, 256), activation="relu")
    memory_settings = MemoryChoice()

    _outputs_per_component = 1  # actor outputs per action component
    _keys_per_sample = 1  # keys per sample of a gradient step

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("gradient", in_axes=(None, None, None, 0, 1), out_axes=(None, 0, None))
    def gradient(self, parameters, targets, is_due, minibatch, keys):
        """Gradients over a minibatch `[N]` with `keys [1, N]`; the actor's are zero unless `is_due`."""
        transition, keys = self.buffer.transitions_and_keys(minibatch, keys)
        critics, losses = jax.grad(self._critic_loss, has_aux=True)(
            parameters.critics, targets, transition, keys[0]
        )
        actor = jax.lax.cond(
            is_due,
            lambda actor: jax.grad(self._actor_loss)(actor, parameters.critics, transition),
            lambda actor: jax.tree.map(jnp.zeros_like, actor),
            parameters.actor,
        )
        return Parameters(actor, critics), *off_policy.split_off_error(self, losses)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, learned, is_due):
        """One step of Adam; actor and targets change only if `is_due` (algorithm 1)."""
        parameters, targets, state, updates = learned
        critics, critics_state = self._one_update(gradient.critics, state.critics, parameters.critics)
        before = parameters.actor, state.actor
        after = self._one_update(gradient.actor, state.actor, parameters.actor)
        actor, actor_state = registry.option("optimizers").update_if(is_due, after, before)
        parameters = Parameters(actor, critics)
        targets = self._update_targets(targets, parameters, is_due)
        return Learned(parameters, targets, Parameters(actor_state, critics_state), updates + 1)

    def _update_targets(self, targets: Parameters, parameters: Parameters, is_due: jax.Array) -> Parameters:
        """The targets after an update."""
        rate = jnp.where(is_due, self.target_rate, 0.0)
        return optax.incremental_update(parameters, targets, rate)

    def _init_learned(self, actor_key, critics_key, observation, action) -> Learned:
        critics = self._critics.init(critics_key, observation, action)
        parameters = Parameters(self._actor.init(actor_key, observation), critics)
        init = self._optimizer.init
        states = Parameters(init(parameters.actor), init(parameters.critics))
        return Learned(parameters, jax.tree.map(jnp.copy, parameters), states, jnp.int32(0))

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, Any, Any]:
        is_due = (learned.updates + 1) % self.policy_delay == 0
        gradient, error, losses = self.gradient(learned.parameters, learned.targets, is_due, transition, keys)
        return self.update(gradient, learned, is_due), error, losses

    def _critic_loss(self, critics: Any, targets: Parameters, transition: Transition, keys: jax.Array):
        target = jax.lax.stop_gradient(self._target(targets, transition, keys))
        values = self._critics.apply(critics, transition.observation, transition.action)
        loss, error = self.grid.critic_kind.errors(values, target, transition.weight)
        return loss, {"critic_loss": loss, "value": jnp.mean(self.grid.critic_kind.lower(values)), **error}

    def _target(self, targets: Parameters, transition: Transition, keys: jax.Array) -> jax.Array:
        """The critics' target: equation 14, whose clipped noise smooths the target."""
        smoothed = self._smooth_actions(targets, transition, keys)
        first, second = self._critics.apply(targets.critics, transition.next_observation, smoothed)
        # The discount is zero after a termination, but not after a truncation.
        no_cost = jnp.zeros_like(transition.reward)
        return self.grid.critic_kind.target(transition.reward, transition.discount, first, second, no_cost)

    def _smooth_actions(self, targets: Parameters, transition: Any, keys: jax.Array) -> jax.Array:
        """The target actor's next actions with clipped noise, `[N, *action]` in [-1, 1]."""
        action = self._policy(targets.actor, transition.next_observation).mode()
        normal = jax.vmap(lambda key, row: jax.random.normal(key, row.shape, row.dtype))(keys, action)
        noise = jnp.clip(self.target_noise * normal, -self.target_noise_clip, self.target_noise_clip)
        return jnp.clip(action + noise, -1.0, 1.0)

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Minus the first critic's value of the actor's actions: the deterministic policy gradient."""
        action = self._policy(actor, transition.observation).mode()
        first, _ = self._critics.apply(critics, transition.observation, action)
        return -jnp.mean(self.grid.critic_kind.value(first))

    def _policy(self, actor, observation) -> NoisyAction:
        """A distribution of noisy actions in [-1, 1], for observations `[N, *obs]`."""
        action = jnp.tanh(self._actor.apply(actor, observation))
        return NoisyAction(action, self.exploration_noise, self.env.action_space.shape)
