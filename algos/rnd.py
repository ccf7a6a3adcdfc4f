"""Random network distillation: a reward bonus for novel observations (`--rnd true`).

Burda et al. 2018, "Exploration by Random Network Distillation", arXiv 1810.12894. The target network is never
trained; the predictor network learns to predict the target's features of observations. The prediction error
is large for novel observations, and is a reward, called novelty here. In PPO, novelty has its own value
function and discount, and its returns do not end with episodes (section 2.3). Other algorithms add novelty to
their rewards, like any `algos.Bonus`.

Shapes: `T` steps of a rollout, `B` environments, `N` rows, `K` features.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from algos import normalize
from algos.interfaces import Bonus
from algos.layers import Trunk, features, with_widths
from algos.losses import generalized_advantage_estimation, value_error
from algos.networks import of_module
from algos.normalize import RunningStatistics
from algos.on_policy import environment_major
from algos.rings import time_major
from algos.values import Layers, Network
from envs import TimeStep, features_and_mask
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require_positive, require_within
from fdg.settings.parts import Part

_CLIP = 5.0  # bound of normalised observations (section 2.4)
_EXTRA_LAYERS = 2  # additional layers of the predictor, as in the authors' code
_SALT = 0x6E6F76  # for `fold_in`; with a small number, the algorithm's own splits could give the same key


@dataclasses.dataclass(frozen=True)
class RandomNetworkDistillation(Part):
    """The settings of random network distillation."""

    rnd: bool = hyperparameter(
        False, "random network distillation: add an intrinsic reward for novel observations"
    )
    intrinsic_coefficient: float = hyperparameter(
        0.5,
        "weight of the intrinsic reward, in PPO of its advantage; the environment's has weight 1 (with rnd)",
        only_with="rnd",
    )
    intrinsic_discount: float = hyperparameter(
        0.99, "discount of intrinsic rewards (with rnd)", only_with="rnd"
    )
    rnd_features: int = hyperparameter(
        64, "output size of the target and predictor networks (with rnd)", only_with="rnd"
    )
    rnd_share: float = hyperparameter(
        1.0, "share of the samples that train the predictor (with rnd)", only_with="rnd"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses settings that are out of range."""
        require_positive(algorithm, "rnd_features")
        require_within(algorithm, 0, 1, "intrinsic_discount", "rnd_share")

    def of(self, algorithm: Any) -> Any:
        """The algorithm's `Distillation`; without `rnd` a `NoDistillation`."""
        if not self.rnd:
            return NoDistillation()
        space = algorithm.env.observation_space
        return Distillation(
            space,
            dataclasses.replace(with_widths(algorithm.layers, space), layer_norm=False, torso="dense"),
            self.rnd_features,
            self.intrinsic_discount,
            getattr(algorithm, "gae_lambda", 1.0),
            self.rnd_share,
            self.intrinsic_coefficient,
            getattr(algorithm, "value_coefficient", 1.0),
        )


class Parameters(NamedTuple):
    """The trained parameters."""

    agent: Any  # of PPO's network
    predictor: Any
    value: Any  # of the value function of novelty


class NoveltyState(NamedTuple):
    """The state of the novelty bonus, except for trained parameters."""

    target: Any  # parameters of the target network
    observation_statistics: Any  # to normalise both networks' inputs; None if observations are categories
    return_statistics: RunningStatistics  # of the discounted novelty; its deviation divides novelty


class Novelty(NamedTuple):
    """Samples `[N]` for the novelty losses."""

    observation: Any  # [N, *obs], after the step, normalised for predictor and target
    target_features: jax.Array  # [N, K] float32, the target network's outputs
    trains: jax.Array  # [N] bool, True if the predictor learns from the sample
    value_target: jax.Array  # [N] float32


