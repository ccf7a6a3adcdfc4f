"""FastTD3 (Seo, Sferrazza, Geng, Nauman, Yin and Abbeel 2025, arXiv 2505.22642).

TD3 with many environments, each with its own noise deviation, large minibatches, few gradient steps, and
distributional critics.

Shapes: `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from algos import networks, optimizers
from algos.agent import Rollouts
from algos.off_policy import ReturnGrid
from algos.replaying import ReplayUpdates, Transition
from algos.td3 import TD3, DelayedTargets, Parameters
from algos.values import Layers, Network, Normalizers
from fdg.settings.fields import hyperparameter, require, require_not_negative, require_positive


@dataclasses.dataclass(frozen=True)
class FastTD3(TD3, presets="FastTD3"):
    """FastTD3 for continuous actions within bounds.

    Defaults are those of the authors' code for HumanoidBench (`fast_td3/hyperparams.py` of
    github.com/younggyoseo/FastTD3), for an accelerator: 128 environments, and two gradient steps, each on
    32,768 samples, whenever all environments have made a step. Unlike in `TD3`, targets use the current
    actor, target critics are updated in every gradient step, the actor maximises the minimum of both critics,
    and weights decay (AdamW).

    >>> import envs
    >>> FastTD3(env=envs.make("Pendulum-v1")).updates_per_iteration
    2
    """

    rollouts = Rollouts(num_envs=128, num_steps=1, total_steps=12_800_000)
    replaying = ReplayUpdates(
        buffer_size=6_553_600, batch_size=32_768, learning_starts=1_280, updates_per_step=1 / 64
    )
    delayed = DelayedTargets(target_rate=0.1, target_noise=0.001)
    exploration_noise: float = hyperparameter(
        0.4, "largest standard deviation of exploration noise, for actions in [-1, 1]: the last environment's"
    )
    smallest_noise: float = hyperparameter(0.001, "smallest exploration noise: the first environment's")
    grid = ReturnGrid(atoms=101)
    normalizers = Normalizers(normalize_observation=True)
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
        require_not_negative(self, "weight_decay")

    def _sample_actions(self, policy: Any, amount: Any, keys: jax.Array) -> jax.Array:
        """Samples `[B, *action]`, with one standard deviation per environment, evenly spaced.

        The authors' code samples a deviation for each episode, uniformly between the same bounds.
        """
        # A single environment has the largest noise.
        smallest = self.smallest_noise if len(keys) > 1 else self.exploration_noise
        noise = jnp.linspace(smallest, self.exploration_noise, len(keys), dtype=jnp.float32)
        return policy._replace(noise=noise[:, None]).sample(keys)

    def _update_targets(self, targets: Parameters, parameters: Parameters, is_due: jax.Array) -> Parameters:
        """The current actor, and moving averages of the critics."""
        return Parameters(
            optax.incremental_update(parameters.actor, targets.actor, 1.0),
            optax.incremental_update(parameters.critics, targets.critics, self.target_rate),
        )

    def _actor_loss(self, actor: Any, critics: Any, transition: Transition) -> jax.Array:
        """Minus the lower of the two critics' values of the actor's actions."""
        action = self._policy(actor, transition.observation).mode()
        values = self._critics.apply(critics, transition.observation, action)
        return -jnp.mean(self.grid.critic_kind.lower(values))

    @property
    def _critics(self) -> Network:
        layers = dataclasses.replace(self.layers, hidden=self.critic_hidden)
        return networks.critics_of(self, layers)

    @property
    def _default_optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(optimizers.step_size_of(self), weight_decay=self.weight_decay)
