"""TD3 from a data set: `TD3BC` and `ReBRAC`.

In TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860), the actor also imitates the data. In ReBRAC (Tarasov,
Kurenkov, Nikulin and Kolesnikov 2023, arXiv 2305.09836), actor and critics have separate penalties for
deviating from the data's actions, and the critics have layer normalisation. All else, and the state, are as
in TD3 (`algos/td3.py`), so a run of TD3 can start from a run of either (`--from`).

Shapes: `B` environments, `n` samples of each, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos import networks
from algos.agent import Agent, Rollouts
from algos.off_policy import ReturnGrid
from algos.offline import learning
from algos.offline.learning import Data
from algos.replay import Replay, Step, summarize
from algos.replaying import Transition
from algos.td3 import TD3, DelayedTargets, Parameters
from algos.values import Discount, Layers, Network, ObservationNormalizer, OptimizerSettings
from envs import Environment, Observation
from fdg.settings.fields import hyperparameter, require_not_negative


@dataclasses.dataclass(frozen=True)
class TD3BC(Agent, driver=learning, presets="TD3BC"):
    """TD3+BC for continuous actions within bounds, from a data set, then online.

    Defaults are those of the paper (table 5): observations are normalised by the data's statistics.

    >>> import envs
    >>> TD3BC(env=envs.make("Pendulum-v1"), num_steps=2).updates_per_iteration
    16
    """

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=1_000_000)
    data = Data()
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discounting = Discount()
    value_weight: float = hyperparameter(
        2.5,
        "alpha of equation 5: weight of the critics' values (divided by their mean size) against imitation",
    )
    delayed = DelayedTargets()
    grid = ReturnGrid()
    normalizers = ObservationNormalizer(normalize_observation=True)
    layers = Layers(hidden=(256, 256), activation="relu")

    def __post_init__(self):
        self._check()
        require_not_negative(self, "value_weight")

    _keys_per_sample = 1  # in a gradient step

    gradient, update, _outputs_per_component = TD3.gradient, TD3.update, TD3._outputs_per_component
    _init_learned, _learn_from, _update_targets = TD3._init_learned, TD3._learn_from, TD3._update_targets
    _critic_loss, _target, _policy, _smooth_actions = (
        TD3._critic_loss,
        TD3._target,
        TD3._policy,
        TD3._smooth_actions,
    )

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Equations 3 and 5; the divisor is of values of the actor's actions, as in the authors' code."""
        action = self._policy(actor, transition.observation).mode()
        first, _ = self._critics.apply(critics, transition.observation, action)
        value = self.grid.critic_kind.value(first)
        scale = self.value_weight / jnp.mean(jnp.abs(jax.lax.stop_gradient(value)))
        return jnp.mean(jnp.square(action - transition.action)) - scale * jnp.mean(value)


class TransitionWithNextAction(NamedTuple):
    """A `Transition` with the next action."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, *action]
    reward: jax.Array  # [N] float32
    discount: jax.Array  # [N] float32
    next_observation: Observation  # [N, *obs]
    next_action: jax.Array  # [N, *action], the data's action at `next_observation`
    follows: jax.Array  # [N] bool: the episode continued, so `next_action` is valid
    weight: None = None  # as in `Transition`


class ReplayWithNextAction(Replay):
    """A replay buffer that samples windows of two steps: a transition, and the next action."""

    def _minibatch_of_windows(self, windows: Step) -> TransitionWithNextAction:
        """Transitions `[B, n]` of windows `[B, n, 2]`."""
        first_steps = jax.tree.map(lambda x: x[:, :, :1], windows)
        transition = jax.vmap(lambda window: summarize(window, self.discount))(first_steps)
        ended = windows.terminated | windows.truncated
        # The first five fields are all but `weight`.
        return TransitionWithNextAction(*transition[:5], windows.action[:, :, 1], ~ended[:, :, 0])


@dataclasses.dataclass(frozen=True)
class ReBRAC(Agent, driver=learning, presets="ReBRAC"):
    """ReBRAC for continuous actions within bounds, from a data set, then online.

    Defaults are those of the paper for locomotion (appendix B), which tunes both penalties per data set.
    """

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=1_000_000)
    data = Data(batch_size=1024)
    optimizer_settings = OptimizerSettings(learning_rate=1e-3)
    discounting = Discount()
    actor_penalty: float = hyperparameter(
        0.01, "beta_1: weight of the squared distance to the action in the data, against normalised values"
    )
    critic_penalty: float = hyperparameter(
        0.01, "beta_2: weight of the squared distance to the next action in the data, in the critics' targets"
    )
    delayed = DelayedTargets()
    grid = ReturnGrid()
    layers = Layers(hidden=(256, 256, 256), activation="relu")
    critic_layer_norm: bool = hyperparameter(
        True, "normalise each layer of the critics before its activation"
    )

    def __post_init__(self):
        self._check()
        require_not_negative(self, "actor_penalty", "critic_penalty")

    buffer = property(lambda self: learning.buffer(self, ReplayWithNextAction, n_step=2))
    _keys_per_sample = 1  # in a gradient step

    gradient, update, _outputs_per_component = TD3.gradient, TD3.update, TD3._outputs_per_component
    _init_learned, _learn_from, _update_targets = TD3._init_learned, TD3._learn_from, TD3._update_targets
    _critic_loss, _policy, _smooth_actions = TD3._critic_loss, TD3._policy, TD3._smooth_actions

    def _target(
        self, targets: Parameters, transition: TransitionWithNextAction, keys: jax.Array
    ) -> jax.Array:
        """TD3's target with a penalty for the distance of the smoothed action to the data's next action."""
        smoothed = self._smooth_actions(targets, transition, keys)
        first, second = self._critics.apply(targets.critics, transition.next_observation, smoothed)
        # The data has no action after a truncation.
        distance = jnp.where(transition.follows, squared_distance(smoothed, transition.next_action), 0.0)
        cost = self.critic_penalty * distance
        return self.grid.critic_kind.target(transition.reward, transition.discount, first, second, cost)

    def _actor_loss(
        self, actor: Any, critics: Any, transition: Transition | TransitionWithNextAction
    ) -> jax.Array:
        """The penalty, minus the lower critic's value divided by its mean magnitude in the minibatch."""
        action = self._policy(actor, transition.observation).mode()
        value = self.grid.critic_kind.lower(self._critics.apply(critics, transition.observation, action))
        scale = 1.0 / jnp.mean(jnp.abs(jax.lax.stop_gradient(value)))
        penalty = squared_distance(action, transition.action)
        return jnp.mean(self.actor_penalty * penalty - scale * value)

    @property
    def _critics(self) -> Network:
        layers = dataclasses.replace(self.layers, layer_norm=self.critic_layer_norm)
        return networks.critics_of(self, layers)


def squared_distance(one: jax.Array, other: jax.Array) -> jax.Array:
    """Squared Euclidean distances of actions `[N, *action]`: `[N]`.

    >>> squared_distance(jnp.array([[1.0, 2.0]]), jnp.zeros((1, 2))).tolist()
    [5.0]
    """
    return jnp.sum(jnp.square(one - other).reshape(one.shape[0], -1), axis=1)
