"""Conservative Q-learning (CQL; Kumar, Zhou, Tucker and Levine 2020, arXiv 2006.04779).

Soft actor-critic (`algos/sac.py`) whose critics also lower the values of actions outside the data, and raise
those of the data's actions. The state is SAC's, so a run of SAC can start from CQL (`--from`). Equations are
numbered as in the paper.

Shapes: `N` samples of a minibatch, `K` sampled actions for each, `D` components of an action.
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

    Defaults are those of the paper for locomotion (appendix F), except that actor and critics have
    one learning rate, and alpha is constant.
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

    _keys_per_sample = 5  # keys per sample of a gradient step; two are SAC's

    gradient, update = SAC.gradient, SAC.update
    _init_learned, _learn_from, _policy, _soft_loss = (
        SAC._init_learned,
        SAC._learn_from,
        SAC._policy,
        SAC.loss,
    )

    def loss(
        self, parameters: Parameters, target_critics: Any, transition: Transition, keys: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of SAC plus the weighted loss of equation 4, summed over both critics."""
        loss, metrics = self._soft_loss(parameters, target_critics, transition, keys[:2])
        drawn = self._drawn(jax.lax.stop_gradient(parameters.actor), transition, keys[2:])
        gap = self._gap(parameters.critics, transition, *drawn)
        return loss + self.conservatism * gap, {**metrics, "conservative_gap": gap}

    def _drawn(self, actor: Any, transition: Transition, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Actions whose values are lowered, `[3 * K, N, *action]`, and the log-densities of sampling them.

        Uniform actions, and actions of the policy at this and the next observation (appendix F); `keys [3,
        N]`.
        """
        several = jax.vmap(jax.vmap(lambda key: jax.random.split(key, self.num_actions)))(keys)
        several = several.swapaxes(1, 2)  # [3, K, N]
        space = Box(-1.0, 1.0, self.env.action_space.shape)
        uniform = jax.vmap(jax.vmap(space.sample))(several[0])
        density = jnp.full(uniform.shape[:2], -math.log(2.0) * math.prod(space.shape), jnp.float32)
        now, after = (
            jax.vmap(self._policy(actor, seen).sample_with_log_prob)(keys)
            for seen, keys in (
                (transition.observation, several[1]),
                (transition.next_observation, several[2]),
            )
        )
        actions, densities = zip((uniform, density), now, after, strict=True)
        return jnp.concatenate(actions), jnp.concatenate(densities)

    def _gap(
        self, critics: Any, transition: Transition, actions: jax.Array, log_density: jax.Array
    ) -> jax.Array:
        """The log of the integral of exp(Q) over actions, minus Q of the data's action.

        The mean over samples, summed over both critics. Importance sampling of actions `[M, N, *action]`
        estimates the integral (appendix F).
        """
        values = self._critics.apply(critics, transition.observation, transition.action)
        others = jax.vmap(lambda action: self._critics.apply(critics, transition.observation, action))(
            actions
        )
        gap = jnp.float32(0.0)
        for of_data, of_others in zip(values, others, strict=True):
            value = self.grid.reading.value(of_others) - log_density
            total = jax.nn.logsumexp(value, axis=0) - math.log(len(actions))
            gap += jnp.mean(total - self.grid.reading.value(of_data))
        return gap
