"""Random network distillation: a reward bonus for novel observations (`--rnd true` of PPO).

Burda et al. 2018, "Exploration by Random Network Distillation", arXiv 1810.12894. The target network is never
trained; the predictor learns to match its features on seen observations. The prediction error is large for
novel observations, and serves as a reward. Novelty has its own value function and discount, and does not end
with episodes (section 2.3). `K` features.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import normalize
from algos.layers import Trunk, features, sized
from algos.losses import generalized_advantage_estimation, value_error
from algos.networks import of_module
from algos.normalize import RunningStatistics
from algos.on_policy import environment_major
from algos.rings import time_major
from algos.values import Layers, Network
from envs import TimeStep, features_and_mask
from envs.composite import ObservationSpace

_CLIP = 5.0  # deviations, of observations (section 2.4)
_DEEPER = 2  # additional layers of the predictor, as in the authors' code


class Parameters(NamedTuple):
    """The trained parameters."""

    agent: Any  # of PPO's network
    predictor: Any
    value: Any  # of the novelty's value function


class Known(NamedTuple):
    """The novelty bonus's state apart from parameters."""

    target: Any  # parameters of the target network
    observation_statistics: Any  # for the normalisation of both networks' inputs; None for categories
    return_statistics: RunningStatistics  # of the discounted novelty, whose deviation divides rewards


class Novelty(NamedTuple):
    """Samples `[N]` for the novelty losses."""

    observation: Any  # [N, *obs], after the step, as inputs of predictor and target
    features: jax.Array  # [N, K] float32, of the target
    trains: jax.Array  # [N] bool, True if the predictor learns from the sample
    value_target: jax.Array  # [N] float32


def bonus_of(algorithm: Any, settings: Any) -> Any:
    """The bonus for PPO's `RandomNetworkDistillation`; `Nothing` without `rnd`."""
    if not settings.rnd:
        return Nothing()
    space = algorithm.env.observation_space
    return Distillation(
        space,
        dataclasses.replace(sized(algorithm.layers, space), layer_norm=False, torso="dense"),
        settings.rnd_features,
        settings.intrinsic_discount,
        algorithm.gae_lambda,
        settings.rnd_share,
        settings.intrinsic_coefficient,
        algorithm.value_coefficient,
    )


