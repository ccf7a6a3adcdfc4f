"""FastTD3 (Seo, Sferrazza, Geng, Nauman, Yin and Abbeel 2025, arXiv 2505.22642).

TD3 with many environments, large minibatches, few gradient steps, critics that give distributions of returns,
and another deviation of the exploration noise in each environment.

Letters in shapes: `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import off_policy
from algos.agent import Rollouts
from algos.critic_readings import ReturnGrid
from algos.layers import Layers
from algos.networks import Network
from algos.normalize import ObservationNormalizer
from algos.replay import ReplayUpdates, Transition
from algos.td3 import TD3, Parameters
from fdg.settings.fields import hyperparameter, require, require_not_negative, require_positive


@dataclasses.dataclass(frozen=True)
class FastTD3(TD3):
    """FastTD3 for continuous actions within bounds.

    Defaults are those of the authors' code for HumanoidBench (`fast_td3/hyperparams.py` of
    github.com/younggyoseo/FastTD3): 128 environments, two gradient steps on 32,768 samples for each step of
    all of them. Unlike `TD3`, targets have the actor itself and follow the critics at every update, the actor
    follows the lower critic, and weights decay. The sizes are made for an accelerator.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> FastTD3(env=envs.make("Pendulum-v1")).updates_per_iteration
    2
    """

    presets_of: ClassVar[str] = "FastTD3"

    rollouts = Rollouts(num_envs=128, num_steps=1, total_steps=12_800_000)
    replaying = ReplayUpdates(
        buffer_size=6_553_600, batch_size=32_768, learning_starts=1_280, updates_per_step=1 / 64
    )
    target_rate: float = hyperparameter(0.1, "tau: the part of the way that targets go at an update")
    exploration_noise: float = hyperparameter(
        0.4, "largest standard deviation of actions in [-1, 1], in training: of the last environment"
    )
    smallest_noise: float = hyperparameter(0.001, "smallest of these deviations: of the first environment")
    target_noise: float = hyperparameter(0.001, "standard deviation of the targets' actions")
    grid = ReturnGrid(atoms=101)
    normalizers = ObservationNormalizer(normalize_observation=True)
    layers = Layers(hidden=(512, 256, 128), activation="relu")
    critic_hidden: tuple[int, ...] | None = hyperparameter(
        (1024, 512, 256), "widths of the critics' layers; None: by observation"
    )
    weight_decay: float = hyperparameter(0.1, "of AdamW, times the step size")

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

    # --- fragments ---

    def act(self, actor, statistics, learning, progress, observation, recollection, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and what is remembered.

        Deviations of the noise are spread evenly from the smallest to the largest, one for each environment.
        The authors' code draws one for each episode, evenly between the same two.
        """
        if recollection is not None:  # of a user's own exploration
            return super().act(actor, statistics, learning, progress, observation, recollection, keys)
        noise = jnp.linspace(self.smallest_noise, self.exploration_noise, len(keys))
        return self.spread(actor, statistics, learning, observation, keys, noise), None

    @fdg.fragment("actor", in_axes=(None, None, None, 0, 0, 0), name="act")
    def spread(self, actor, statistics, learning, observation, keys, noise):
        """As `act`, with the deviations `noise [B]`."""
        policy = self._policy(actor, self.normalizers.seen(statistics, observation))
        policy = policy._replace(noise=noise[:, None])
        # One key for both, of which only one is used.
        uniform = jax.vmap(self._uniform)(keys)
        return jnp.where(learning, policy.sample(keys), uniform)

    # --- parts ---

    def _followed(self, targets: Parameters, parameters: Parameters, is_due: jax.Array) -> Parameters:
        """The actor itself, and critics that follow at every update."""
        return Parameters(
            optax.incremental_update(parameters.actor, targets.actor, 1.0),
            optax.incremental_update(parameters.critics, targets.critics, self.target_rate),
        )

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Minus the lower critic's value of what the actor does."""
        action = self._policy(actor, transition.observation).mode()
        return -jnp.mean(self.grid.lower(self._critics.apply(critics, transition.observation, action)))

    def _uniform(self, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, self.env.action_space.shape, minval=-1.0, maxval=1.0)

    @property
    def _critics(self) -> Network:
        return off_policy.twin_critics(self, dataclasses.replace(self.layers, hidden=self.critic_hidden))

    @property
    def _default_optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(self._step_size, weight_decay=self.weight_decay)
