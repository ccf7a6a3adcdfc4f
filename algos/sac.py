"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), with a learned temperature.

Two critics of observation and action, targets that follow them, a squashed Gaussian actor, and a temperature
that weighs its entropy against reward. Equations below are numbered as in the paper. The actor and the
temperature are in `algos/soft.py`; how it acts, stores and draws minibatches is `algos/off_policy.py`.

Letters in shapes: `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos.hyperparameters import hyperparameter, require_within
from algos.replay import Transition
from algos.soft import Parameters, SoftActorCritic


class Learned(NamedTuple):
    """All that an update changes."""

    parameters: Parameters
    target_critics: Any  # follows `parameters.critics` slowly
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class SAC(SoftActorCritic):
    """SAC for continuous actions within bounds; its defaults are said at `SoftActorCritic`.

    Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> algorithm = SAC(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=2)
    >>> algorithm.updates_per_iteration, algorithm.num_iterations
    (8, 125000)
    """

    target_rate: float = hyperparameter(0.005, "tau: the part of the way that targets go at an update")

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 0, 1, "target_rate")

    # --- fragments; `act` and `learn` are those of `OffPolicy`, `step` is that of every agent ---

    @fdg.fragment("gradient", in_axes=(None, None, 0, 1), out_axes=None)
    def gradient(self, parameters, target_critics, transition, keys):
        """Gradient of the losses over a minibatch `[N]`, `keys [2, N]`, and what they are made of."""
        return jax.grad(self._loss, has_aux=True)(parameters, target_critics, transition, keys)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, learned):
        """One step of Adam on all parameters; then the targets follow the critics."""
        parameters, optimizer_state = self._one_update(gradient, learned.optimizer_state, learned.parameters)
        # Algorithm 1, its last line.
        target_critics = optax.incremental_update(
            parameters.critics, learned.target_critics, self.target_rate
        )
        return Learned(parameters, target_critics, optimizer_state)

    # --- parts ---

    def _begin(self, actor: Any, critics: Any) -> Learned:
        parameters = Parameters(actor, critics, jnp.log(jnp.float32(self.initial_temperature)))
        return Learned(parameters, jax.tree.map(jnp.copy, critics), self._optimizer.init(parameters))

    def _learn_from(self, learned: Learned, transition: Transition, keys: jax.Array) -> tuple[Learned, Any]:
        gradient, losses = self.gradient(learned.parameters, learned.target_critics, transition, keys)
        return self.update(gradient, learned), losses

    def _loss(self, parameters: Parameters, target_critics, transition: Transition, keys):
        """The sum of three losses, each of which has a gradient by its own part of the parameters only.

        One sum and one gradient, so all parts move at once; in algorithm 1 they move one after the other.
        """
        constant = jax.lax.stop_gradient(parameters)

        # Critics: equation 5.
        next_policy = self._policy(constant.actor, transition.next_observation)
        next_action, next_log_prob = next_policy.sample_with_log_prob(keys[0])
        following = self._critics.apply(target_critics, transition.next_observation, next_action)
        target = self._target(transition, jnp.exp(constant.log_temperature), following, next_log_prob)
        given = self._critics.apply(parameters.critics, transition.observation, transition.action)
        critic_loss = self._errors(given, target)

        # Actor and temperature, with the lower of both critics (section 6).
        action, log_prob = self._policy(parameters.actor, transition.observation).sample_with_log_prob(
            keys[1]
        )
        value = self._lower(self._critics.apply(constant.critics, transition.observation, action))
        actor_loss, temperature_loss, told = self._soft_losses(parameters.log_temperature, log_prob, value)
        return critic_loss + actor_loss + temperature_loss, {"critic_loss": critic_loss, **told}

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self._step_size)
