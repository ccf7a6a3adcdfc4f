"""TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860): TD3, whose actor also imitates the data.

All but the loss of the actor is TD3 (`algos/td3.py`), and so is the state: a run of TD3 can begin with what a
run of TD3+BC has learned (`--from`). Equations below are numbered as in the paper.

Letters in shapes: `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from algos import given, off_policy
from algos.agent import Agent, Rollouts
from algos.critic_readings import ReturnGrid
from algos.explorers import ExplorerChoice
from algos.given import NETWORK, Network
from algos.layers import Layers
from algos.normalize import ObservationNormalizer, Transforming
from algos.off_policy import State
from algos.offline import learning
from algos.offline.learning import Data
from algos.optimizers import OptimizerSettings
from algos.replay import Transition
from algos.td3 import TD3
from envs import Box, Environment, composite
from fdg.settings.fields import hyperparameter, require, require_positive, require_within


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
    target_rate: float = hyperparameter(0.005, "tau: the part of the way that targets go at an update")
    exploration_noise: float = hyperparameter(0.1, "standard deviation of actions in [-1, 1], online")
    target_noise: float = hyperparameter(0.2, "standard deviation of the targets' actions")
    target_noise_clip: float = hyperparameter(0.5, "what that noise is cut off at")
    policy_delay: int = hyperparameter(2, "updates of the critics for each of the actor and the targets")
    grid = ReturnGrid()
    normalizers = ObservationNormalizer(normalize_observation=True)
    layers = Layers(hidden=(256, 256), activation="relu")
    # Any (init, apply) pairs in place of the defaults, as of TD3.
    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    critic_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    explorer = ExplorerChoice()
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        off_policy.check(self)
        require_positive(self, "exploration_noise", "policy_delay")
        require_within(self, 0, 1, "target_rate")
        for name in ("value_weight", "target_noise", "target_noise_clip"):
            value = getattr(self, name)
            require(self, value >= 0, f"{name}={value}: it is below zero")

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
    _actor, _critics = TD3._actor, TD3._critics
    _for_environment, _default_optimizer = TD3._for_environment, TD3._default_optimizer
    _critic_loss, _target, _policy = TD3._critic_loss, TD3._target, TD3._policy

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Equations 3 and 5: minus the first critic's value, weighed, and the error of imitation."""
        action = self._policy(actor, transition.observation).mode()
        first, _ = self._critics.apply(critics, transition.observation, action)
        value = self.grid.reading.value(first)
        scale = self.value_weight / jnp.mean(jnp.abs(jax.lax.stop_gradient(value)))
        return jnp.mean(jnp.square(action - transition.action)) - scale * jnp.mean(value)

    # --- parts ---

    def check_when_traced(self, state: State) -> None:
        """Refuses networks whose results do not fit the action space."""
        observation = composite.types(self.env.observation_space, (self.num_envs,))
        actor = jax.eval_shape(self._actor.apply, state.learned.parameters.actor, observation)
        given.actions(actor, self.env.action_space, self.num_envs)
        learning.check_critics(self, state, self.grid.reading.outputs)