class NoDistillation:
    """Takes the place of `Distillation` if there is no novelty bonus."""

    def begin(self, key: jax.Array, agent: Any, observation: Any) -> tuple[Any, None, None]:
        """The agent's parameters, and an empty state."""
        return agent, None, None

    def agent_parameters(self, parameters: Any) -> Any:
        """The parameters unchanged: all belong to the agent's network."""
        return parameters

    def add_advantages(
        self, advantage: jax.Array, parameters: Any, state: Any, running_novelty: Any, *rollout: Any
    ) -> tuple[jax.Array, Any, Any, Any, dict[str, jax.Array]]:
        """The advantages and the state unchanged; no samples, and no metrics."""
        return advantage, None, state, running_novelty, {}

    def add_losses(
        self, loss: jax.Array, terms: dict[str, jax.Array], parameters: Any, minibatch: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and its terms, unchanged."""
        return loss, terms


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Random network distillation: its networks and functions."""

    observation_space: ObservationSpace  # novelty includes `privileged` parts
    layers: Layers  # of target and value network; the predictor has two more dense layers
    num_features: int  # K
    discount: float  # of novelty
    lambda_: float  # of generalised advantage estimation
    share: float  # fraction of the samples that train the predictor
    coefficient: float = 0.5  # weight of novelty's advantage
    value_coefficient: float = 0.5  # weight of the value loss of novelty

    def agent_parameters(self, parameters: Parameters) -> Any:
        """The parameters of the agent's own network."""
        return parameters.agent

    def begin(
        self, key: jax.Array, agent: Any, observation: Any
    ) -> tuple[Parameters, NoveltyState, jax.Array]:
        """Initial parameters (with the agent's), state, and running novelty `[B]`: zeros."""
        predictor_key, value_key, target_key = jax.random.split(jax.random.fold_in(key, 1), 3)
        inputs, _ = features_and_mask(observation)
        predictor, state = self.init(predictor_key, target_key, inputs)
        running_novelty = jnp.zeros(jax.tree.leaves(observation)[0].shape[0], jnp.float32)
        return Parameters(agent, predictor, self._value.init(value_key, inputs)), state, running_novelty

    def init(
        self, predictor_key: jax.Array, target_key: jax.Array, observation: Any
    ) -> tuple[Any, NoveltyState]:
        """Initial parameters of the predictor, and the initial state, for observations `[N, *obs]`."""
        statistics = None
        if normalize.has_statistics(self.observation_space):
            statistics = normalize.init_observations(self.observation_space)
        inputs = _normalize_and_clip(statistics, observation)
        state = NoveltyState(self._target.init(target_key, inputs), statistics, normalize.init(()))
        return self._predictor.init(predictor_key, inputs), state

    def add_advantages(
        self,
        advantage: jax.Array,
        parameters: Parameters,
        state: NoveltyState,
        running_novelty: jax.Array,
        see: Callable[[Any], Any],
        trajectory: Any,
        key: jax.Array,
    ) -> tuple[jax.Array, Novelty, NoveltyState, jax.Array, dict[str, jax.Array]]:
        """Adds the advantages of novelty to `advantage [T, B]`; the other results are `evaluate_rollout`'s.

        `see` normalises observations for the agent's network; other arguments as in `evaluate_rollout`.
        """
        time_step = trajectory.time_step
        last = jax.tree.map(lambda x: x[-1], time_step.final_observation)
        agent_inputs = see(trajectory.observation), see(last)
        key = jax.random.fold_in(key, _SALT)
        results = self.evaluate_rollout(parameters, state, running_novelty, agent_inputs, time_step, key)
        return advantage + self.coefficient * results[0], *results[1:]

    def add_losses(
        self, loss: jax.Array, terms: dict[str, jax.Array], parameters: Parameters, minibatch: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Adds the novelty losses to a loss over samples `[N]`, and to its terms."""
        novelty_loss, novelty_terms = self.loss(
            parameters, minibatch.novelty, minibatch.observation, self.value_coefficient
        )
        return loss + novelty_loss, {**terms, **novelty_terms}

    def evaluate_rollout(
        self,
        parameters: Parameters,
        state: NoveltyState,
        running_novelty: jax.Array,
        agent_inputs: tuple[Any, Any],
        step: TimeStep,
        key: jax.Array,
    ) -> tuple[jax.Array, Novelty, NoveltyState, jax.Array, dict[str, jax.Array]]:
        """Computes novelty's advantages and samples, both `[T, B]`, from a rollout `step [T, B]`.

        `agent_inputs` are the observations, normalised for the agent's network: `[T, B, *obs]`, and
        `[B, *obs]` after the last step. `running_novelty [B]` float32 is the discounted novelty so far. `key`
        draws the predictor's samples. Also returns the state and `running_novelty` afterwards, and metrics.
        """
        inputs, target_features, reward, state, running_novelty, mean = self.rewards(
            parameters.predictor, state, running_novelty, step
        )
        steps, num_envs = step.reward.shape
        no_end = jnp.zeros((steps, num_envs), bool)

        def value_of(observation: Any) -> jax.Array:
            return self._value.apply(parameters.value, features_and_mask(observation)[0])[:, 0]

        value = time_major(value_of(jax.tree.map(environment_major, agent_inputs[0])), steps)
        # The value after a step is that of the next row, even if that row belongs to another episode.
        next_value = jnp.concatenate([value[1:], value_of(agent_inputs[1])[None]])
        advantage, value_target = generalized_advantage_estimation(
            reward, value, next_value, no_end, no_end, self.discount, self.lambda_
        )
        trains = jax.random.uniform(key, (steps, num_envs)) < self.share
        samples = Novelty(inputs, time_major(target_features, steps), trains, value_target)
        return advantage, samples, state, running_novelty, {"novelty": mean}

    def rewards(
        self, predictor: Any, state: NoveltyState, running_novelty: jax.Array, step: TimeStep
    ) -> tuple[Any, ...]:
        """The rewards for novelty in a rollout `[T, B]`; with several agents `[T, B, A]`.

        Returns the inputs of predictor and target, `[T, B, ...]`; the target's features, rows `[N, K]`; the
        scaled rewards; `state` and `running_novelty` after the rollout; and the mean error.
        """
        shape = step.reward.shape
        final, _ = features_and_mask(step.final_observation)
        statistics = state.observation_statistics
        if statistics is not None:
            statistics = normalize.update_observations(statistics, final)
        inputs = _normalize_and_clip(statistics, final)
        rows = _rows(inputs, shape)
        target_features = self._target.apply(state.target, rows)
        row_error = _error(self._predictor.apply(predictor, rows), target_features)
        error = time_major(row_error.reshape(-1, *shape[2:]), shape[0])
        running_novelty, returns = normalize.accumulate_rollout_returns(
            running_novelty, error, jnp.zeros(shape, bool), self.discount
        )
        return_statistics = normalize.update(state.return_statistics, returns)
        reward = normalize.scale(return_statistics, error)
        state = state._replace(observation_statistics=statistics, return_statistics=return_statistics)
        return inputs, target_features, reward, state, running_novelty, jnp.mean(error)

    def loss(
        self, parameters: Parameters, novelty: Novelty, agent_inputs: Any, value_coefficient: float
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Novelty's loss and its terms over samples `[N]`; `agent_inputs` are `[N, *obs]`."""
        predictor_loss = self.predictor_loss(
            parameters.predictor, novelty.observation, novelty.target_features, novelty.trains
        )
        value = self._value.apply(parameters.value, features_and_mask(agent_inputs)[0])[:, 0]
        value_loss = value_error(value, novelty.value_target)
        terms = {"predictor_loss": predictor_loss, "novelty_value_loss": value_loss}
        return predictor_loss + value_coefficient * value_loss, terms

    def predictor_loss(
        self, predictor: Any, inputs: Any, target_features: jax.Array, trains: jax.Array
    ) -> jax.Array:
        """The mean error over the rows `[N]` that train the predictor."""
        error = _error(self._predictor.apply(predictor, inputs), target_features)
        weight = trains.astype(jnp.float32)
        return jnp.sum(error * weight) / jnp.maximum(jnp.sum(weight), 1.0)

    def _network(self, outputs: int, scale: float, extra_layers: int = 0) -> Network:
        hidden = self.layers.hidden or ()
        layers = dataclasses.replace(self.layers, hidden=(*hidden, *hidden[-1:] * extra_layers))
        return of_module(_Embedding(self.observation_space, layers, outputs, scale))

    @property
    def _target(self) -> Network:
        return self._network(self.num_features, 2.0**0.5)

    @property
    def _predictor(self) -> Network:
        return self._network(self.num_features, 2.0**0.5, _EXTRA_LAYERS)

    @property
    def _value(self) -> Network:
        return self._network(1, 1.0)


# --- as a bonus on rewards ---


class BonusState(NamedTuple):
    """The state of novelty as a bonus."""

    predictor: Any  # parameters
    optimizer_state: Any  # of Adam
    known: NoveltyState  # networks and statistics of novelty; the name is a key in checkpoints
    running: jax.Array  # [B] or [B, A] float32, the discounted novelty so far
    key: jax.Array  # to draw the samples that train the predictor


def bonus(algorithm: Any, key: jax.Array | None) -> Bonus:
    """Novelty as an `algos.Bonus`; only `init` uses the key.

    After each rollout the predictor takes one step of Adam, with the algorithm's step size.
    """
    distillation = algorithm.novelty.of(algorithm)
    optimizer = optax.adam(algorithm.learning_rate)
    leading = algorithm._reward_shape

    def init(observation: Any) -> BonusState:
        init_key = jax.random.fold_in(cast(jax.Array, key), _SALT)
        predictor_key, target_key, sampling_key = jax.random.split(init_key, 3)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(leading) :]), observation)
        predictor, novelty_state = distillation.init(predictor_key, target_key, rows)
        running = jnp.zeros(leading, jnp.float32)
        return BonusState(predictor, optimizer.init(predictor), novelty_state, running, sampling_key)

    def apply(state: BonusState, step: TimeStep) -> tuple[BonusState, jax.Array]:
        results = distillation.rewards(state.predictor, state.known, state.running, step)
        inputs, target_features, reward, novelty_state, running, _ = results
        predictor, optimizer_state, key = state.predictor, state.optimizer_state, state.key
        key, share_key = jax.random.split(key)
        trains = jax.random.uniform(share_key, reward.shape) < distillation.share
        rows = _rows(inputs, reward.shape), target_features, environment_major(trains).reshape(-1)
        gradient = jax.grad(distillation.predictor_loss)(predictor, *rows)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        predictor = optax.apply_updates(predictor, updates)
        state = BonusState(predictor, optimizer_state, novelty_state, running, key)
        return state, distillation.coefficient * reward

    return Bonus(init, apply)


def _rows(inputs: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes inputs `[T, B, ...]` or `[T, B, A, ...]`, with leading axes `shape`, to rows `[N, ...]`."""
    flat = jax.tree.map(environment_major, inputs)
    if len(shape) == 2:
        return flat
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(shape) - 1 :]), flat)


class _Embedding(nn.Module):
    """Embeds observations, `privileged` parts included, as `[N, outputs]`."""

    observation_space: ObservationSpace
    layers: Layers
    outputs: int
    scale: float

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:
        inputs = features(observation, self.observation_space, self.layers.convolve)
        return Trunk(self.layers, self.outputs, self.scale)(inputs)


def _error(predicted: jax.Array, target: jax.Array) -> jax.Array:
    """Mean squared error of each row `[N, K]`: `[N]` (equation 1, divided by the number of features)."""
    return jnp.mean(jnp.square(predicted - target), axis=-1)


def _normalize_and_clip(statistics: Any, observation: Any) -> Any:
    """Inputs of target and predictor: normalised observations; without statistics, unchanged ones."""
    if statistics is None:
        return observation
    return jax.tree.map(
        lambda x: jnp.clip(x, -_CLIP, _CLIP) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        normalize.normalize_observations(statistics, observation),
    )
