"""ReBRAC (Tarasov, Kurenkov, Nikulin and Kolesnikov 2023, arXiv 2305.09836): TD3 that stays near the data.

Actor and critics pay, each by a weight of its own, for actions that are not those of the data. All else is
TD3 (`algos/td3.py`) with normalised layers of the critics.

Letters in shapes: `B` environments, `n` samples of each, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from algos import off_policy
from algos.agent import Agent, Rollouts
from algos.critic_readings import ReturnGrid
from algos.explorers import ExplorerChoice
from algos.layers import Layers
from algos.networks import Network
from algos.normalize import ObservationNormalizer, Transforming
from algos.off_policy import ActorAndCritics
from algos.offline import learning
from algos.offline.learning import Data
from algos.optimizers import OptimizerSettings
from algos.replay import Replay, Step, Transition, summarize
from algos.td3 import TD3, DelayedTargets, Parameters
from envs import Box, Environment, Observation
from fdg.settings.fields import hyperparameter, require_not_negative


class Followed(NamedTuple):
    """A `Transition`, and what was done next."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, *action]
    reward: jax.Array  # [N] float32
    discount: jax.Array  # [N] float32
    next_observation: Observation  # [N, *obs]
    next_action: jax.Array  # [N, *action], of the data after `next_observation`
    follows: jax.Array  # [N] bool: the episode continued, so that there is one
    weight: None = None  # as of a `Transition`


class Pairs(Replay):
    """Replay of single steps, each with the action of the next: windows of two."""

    def _of_windows(self, windows: Step) -> Followed:
        """Of windows `[B, n, 2]`: `[B, n]`."""
        single = jax.tree.map(lambda x: x[:, :, :1], windows)
        transition = jax.vmap(lambda window: summarize(window, self.discount))(single)
        ended = windows.terminated | windows.truncated
        return Followed(*transition[:5], windows.action[:, :, 1], ~ended[:, :, 0])


@dataclasses.dataclass(frozen=True)
class ReBRAC(Agent):
    """ReBRAC for continuous actions within bounds, from a data set, then online.

    Defaults are those of the paper for locomotion (appendix B), whose weights of both penalties are chosen by
    data set. Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, actions without bounds, or a data set of other spaces.

    >>> import envs
    >>> ReBRAC(env=envs.make("Pendulum-v1"), num_steps=2).updates_per_iteration
    16
    """

    presets_of: ClassVar[str] = "ReBRAC"
    action_spaces: ClassVar[tuple[type, ...]] = (Box,)
    default_env: ClassVar[str] = "Pendulum-v1"
    steps_are: ClassVar[str] = "steps"

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=1_000_000)
    data = Data(batch_size=1024)
    optimizer_settings = OptimizerSettings(learning_rate=1e-3)
    discount: float = hyperparameter(0.99, "gamma")
    actor_penalty: float = hyperparameter(
        0.01, "beta_1: of the squared distance to the action in the data, against values of scale one"
    )
    critic_penalty: float = hyperparameter(
        0.01, "beta_2: of the squared distance to the next action in the data, in the critics' targets"
    )
    delayed = DelayedTargets()
    grid = ReturnGrid()
    normalizers = ObservationNormalizer()
    layers = Layers(hidden=(256, 256, 256), activation="relu")
    critic_layer_norm: bool = hyperparameter(
        True, "normalise each layer of the critics before its activation"
    )
    networks = ActorAndCritics()
    explorer = ExplorerChoice()
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        off_policy.check(self)
        require_not_negative(self, "actor_penalty", "critic_penalty")

    # --- what all have that learn from data: `algos/offline/learning.py` ---

    updates_per_iteration = property(learning.updates)
    learning_starts = property(learning.learning_starts)
    buffer = property(lambda self: learning.buffer(self, Pairs, n_step=2))
    init, iterate, actor = learning.init, learning.iterate, off_policy.actor
    act, learn = off_policy.act, off_policy.learn
    _keys = 1  # of each sample of a gradient step
    _recurrent = None

    # --- what it has of TD3: the critics' loss, and when what is updated ---

    gradient, update = TD3.gradient, TD3.update
    _first, _acting, _learn_from = TD3._first, TD3._acting, TD3._learn_from
    _followed = TD3._followed
    check_when_traced, _acts, _valued = TD3.check_when_traced, TD3._acts, TD3._valued
    _check_critics = TD3._check_critics
    _actor, _for_environment, _default_optimizer = TD3._actor, TD3._for_environment, TD3._default_optimizer
    _critic_loss, _policy, _smoothed = TD3._critic_loss, TD3._policy, TD3._smoothed

    def _target(self, targets: Parameters, transition: Followed, keys: jax.Array) -> jax.Array:
        """What the critics are fitted to: that of TD3, less the penalty of what would follow."""
        smoothed = self._smoothed(targets, transition, keys)
        first, second = self._critics.apply(targets.critics, transition.next_observation, smoothed)
        # The data has no action after a truncation.
        distance = jnp.where(transition.follows, squared_distance(smoothed, transition.next_action), 0.0)
        cost = self.critic_penalty * distance
        return self.grid.reading.target(transition.reward, transition.discount, first, second, cost)

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition | Followed) -> jax.Array:
        """The penalty, and minus the lower critic's value, divided by its mean size in the minibatch."""
        action = self._policy(actor, transition.observation).mode()
        value = self.grid.lower(self._critics.apply(critics, transition.observation, action))
        scale = 1.0 / jnp.mean(jnp.abs(jax.lax.stop_gradient(value)))
        penalty = squared_distance(action, transition.action)
        return jnp.mean(self.actor_penalty * penalty - scale * value)

    # --- parts ---

    @property
    def _critics(self) -> Network:
        layers = dataclasses.replace(self.layers, layer_norm=self.critic_layer_norm)
        return off_policy.twin_critics(self, layers)


def squared_distance(one: jax.Array, other: jax.Array) -> jax.Array:
    """Squared Euclidean distances of actions `[N, *action]`: `[N]`.

    >>> squared_distance(jnp.array([[1.0, 2.0]]), jnp.zeros((1, 2))).tolist()
    [5.0]
    """
    return jnp.sum(jnp.square(one - other).reshape(one.shape[0], -1), axis=1)