class Nothing:
    """The functions of `Distillation`, without a novelty bonus."""

    def begin(self, key: jax.Array, agent: Any, observation: Any) -> tuple[Any, None, None]:
        """The agent's parameters, and an empty state."""
        return agent, None, None

    def agent(self, parameters: Any) -> Any:
        """All parameters."""
        return parameters

    def added(
        self, advantage: jax.Array, parameters: Any, known: Any, running: Any, *rollout: Any
    ) -> tuple[jax.Array, Any, Any, Any, dict[str, jax.Array]]:
        """The advantages unchanged."""
        return advantage, None, known, running, {}

    def learned(
        self, loss: jax.Array, parts: dict[str, jax.Array], parameters: Any, minibatch: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss unchanged."""
        return loss, parts


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Random network distillation: its networks and functions."""

    observation_space: ObservationSpace  # of observations that may be novel, `privileged` parts included
    layers: Layers  # layers of target and value; the predictor has two more dense layers
    features: int  # K
    discount: float  # of novelty
    lambda_: float  # of generalised advantage estimation
    share: float  # fraction of the samples that train the predictor
    coefficient: float = 0.5  # weights of novelty's advantage, and of its value loss
    value_coefficient: float = 0.5

    def agent(self, parameters: Parameters) -> Any:
        """The parameters of the agent's own network."""
        return parameters.agent

    def begin(self, key: jax.Array, agent: Any, observation: Any) -> tuple[Parameters, Known, jax.Array]:
        """Initial parameters (with the agent's), state, and novelty returns."""
        predictor, value, target = jax.random.split(jax.random.fold_in(key, 1), 3)
        seen, _ = features_and_mask(observation)
        statistics = None
        if normalize.has_statistics(self.observation_space):
            statistics = normalize.init_observations(self.observation_space)
        shown = _normalized(statistics, seen)
        return (
            Parameters(agent, self._predictor.init(predictor, shown), self._value.init(value, seen)),
            Known(self._target.init(target, shown), statistics, normalize.init(())),
            jnp.zeros(jax.tree.leaves(observation)[0].shape[0], jnp.float32),
        )

    def added(
        self,
        advantage: jax.Array,
        parameters: Parameters,
        known: Known,
        running: jax.Array,
        see: Callable[[Any], Any],
        trajectory: Any,
        key: jax.Array,
    ) -> tuple[jax.Array, Novelty, Known, jax.Array, dict[str, jax.Array]]:
        """Advantages `[T, B]` with novelty's added, and the other results of `judged`.

        `see` maps observations to inputs of the agent's network; other arguments as in `judged`.
        """
        time_step = trajectory.time_step
        last = jax.tree.map(lambda x: x[-1], time_step.final_observation)
        seen = see(trajectory.observation), see(last)
        key = jax.random.fold_in(key, 1)
        results = self.judged(parameters, known, running, seen, time_step, key)
        return advantage + self.coefficient * results[0], *results[1:]

    def learned(
        self, loss: jax.Array, parts: dict[str, jax.Array], parameters: Parameters, minibatch: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """A loss over samples `[N]` with the novelty losses added, and its terms."""
        more, of_novelty = self.loss(
            parameters, minibatch.novelty, minibatch.observation, self.value_coefficient
        )
        return loss + more, {**parts, **of_novelty}

    def judged(
        self,
        parameters: Parameters,
        known: Known,
        running: jax.Array,
        seen: tuple[Any, Any],
        step: TimeStep,
        key: jax.Array,
    ) -> tuple[jax.Array, Novelty, Known, jax.Array, dict[str, jax.Array]]:
        """The novelty of a rollout.

        `running [B]` float32 is the discounted novelty so far; `seen` are inputs of the agent's network: `[T,
        B, *obs]`, and `[B, *obs]` after the last step; `step` is `[T, B]`, and `key` selects the predictor's
        samples. Returns advantages `[T, B]`; samples `[T, B]`; `known` and `running` after the rollout;
        metrics.
        """
        steps, num_envs = step.reward.shape
        final, _ = features_and_mask(step.final_observation)
        statistics = known.observation_statistics
        if statistics is not None:
            statistics = normalize.update_observations(statistics, final)
        shown = _normalized(statistics, final)
        rows = jax.tree.map(environment_major, shown)
        features = self._target.apply(known.target, rows)
        error = _error(self._predictor.apply(parameters.predictor, rows), features)
        new = time_major(error, steps)
        never = jnp.zeros((steps, num_envs), bool)
        running, returns = normalize.accumulate_rollout_returns(running, new, never, self.discount)
        return_statistics = normalize.update(known.return_statistics, returns)
        reward = normalize.scale(return_statistics, new)

        def value_of(observation: Any) -> jax.Array:
            return self._value.apply(parameters.value, features_and_mask(observation)[0])[:, 0]

        value = time_major(value_of(jax.tree.map(environment_major, seen[0])), steps)
        # The next row follows, even in another episode.
        after = jnp.concatenate([value[1:], value_of(seen[1])[None]])
        advantage, target = generalized_advantage_estimation(
            reward, value, after, never, never, self.discount, self.lambda_
        )
        trains = jax.random.uniform(key, (steps, num_envs)) < self.share
        samples = Novelty(shown, time_major(features, steps), trains, target)
        known = known._replace(observation_statistics=statistics, return_statistics=return_statistics)
        return advantage, samples, known, running, {"novelty": jnp.mean(new)}

    def loss(
        self, parameters: Parameters, novelty: Novelty, seen: Any, value_coefficient: float
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The terms added to PPO's loss over samples `[N]`.

        `seen [N, *obs]` are inputs of the agent's network.
        """
        error = _error(self._predictor.apply(parameters.predictor, novelty.observation), novelty.features)
        trains = novelty.trains.astype(jnp.float32)
        predictor_loss = jnp.sum(error * trains) / jnp.maximum(jnp.sum(trains), 1.0)
        value = self._value.apply(parameters.value, features_and_mask(seen)[0])[:, 0]
        value_loss = value_error(value, novelty.value_target)
        parts = {"predictor_loss": predictor_loss, "novelty_value_loss": value_loss}
        return predictor_loss + value_coefficient * value_loss, parts

    def _network(self, outputs: int, scale: float, deeper: int = 0) -> Network:
        hidden = self.layers.hidden or ()
        more = dataclasses.replace(self.layers, hidden=(*hidden, *hidden[-1:] * deeper))
        return of_module(_Embedding(self.observation_space, more, outputs, scale))

    @property
    def _target(self) -> Network:
        return self._network(self.features, 2.0**0.5)

    @property
    def _predictor(self) -> Network:
        return self._network(self.features, 2.0**0.5, _DEEPER)

    @property
    def _value(self) -> Network:
        return self._network(1, 1.0)


class _Embedding(nn.Module):
    """Embeds observations with all parts as `[N, outputs]`."""

    observation_space: ObservationSpace
    layers: Layers
    outputs: int
    scale: float

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:
        inputs = features(observation, self.observation_space, self.layers.convolve)
        return Trunk(self.layers, self.outputs, self.scale)(inputs)


def _error(predicted: jax.Array, features: jax.Array) -> jax.Array:
    """Mean squared error of each row `[N, K]`: `[N]` (equation 1, over the number of features)."""
    return jnp.mean(jnp.square(predicted - features), axis=-1)


def _normalized(statistics: Any, observation: Any) -> Any:
    if statistics is None:
        return observation
    return jax.tree.map(
        lambda x: jnp.clip(x, -_CLIP, _CLIP) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        normalize.normalize_observations(statistics, observation),
    )
