"""Implicit Q-learning (IQL; Kostrikov, Nair and Levine 2021, arXiv 2110.06169).

A state-value function is fitted to an upper expectile of the critics' values of the data's actions; the
critics are fitted to rewards plus the next state's value. The actor imitates the data's actions, with weights
that grow with the advantage. Actions outside the data are never evaluated. Equations are numbered as in the
paper.

Shapes: `N` samples of a minibatch, `D` components of an action.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import networks
from algos.agent import Agent, Rollouts
from algos.losses import value_error
from algos.off_policy import PolyakTargets
from algos.offline import learning
from algos.offline.learning import BoundedNormal, Data
from algos.replaying import Transition
from algos.sac import SAC, Learned
from algos.values import Discount, Layers, Network, OptimizerSettings
from envs import Environment, Observation
from fdg.settings.fields import hyperparameter, require, require_not_negative, require_positive


class Parameters(NamedTuple):
    """The trained parameters."""

    actor: Any
    critics: Any  # of both critics
    value: Any


@dataclasses.dataclass(frozen=True)
class IQL(Agent, driver=learning, presets="IQL"):
    """IQL for continuous actions within bounds, from a data set, then online.

    Defaults are those of the paper for locomotion, except that the standard deviations depend on the
    observation, and the actor's step size is constant.

    >>> import envs
    >>> IQL(env=envs.make("Pendulum-v1")).updates_per_iteration
    32
    """

    env: Environment
    rollouts = Rollouts(num_envs=8, num_steps=4, total_steps=1_000_000)
    data = Data()
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discounting = Discount()
    expectile: float = hyperparameter(
        0.7, "tau of equation 5, the expectile: above 0.5; near 1, the value of the best action"
    )
    advantage_scale: float = hyperparameter(3.0, "beta of equation 7: weights are exp(beta * advantage)")
    largest_weight: float = hyperparameter(100.0, "upper bound of these weights")
    targets = PolyakTargets()
    layers = Layers(hidden=(256, 256), activation="relu")

    def __post_init__(self):
        self._check()
        require_positive(self, "largest_weight")
        is_valid = (self.expectile > 0) & (self.expectile < 1)
        require(self, is_valid, f"expectile={self.expectile}: it must be between 0 and 1")
        require_not_negative(self, "advantage_scale")

    _keys_per_sample = 1  # in a gradient step

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("gradient", in_axes=(None, None, 0), out_axes=None)
    def gradient(self, parameters, target_critics, transition):
        """Gradient of the losses over a minibatch `[N]`, and the terms of the losses."""
        return jax.grad(self.loss, has_aux=True)(parameters, target_critics, transition)

    update = SAC.update

    def _init_learned(self, actor_key, critics_key, observation, action) -> Learned:
        critics = self._critics.init(critics_key, observation, action)
        value = self._value.init(jax.random.fold_in(critics_key, 1), observation)
        parameters = Parameters(self._actor.init(actor_key, observation), critics, value)
        return Learned(parameters, jax.tree.map(jnp.copy, critics), self._optimizer.init(parameters))

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, None, Any]:
        gradient, losses = self.gradient(learned.parameters, learned.target_critics, transition)
        return self.update(gradient, learned), None, losses

    def loss(
        self, parameters: Parameters, target_critics: Any, transition: Transition
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum of three losses, each with gradients for its own parameters only.

        So one step updates all parameters; the authors' code updates them one after another.
        """
        critic_inputs = transition.observation, transition.action
        value = self._value.apply(parameters.value, transition.observation)
        advantage = jnp.minimum(*self._critics.apply(target_critics, *critic_inputs)) - value
        value_loss = jnp.mean(expectile_error(advantage, self.expectile))  # equation 5

        # Equation 6; the discount is zero after a termination, but not after a truncation.
        next_value = self._value.apply(jax.lax.stop_gradient(parameters.value), transition.next_observation)
        target = transition.reward + transition.discount * next_value
        first, second = self._critics.apply(parameters.critics, *critic_inputs)
        critic_loss = value_error(first, target) + value_error(second, target)

        # Equation 7.
        weight = jnp.exp(self.advantage_scale * jax.lax.stop_gradient(advantage))
        weight = jnp.minimum(weight, self.largest_weight)
        log_prob = self._policy(parameters.actor, transition.observation).log_prob(transition.action)
        actor_loss = -jnp.mean(weight * log_prob)
        return value_loss + critic_loss + actor_loss, {
            "critic_loss": critic_loss, "value_loss": value_loss, "actor_loss": actor_loss,
            "value": jnp.mean(value), "weight": jnp.mean(weight),
        }  # fmt: skip

    def _policy(self, actor: Any, observation: Observation) -> BoundedNormal:
        """Distribution over actions in [-1, 1], for observations `[N, *obs]`."""
        return BoundedNormal.of(self._actor.apply(actor, observation), self.env.action_space.shape)

    @property
    def _value(self) -> Network:
        return networks.with_precision(
            self, networks.state_value(self.env.observation_space, **vars(self.layers))
        )


def expectile_error(difference: jax.Array, expectile: float | jax.Array) -> jax.Array:
    """The asymmetric squared error of equation 4, `[N]`.

    The weight of positive differences is `expectile`, that of negative ones `1 - expectile`.

    >>> expectile_error(jnp.array([2.0, -2.0]), 0.75).tolist()
    [3.0, 1.0]
    """
    return jnp.where(difference > 0, expectile, 1.0 - expectile) * jnp.square(difference)
