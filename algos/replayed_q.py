"""Q-learning from replay, with a target network: what `DQN` and its relatives share with `VDN` and `QMIX`.

How minibatches are drawn, and what a gradient step changes. What is stored, and what the loss is over a
minibatch, a subclass says. What is replayed are observations as they were; networks see them by the
statistics of the moment.

Letters in shapes: `N` samples of a minibatch, whatever a sample is.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import optimizers
from algos.exploration import linear
from algos.hyperparameters import hyperparameter, require_positive, require_within
from algos.parts import Part
from algos.q_learning import EpsilonGreedy
from algos.replay import Replay, ReplayState


class Learned(NamedTuple):
    """What gradient steps change."""

    parameters: Any
    target_parameters: Any  # older ones, that targets are computed with
    optimizer_state: Any
    updates: jax.Array  # int32, gradient steps so far


@dataclasses.dataclass(frozen=True)
class TargetUpdates(Part):
    """How a target network follows the one that is trained."""

    target_period: int = hyperparameter(50, "gradient steps between updates of the target network")
    target_rate: float = hyperparameter(
        1.0, "how far each update takes it; 1 copies, little with target_period=1 is Polyak averaging"
    )


@dataclasses.dataclass(frozen=True)
class Priorities(Part):
    """Prioritised replay (Schaul et al. 2016, arXiv 1511.05952)."""

    priority_exponent: float = hyperparameter(
        0.0, "alpha of prioritised replay; 0: uniform", structural="whether there are priorities"
    )
    importance_exponent: float = hyperparameter(0.4, "beta of prioritised replay at first; 1 in the end")


class ReplayedQLearning(EpsilonGreedy):
    """Base of algorithms that fit values of actions to targets, on minibatches out of a replay buffer.

    A subclass has also `targets`, `priorities`, a `_replay` and a `_loss`.
    """

    # --- fragments; `step` is that of every agent ---

    @fdg.fragment("learner", in_axes=(None, None, 0, 0, None), out_axes=(None, 0, None))
    def learn(self, learned, statistics, minibatch, weight, ready):
        """One gradient step on a minibatch `[N]`, unless the buffer is not `ready`; errors `[N]`, losses."""
        minibatch = self._seen_minibatch(statistics, minibatch)
        parameters, target_parameters, optimizer_state, updates = learned
        gradient, error, losses = self.gradient(parameters, target_parameters, minibatch, weight)
        parameters, optimizer_state = self.update(gradient, optimizer_state, parameters, ready)
        updates += ready
        rate = jnp.where(ready & (updates % self.target_period == 0), self.target_rate, 0.0)
        target_parameters = optax.incremental_update(parameters, target_parameters, rate)
        return Learned(parameters, target_parameters, optimizer_state, updates), error, losses

    @fdg.fragment("gradient", in_axes=(None, None, 0, 0), out_axes=(None, 0, None))
    def gradient(self, parameters, target_parameters, minibatch, weight):
        """Gradient of the loss over a minibatch `[N]`, the errors `[N]`, and what the loss is made of."""
        gradient, (error, losses) = jax.grad(self._loss, has_aux=True)(
            parameters, target_parameters, minibatch, weight
        )
        return gradient, error, losses

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, optimizer_state, parameters, ready):
        """One step of Adam on a gradient whose global norm is clipped; nothing before it is time."""
        new = self._one_update(gradient, optimizer_state, parameters)
        return jax.tree.map(lambda a, b: jnp.where(ready, a, b), new, (parameters, optimizer_state))

    # --- what a subclass says ---

    def _loss(
        self, parameters: Any, target_parameters: Any, minibatch: Any, weight: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        """The loss over a minibatch `[N]` with weights `[N]`; each sample's error `[N]`, and parts."""
        raise NotImplementedError

    def _seen_minibatch(self, statistics: Any, minibatch: Any) -> Any:
        """A minibatch as it was stored, with observations as the networks see them."""
        raise NotImplementedError

    @property
    def _replay(self) -> Replay:
        raise NotImplementedError

    # --- parts ---

    def _begin(self, parameters: Any) -> Learned:
        """What gradient steps change, from the first parameters."""
        return Learned(
            parameters=parameters,
            target_parameters=jax.tree.map(jnp.copy, parameters),
            optimizer_state=self._optimizer.init(parameters),
            updates=jnp.int32(0),
        )

    def _improved(
        self, learned: Learned, statistics: Any, replay: ReplayState, key: jax.Array, iteration: jax.Array
    ) -> tuple[Learned, ReplayState, dict[str, jax.Array]]:
        """All gradient steps of an iteration, and the means of their losses."""
        buffer = self._replay
        ready = buffer.is_ready(replay)
        beta = linear(self.importance_exponent, 1.0, self.num_iterations, iteration)
        keys = jax.random.split(key, self.updates_per_iteration)

        def one_update(carry, drawn):
            learned, replay = carry
            sample = buffer.sample(replay, drawn) if self.priority_exponent else drawn
            weight = buffer.weight(sample, beta)
            learned, error, losses = self.learn(learned, statistics, sample.transition, weight, ready)
            # Proportional prioritisation, equation 1 of Schaul et al.; no priority is zero.
            return (learned, buffer.prioritize(replay, sample.indices, jnp.abs(error) + 1e-6)), losses

        # Where no update changes what the next one draws, all minibatches are drawn at once.
        draws = keys if self.priority_exponent else buffer.samples(replay, keys)
        (learned, replay), losses = jax.lax.scan(one_update, (learned, replay), draws)
        return learned, replay, jax.tree.map(jnp.mean, losses)

    def _after_observing(self, statistics: Any, observation: Any) -> Any:
        """The statistics after an iteration, in which `[T, B, *obs]` were seen.

        Only then, so that all that one iteration acts on and learns from is normalised alike.
        """
        return self.observe(statistics, observation) if self.normalize_observation else statistics

    def _check(self) -> None:
        super()._check()
        require_positive(self, "target_period")
        require_within(self, 0, 1, "target_rate", "importance_exponent")
        # Refuse sizes that do not fit.
        _ = self.updates_per_iteration
        _ = self._replay

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optimizers.clipped_adam(self._step_size, self.max_grad_norm)
