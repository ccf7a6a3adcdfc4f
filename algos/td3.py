"""Twin delayed deep deterministic policy gradient: `TD3`, and `FastTD3`.

TD3 (Fujimoto, van Hoof and Meger 2018, arXiv 1802.09477): a deterministic actor with exploration noise, two
critics whose target is the lower of two values of a smoothed action, and less frequent updates of the actor.
FastTD3 (Seo, Sferrazza, Geng, Nauman, Yin and Abbeel 2025, arXiv 2505.22642): many environments, each with
its own noise deviation, large minibatches, few gradient steps, distributional critics.

Shapes: `B` environments, `D` components of an action, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import off_policy, registry
from algos.agent import Agent, Rollouts
from algos.off_policy import ReturnGrid
from algos.replaying import MemoryChoice, ReplayUpdates, Transition
from algos.values import Layers, Network, ObservationNormalizer, OptimizerSettings
from envs import Environment
from fdg.settings.fields import hyperparameter, require, require_not_negative, require_positive
from fdg.settings.parts import Part


class Parameters(NamedTuple):
    """Parameters of the networks, or of their targets."""

    actor: Any
    critics: Any  # of both critics


class Learned(NamedTuple):
    """All that an update changes."""

    parameters: Parameters
    targets: Parameters  # moving averages of `parameters`
    optimizer_state: Parameters  # separate states, since updates happen at different times
    updates: jax.Array  # int32, gradient steps of the critics so far


class NoisyAction(NamedTuple):
    """An action in [-1, 1] with Gaussian noise, clipped to these bounds."""

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
class DelayedTargets(Part):
    """Noise of actions in training and in targets; the delay of actor and target updates."""

    target_rate: float = hyperparameter(0.005, "tau: Polyak step of the target networks, per update")
    exploration_noise: float = hyperparameter(
        0.1, "standard deviation of exploration noise, for actions in [-1, 1]"
    )
    target_noise: float = hyperparameter(0.2, "standard deviation of the noise of target actions")
    target_noise_clip: float = hyperparameter(0.5, "bound to which that noise is clipped")
    policy_delay: int = hyperparameter(2, "critic updates per update of the actor and the targets")

    def check(self, algorithm: Any) -> None:
        """Refuses negative deviations, and exploration without noise."""
        require_positive(algorithm, "exploration_noise")
        require_not_negative(algorithm, "target_noise", "target_noise_clip")


@dataclasses.dataclass(frozen=True)
class TD3(Agent, driver=off_policy, presets="TD3"):
    """TD3 for continuous actions within bounds.

    Defaults are those of the paper (section 6.1 and supplement C) as in CleanRL, except four environments.
    Frozen and hashable.

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
    discount: float = hyperparameter(0.99, "gamma")
    delayed = DelayedTargets()
    grid = ReturnGrid()
    layers = Layers(hidden=(256, 256), activation="relu")
    memory_settings = MemoryChoice()

    _each = 1  # actor outputs per action component
    _keys = 1  # keys per sample of a gradient step

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("gradient", in_axes=(None, None, None, 0, 1), out_axes=(None, 0, None))
    def gradient(self, parameters, targets, is_due, minibatch, keys):
        """Gradients of the losses over a minibatch `[N]`, `keys [1, N]`; the actor's is zero unless
        `is_due`."""
        transition, keys = self.buffer.keyed(minibatch, keys)
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
        """One step of Adam; actor and targets move only if `is_due` (algorithm 1)."""
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

    def _followed(self, targets: Parameters, parameters: Parameters, is_due: jax.Array) -> Parameters:
        """The targets after an update."""
        rate = jnp.where(is_due, self.target_rate, 0.0)
        return optax.incremental_update(parameters, targets, rate)

    def _first(self, actor_key, critics_key, observation, action) -> Learned:
        critics = self._critics.init(critics_key, observation, action)
        parameters = Parameters(self._actor.init(actor_key, observation), critics)
        optimizer_state = Parameters(
            self._optimizer.init(parameters.actor), self._optimizer.init(parameters.critics)
        )
        return Learned(parameters, jax.tree.map(jnp.copy, parameters), optimizer_state, jnp.int32(0))

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, Any, Any]:
        is_due = (learned.updates + 1) % self.policy_delay == 0
        gradient, error, losses = self.gradient(learned.parameters, learned.targets, is_due, transition, keys)
        return self.update(gradient, learned, is_due), error, losses

    def _critic_loss(self, critics: Any, targets: Parameters, transition: Transition, keys: jax.Array):
        target = jax.lax.stop_gradient(self._target(targets, transition, keys))
        given = self._critics.apply(critics, transition.observation, transition.action)
        loss, error = self.grid.reading.errors(given, target, transition.weight)
        return loss, {"critic_loss": loss, "value": jnp.mean(self.grid.reading.lower(given)), **error}

    def _target(self, targets: Parameters, transition: Transition, keys: jax.Array) -> jax.Array:
        """Equation 14, with the clipped noise of target smoothing."""
        smoothed = self._smoothed(targets, transition, keys)
        first, second = self._critics.apply(targets.critics, transition.next_observation, smoothed)
        # The discount is zero after a termination, but not after a truncation.
        free = jnp.zeros_like(transition.reward)
        return self.grid.reading.target(transition.reward, transition.discount, first, second, free)

    def _smoothed(self, targets: Parameters, transition: Any, keys: jax.Array) -> jax.Array:
        """The target actor's next actions with clipped noise, `[N, *action]` in [-1, 1]."""
        action = self._policy(targets.actor, transition.next_observation).mode()
        drawn = jax.vmap(lambda key, one: jax.random.normal(key, one.shape, one.dtype))(keys, action)
        noise = jnp.clip(self.target_noise * drawn, -self.target_noise_clip, self.target_noise_clip)
        return jnp.clip(action + noise, -1.0, 1.0)

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Minus the first critic's value of the actor's actions: the deterministic policy gradient."""
        action = self._policy(actor, transition.observation).mode()
        first, _ = self._critics.apply(critics, transition.observation, action)
        return -jnp.mean(self.grid.reading.value(first))

    def _policy(self, actor, observation) -> NoisyAction:
        """A distribution of noisy actions in [-1, 1], for observations `[N, *obs]`."""
        action = jnp.tanh(self._actor.apply(actor, observation))
        return NoisyAction(action, self.exploration_noise, self.env.action_space.shape)


@dataclasses.dataclass(frozen=True)
class FastTD3(TD3, presets="FastTD3"):
    """FastTD3 for continuous actions within bounds.

    Defaults are those of the authors' code for HumanoidBench (`fast_td3/hyperparams.py` of
    github.com/younggyoseo/FastTD3), for an accelerator: 128 environments, two gradient steps on 32,768
    samples per step of all of them. Unlike in `TD3`, targets use the current actor, target critics are
    updated in every gradient step, the actor maximises the minimum of both critics, and weights decay
    (AdamW).

    >>> import envs
    >>> FastTD3(env=envs.make("Pendulum-v1")).updates_per_iteration
    2
    """

    rollouts = Rollouts(num_envs=128, num_steps=1, total_steps=12_800_000)
    replaying = ReplayUpdates(
        buffer_size=6_553_600, batch_size=32_768, learning_starts=1_280, updates_per_step=1 / 64
    )
    target_rate: float = hyperparameter(0.1, "tau: Polyak step of the target networks, per update")
    exploration_noise: float = hyperparameter(
        0.4, "largest standard deviation of exploration noise, for actions in [-1, 1]: the last environment's"
    )
    smallest_noise: float = hyperparameter(0.001, "smallest of these deviations: the first environment's")
    target_noise: float = hyperparameter(0.001, "standard deviation of the noise of target actions")
    grid = ReturnGrid(atoms=101)
    normalizers = ObservationNormalizer(normalize_observation=True)
    layers = Layers(hidden=(512, 256, 128), activation="relu")
    critic_hidden: tuple[int, ...] | None = hyperparameter(
        (1024, 512, 256), "widths of the critics' layers; None: chosen by observation"
    )
    weight_decay: float = hyperparameter(0.1, "AdamW's weight decay, times the step size")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "smallest_noise")
        require(
            self,
            self.smallest_noise <= self.exploration_noise,
            f"smallest_noise={self.smallest_noise} is above exploration_noise={self.exploration_noise}",
        )
        require(self, self.memory is None, f"memory={self.memory}: FastTD3 has none: use TD3")
        require_not_negative(self, "weight_decay")

    def act(self, actor, statistics, learning, progress, observation, recollection, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and the next memory.

        Noise deviations are evenly spaced from the smallest to the largest, one for each environment. The
        authors' code samples one for each episode, uniformly between the two.
        """
        if recollection is not None:  # of a user's explorer
            return super().act(actor, statistics, learning, progress, observation, recollection, keys)
        noise = jnp.linspace(self.smallest_noise, self.exploration_noise, len(keys), dtype=jnp.float32)
        return self.spread(actor, statistics, learning, observation, keys, noise), None

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0, 0), name="act")
    def spread(self, actor, statistics, learning, observation, keys, noise):
        """As `act`, with the deviations `noise [B]`."""
        policy = self._policy(actor, self.normalizers.seen(statistics, observation))
        policy = policy._replace(noise=noise[:, None])
        # Both branches share a key, since only one result is used.
        shape = self.env.action_space.shape
        uniform = jax.vmap(lambda key: jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0))(keys)
        return jnp.where(learning, policy.sample(keys), uniform)

    def _followed(self, targets: Parameters, parameters: Parameters, is_due: jax.Array) -> Parameters:
        """The current actor, and moving averages of the critics."""
        return Parameters(
            optax.incremental_update(parameters.actor, targets.actor, 1.0),
            optax.incremental_update(parameters.critics, targets.critics, self.target_rate),
        )

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """The negative lower critic's value of the actor's actions."""
        action = self._policy(actor, transition.observation).mode()
        return -jnp.mean(
            self.grid.reading.lower(self._critics.apply(critics, transition.observation, action))
        )

    @property
    def _critics(self) -> Network:
        layers = dataclasses.replace(self.layers, hidden=self.critic_hidden)
        return registry.option("networks").critics_of(self, layers)

    @property
    def _default_optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(registry.option("optimizers").step_size_of(self), weight_decay=self.weight_decay)
