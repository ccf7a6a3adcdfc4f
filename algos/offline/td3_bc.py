"""TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860): TD3, whose actor also imitates the data.

All but the loss of the actor is TD3 (`algos/td3.py`), and so is the state: a run of TD3 can begin with what a
run of TD3+BC has learned (`--from`). Equations below are numbered as in the paper.

Letters in shapes: `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from algos import off_policy
from algos.agent import Agent, Rollouts
from algos.critic_readings import ReturnGrid
from algos.explorers import ExplorerChoice
from algos.layers import Layers
from algos.normalize import ObservationNormalizer, Transforming
from algos.off_policy import ActorAndCritics
from algos.offline import learning
from algos.offline.learning import Data
from algos.optimizers import OptimizerSettings
from algos.replay import Transition
from algos.td3 import TD3, DelayedTargets
from envs import Box, Environment
from fdg.settings.fields import hyperparameter, require_not_negative


@dataclasses.dataclass(frozen=True)
class TD3BC(Agent):
    """TD3+BC for continuous actions within bounds, from a data set, then online.

    Defaults are those of the paper (its table 5): observations are normalised by the statistics of the data.
    Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, actions without bounds, or a data set of other spaces.

    >>> import envs
    >>> TD3BC(env=envs.make("Pendulum-v1"), num_steps=2).updates_per_iteration
    16
    """

    presets_of: ClassVar[str] = "TD3BC"
    action_spaces: ClassVar[tuple[type, ...]] = (Box,)
    default_env: ClassVar[str] = "Pendulum-v1"
    steps_are: ClassVar[str] = "steps"

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=1_000_000)
    data = Data()
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discount: float = hyperparameter(0.99, "gamma")
    value_weight: float = hyperparameter(
        2.5, "alpha of equation 5: of the critics' values, whose scale is one, against imitation"
    )
    delayed = DelayedTargets()
    grid = ReturnGrid()
    normalizers = ObservationNormalizer(normalize_observation=True)
    layers = Layers(hidden=(256, 256), activation="relu")
    networks = ActorAndCritics()
    explorer = ExplorerChoice()
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        off_policy.check(self)
        require_not_negative(self, "value_weight")

    # --- what all have that learn from data: `algos/offline/learning.py` ---

    updates_per_iteration = property(learning.updates)
    learning_starts = property(learning.learning_starts)
    buffer = property(learning.buffer)
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
    _actor, _critics = TD3._actor, TD3._critics
    _for_environment, _default_optimizer = TD3._for_environment, TD3._default_optimizer
    _critic_loss, _target, _policy = TD3._critic_loss, TD3._target, TD3._policy
    _smoothed = TD3._smoothed

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Equations 3 and 5: minus the first critic's value, weighed, and the error of imitation."""
        action = self._policy(actor, transition.observation).mode()
        first, _ = self._critics.apply(critics, transition.observation, action)
        value = self.grid.reading.value(first)
        scale = self.value_weight / jnp.mean(jnp.abs(jax.lax.stop_gradient(value)))
        return jnp.mean(jnp.square(action - transition.action)) - scale * jnp.mean(value)
