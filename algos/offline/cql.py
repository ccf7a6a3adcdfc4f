"""Conservative Q-learning (CQL; Kumar, Zhou, Tucker and Levine 2020, arXiv 2006.04779).

CQL is soft actor-critic (`algos/sac.py`) with a penalty that lowers the critics' values of actions outside
the data, and raises those of the data's actions. The state is SAC's, so a run of SAC can start from one of
CQL (`--from`). Equations are numbered as in the paper.

Shapes: `N` samples of a minibatch, `K` sampled actions of each kind for a sample, `D` components of an
action.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from algos.agent import Agent, Rollouts
from algos.off_policy import PolyakTargets, ReturnGrid
from algos.offline import learning
from algos.offline.learning import Data
from algos.replaying import Transition
from algos.sac import SAC, Entropy, Parameters
from algos.values import Discount, Layers, OptimizerSettings
from envs import Box, Environment
from fdg.settings.fields import hyperparameter, require_not_negative, require_positive


@dataclasses.dataclass(frozen=True)
class CQL(Agent, driver=learning, presets="CQL"):
    """CQL(H) for continuous actions within bounds, from a data set, then online.

    Defaults are those of the paper for locomotion (appendix F), except that actor and critics have the same
    learning rate, and alpha is constant.
    """

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=1_000_000)
    data = Data()
    optimizer_settings = OptimizerSettings(learning_rate=1e-4)
    discounting = Discount()
    conservatism: float = hyperparameter(5.0, "alpha of equation 4: weight of the conservative penalty")
    num_actions: int = hyperparameter(10, "K: actions sampled of each of three kinds, per sample")
    entropy = Entropy()
    grid = ReturnGrid()
    layers = Layers(hidden=(256, 256, 256), activation="relu")
    targets = PolyakTargets()

    def __post_init__(self):
        self._check()
        require_positive(self, "num_actions")
        require_not_negative(self, "conservatism")

    _keys_per_sample = 5  # in a gradient step; two are SAC's

    gradient, update, _sac_loss = SAC.gradient, SAC.update, SAC.loss
    _init_learned, _learn_from, _policy = SAC._init_learned, SAC._learn_from, SAC._policy

    def loss(
        self, parameters: Parameters, target_critics: Any, transition: Transition, keys: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of SAC plus the weighted loss of equation 4, summed over both critics."""
        loss, metrics = self._sac_loss(parameters, target_critics, transition, keys[:2])
        actions, log_density = self._sample_lowered_actions(
            jax.lax.stop_gradient(parameters.actor), transition, keys[2:]
        )
        gap = self._conservative_gap(parameters.critics, transition, actions, log_density)
        return loss + self.conservatism * gap, {**metrics, "conservative_gap": gap}

    def _sample_lowered_actions(
        self, actor: Any, transition: Transition, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Actions `[3 * K, N, *action]` whose values the penalty lowers, and log-densities `[3 * K, N]`.

        They are K uniform actions, and K actions of the policy at each of the two observations of a
        transition (appendix F); `keys [3, N]`.
        """
        action_keys = jax.vmap(jax.vmap(lambda key: jax.random.split(key, self.num_actions)))(keys)
        action_keys = action_keys.swapaxes(1, 2)  # [3, K, N]
        space = Box(-1.0, 1.0, self.env.action_space.shape)
        uniform = jax.vmap(jax.vmap(space.sample))(action_keys[0])
        density = jnp.full(uniform.shape[:2], -math.log(2.0) * math.prod(space.shape), jnp.float32)
        current, following = (
            jax.vmap(self._policy(actor, observation).sample_with_log_prob)(keys)
            for observation, keys in (
                (transition.observation, action_keys[1]),
                (transition.next_observation, action_keys[2]),
            )
        )
        actions, densities = zip((uniform, density), current, following, strict=True)
        return jnp.concatenate(actions), jnp.concatenate(densities)

    def _conservative_gap(
        self, critics: Any, transition: Transition, actions: jax.Array, log_density: jax.Array
    ) -> jax.Array:
        """The log of the integral of exp(Q) over actions, minus Q of the data's action.

        Returns the mean over samples, summed over both critics. The integral is estimated by importance
        sampling with `actions [M, N, *action]` (appendix F).
        """
        values = self._critics.apply(critics, transition.observation, transition.action)
        sampled_values = jax.vmap(
            lambda action: self._critics.apply(critics, transition.observation, action)
        )(actions)
        gap = jnp.float32(0.0)
        for data_output, other_outputs in zip(values, sampled_values, strict=True):  # for each critic
            weighted_value = self.grid.critic_kind.value(other_outputs) - log_density
            log_integral = jax.nn.logsumexp(weighted_value, axis=0) - math.log(len(actions))
            gap += jnp.mean(log_integral - self.grid.critic_kind.value(data_output))
        return gap
