"""Q-learning from replay, with a target network, as functions: of `DQN` and its relatives, `VDN` and `QMIX`.

What is replayed are observations as they were; networks see them by the statistics of the moment.

Letters in shapes: `N` samples of a minibatch, whatever a sample is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos.replay import Replay, ReplayChoice, ReplayState, StepReplay
from fdg.settings.fields import hyperparameter, require_positive, require_within
from fdg.settings.parts import Part


class Learned(NamedTuple):
    """What gradient steps change."""

    parameters: Any
    target_parameters: Any  # older ones, that targets are computed with
    optimizer_state: Any
    updates: jax.Array  # int32, gradient steps so far


def begin(parameters: Any, optimizer: optax.GradientTransformation) -> Learned:
    """What gradient steps change, from the first parameters."""
    return Learned(
        parameters=parameters,
        target_parameters=jax.tree.map(jnp.copy, parameters),
        optimizer_state=optimizer.init(parameters),
        updates=jnp.int32(0),
    )


@dataclasses.dataclass(frozen=True)
class TargetUpdates(Part):
    """How a target network follows the one that is trained."""

    target_period: int = hyperparameter(50, "gradient steps between updates of the target network")
    target_rate: float = hyperparameter(
        1.0, "how far each update takes it; 1 copies, little with target_period=1 is Polyak averaging"
    )

    def after(self, learned: Learned, parameters: Any, optimizer_state: Any, ready: jax.Array) -> Learned:
        """After a gradient step to these parameters; nothing changes unless the buffer was `ready`."""
        updates = learned.updates + ready
        rate = jnp.where(ready & (updates % self.target_period == 0), self.target_rate, 0.0)
        target_parameters = optax.incremental_update(parameters, learned.target_parameters, rate)
        return Learned(parameters, target_parameters, optimizer_state, updates)

    def check(self, algorithm: Any) -> None:
        """Refuses a period that is not positive, and a rate outside of [0, 1]."""
        require_positive(algorithm, "target_period")
        require_within(algorithm, 0, 1, "target_rate")


@dataclasses.dataclass(frozen=True)
class Priorities(ReplayChoice):
    """Prioritised replay of minibatches, one gradient step after the other."""

    def improve(
        self,
        learn: Callable[..., tuple[Learned, jax.Array, dict[str, jax.Array]]],
        learned: Learned,
        buffer: Replay,
        replay: ReplayState,
        keys: jax.Array,
        iteration: jax.Array,
        num_iterations: int,
    ) -> tuple[Learned, ReplayState, dict[str, jax.Array]]:
        """All gradient steps of an iteration, and the means of their losses.

        Args:
          learn: `(learned, minibatch [N], weight [N], ready) -> (learned, error [N], losses)`.
          learned: before them.
          buffer, replay: what minibatches are drawn from.
          keys: one for each step.
          iteration, num_iterations: this one, and how many there are.
        """
        ready = buffer.is_ready(replay)
        beta = self.beta(iteration, num_iterations)

        def one_step(carry, drawn):
            learned, replay = carry
            sample = buffer.sample(replay, drawn) if buffer.has_priorities else drawn
            weight = buffer.weight(sample, beta)
            learned, error, losses = learn(learned, sample.transition, weight, ready)
            # Proportional prioritisation, equation 1 of Schaul et al.; no priority is zero.
            return (learned, buffer.prioritize(replay, sample.indices, jnp.abs(error) + 1e-6)), losses

        # Where no step changes what the next one draws, all minibatches are drawn at once.
        draws = keys if buffer.has_priorities else buffer.samples(replay, keys)
        (learned, replay), losses = jax.lax.scan(one_step, (learned, replay), draws)
        return learned, replay, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)


@dataclasses.dataclass(frozen=True)
class StepPriorities(Priorities, StepReplay):
    """`Priorities`, with n-step returns."""


# --- methods, which classes take as their own: `learn = replayed_q.learn` ---
#
# An algorithm says its `_loss(parameters, target_parameters, minibatch, weight)`, its `targets`, and its
# `buffer`.


@fdg.fragment("learner", in_axes=(None, None, 0, 0, None), out_axes=(None, 0, None))
def learn(self, learned, statistics, minibatch, weight, ready):
    """One gradient step on a minibatch `[N]`, unless the buffer is not `ready`; errors `[N]`, losses."""
    minibatch = self.buffer.seen(functools.partial(self.normalizers.seen, statistics), minibatch)
    gradient, error, losses = self.gradient(learned.parameters, learned.target_parameters, minibatch, weight)
    parameters, optimizer_state = self.update(gradient, learned.optimizer_state, learned.parameters, ready)
    return self.targets.after(learned, parameters, optimizer_state, ready), error, losses


@fdg.fragment("gradient", in_axes=(None, None, 0, 0), out_axes=(None, 0, None))
def gradient(self, parameters, target_parameters, minibatch, weight):
    """Gradient of the loss over a minibatch `[N]`, the errors `[N]`, and what the loss is made of."""
    gradient, (error, losses) = jax.grad(self._loss, has_aux=True)(
        parameters, target_parameters, minibatch, weight
    )
    return gradient, error, losses


@fdg.fragment("update", in_axes=None, out_axes=None)
def update(self, gradient, optimizer_state, parameters, ready):
    """One step of Adam on a gradient whose global norm is clipped; nothing before the buffer is ready."""
    new = self._one_update(gradient, optimizer_state, parameters)
    return jax.tree.map(lambda a, b: jnp.where(ready, a, b), new, (parameters, optimizer_state))
