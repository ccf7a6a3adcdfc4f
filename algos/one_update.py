"""The driver of actor-critics with one update per rollout, A2C and IMPALA, and their loss.

Shapes: `T` steps of a rollout, `B` environments, `N` rows.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax

import fdg
from algos import networks, on_policy
from algos.checks import check_actor_critic
from algos.losses import Decision, Distribution, ProximalLoss
from algos.normalize import normalize_rollout
from algos.on_policy import environment_major
from algos.rings import time_major
from algos.rollout import episode_metrics
from envs import Observation
from fdg.settings.fields import hyperparameter
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class WeightedLoss(Part):
    """The loss of an actor-critic with an entropy bonus."""

    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")

    def of(
        self, policy_loss: jax.Array, value_loss: jax.Array, entropy: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and its terms, scalars.

        >>> WeightedLoss(0.25, 0.5).of(1.0, 4.0, 8.0)[0]
        1.0
        """
        loss = policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy
        parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, {"loss": loss, **parts}


def weighted_sum(
    policy_loss: jax.Array,
    value_loss: jax.Array,
    entropy: jax.Array,
    value_coefficient: float,
    entropy_coefficient: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`WeightedLoss.of` with the coefficients as arguments."""
    return WeightedLoss(entropy_coefficient, value_coefficient).of(policy_loss, value_loss, entropy)


def proximal_loss(
    policy: Distribution,
    value: jax.Array,
    action: jax.Array,
    old_log_prob: jax.Array,
    old_value: jax.Array,
    advantage: jax.Array,
    target: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`ProximalLoss(**settings).of` with the minibatch's fields as arguments."""
    decision = Decision(old_log_prob, old_value)
    minibatch = types.SimpleNamespace(action=action, decision=decision, advantage=advantage, target=target)
    return ProximalLoss(**settings).of(policy, value, minibatch)


def over_time(function: Callable[[Observation], Any], observation: Observation) -> Any:
    """Applies a function of rows `[N, *obs]` to observations `[T, B, *obs]`; results are `[T, B, ...]`."""
    num_steps = jax.tree.leaves(observation)[0].shape[0]
    of_rows = function(jax.tree.map(environment_major, observation))
    return jax.tree.map(lambda x: time_major(x, num_steps), of_rows)


def iterate_once(self: Any, state: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One rollout of all environments, and one update on it."""
    return on_policy.iteration(self, state, learn=lambda *arguments: self.learn(*arguments[:3]))


@fdg.fragment("learner", in_axes=(None, 0, 1), out_axes=(None, 0, None), name="learn")
def learn_once(self, learned, running, trajectory):
    """One update of parameters and optimiser on a rollout `[T, B]`, then of the statistics."""
    parameters, optimizer_state, *statistics = learned
    seen, running, statistics = normalize_rollout(
        self.normalizers, statistics, running, trajectory, self.discount
    )
    gradient, losses = self.gradient(parameters, seen)
    learned = (*self.update(gradient, optimizer_state, parameters), *statistics)
    return learned, running, {**episode_metrics(trajectory.time_step), **losses}


@fdg.fragment("gradient", in_axes=(None, 1), out_axes=None, name="gradient")
def gradient_of_rollout(self, parameters, trajectory):
    """Gradient of the loss over a rollout `[T, B]`, and the loss's terms."""
    return jax.grad(self.loss, has_aux=True)(parameters, trajectory)


MEMBERS = {
    "init": on_policy.begin,
    "iterate": iterate_once,
    "actor": on_policy.actor,
    "learn": learn_once,
    "gradient": gradient_of_rollout,
    "updates_per_iteration": property(lambda self: 1),
    "check_when_traced": lambda self, state: check_actor_critic(self, self._network, state.parameters),
    "policy_and_value": lambda self, parameters, observation: networks.policy_and_value(
        self._network, parameters, observation, self.env.action_space
    ),
    "_network": property(networks.actor_critic_of),
}
