"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), clipped form.

`fdg.fragment` marks the parts, and the batch axis of their arrays. Two of them, `step` and `update`, are the
same for every algorithm: `algos/agent.py`.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import fdg
from algos import networks, normalize, on_policy
from algos.agent import Agent, Rollouts
from algos.distributions import Distribution
from algos.layers import Layers, PolicyLayers, Trunk, features
from algos.losses import (
    Advantages,
    Decision,
    ProximalLoss,
    explained_variance,
    generalized_advantage_estimation,
    value_error,
)
from algos.networks import NETWORK, Network, of_module
from algos.normalize import Normalizers, RunningStatistics, Transforming
from algos.on_policy import State, Trajectory
from algos.optimizers import ClippedOptimizer, Epochs
from algos.rollout import environment_major, episode_metrics, time_major, values_after
from envs import Box, Discrete, Environment, MultiDiscrete, Observation, TimeStep, features_and_mask
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require_positive, require_within
from fdg.settings.parts import Part

# --- random network distillation (`--rnd true`): agents are also paid for what is new to them ---
#
# Burda et al. 2018, "Exploration by Random Network Distillation", arXiv 1810.12894. A network that is never
# trained, the target, gives features of observations; another, the predictor, learns to give the same for
# what was seen. Where it still errs is new, and its error a reward. These rewards have a value function and a
# discount of their own, and continue from episode to episode (section 2.3). `K` features.

_CLIP = 5.0  # deviations, of observations (section 2.4)
_DEEPER = 2  # layers that the predictor has more, as in the authors' code


class Parameters(NamedTuple):
    """The parameters that are trained."""

    agent: Any  # of PPO's own network
    predictor: Any
    value: Any  # of the value of novelty


class Known(NamedTuple):
    """The novelty bonus's state apart from parameters."""

    target: Any  # parameters of the network that is never trained
    observation_statistics: Any  # that both networks' observations are normalised by; None for categories
    return_statistics: RunningStatistics  # of the discounted novelty that rewards are divided by


class Novelty(NamedTuple):
    """What the novelty losses need of samples `[N]`."""

    observation: Any  # [N, *obs], what the step led to, as predictor and target see it
    features: jax.Array  # [N, K] float32, of the target
    trains: jax.Array  # [N] bool, whether the predictor learns from it
    value_target: jax.Array  # [N] float32


@dataclasses.dataclass(frozen=True)
class RandomNetworkDistillation(Part):
    """Settings of the novelty bonus."""

    rnd: bool = hyperparameter(
        False, "random network distillation: add an intrinsic reward for novel observations"
    )
    intrinsic_coefficient: float = hyperparameter(
        0.5, "weight of the intrinsic advantage; the environment's has weight 1 (with rnd)", only_with="rnd"
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

    def of(self, algorithm: Any) -> "Distillation | Nothing":
        """The `Distillation`, or `Nothing`, of an algorithm."""
        if not self.rnd:
            return Nothing()
        space = algorithm.env.observation_space
        return Distillation(
            space,
            dataclasses.replace(algorithm.layers.sized(space), layer_norm=False, torso="dense"),
            self.rnd_features,
            self.intrinsic_discount,
            algorithm.gae_lambda,
            self.rnd_share,
            self.intrinsic_coefficient,
            algorithm.value_coefficient,
        )


class Nothing:
    """The functions of `Distillation` without a novelty bonus."""

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
    """Random network distillation: its networks and functions.

    Attributes:
      observation_space: observations that may be novel, `privileged` parts included.
      layers: layers of target and value; the predictor has two more dense layers.
      features: K.
      discount: of novelty.
      lambda_: of generalised advantage estimation.
      share: share of the samples that train the predictor.
      coefficient, value_coefficient: weights of novelty's advantage, and of its value loss.
    """

    observation_space: ObservationSpace
    layers: Layers
    features: int
    discount: float
    lambda_: float
    share: float
    coefficient: float = 0.5
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
        """Advantages `[T, B]` with those of novelty, and the other results of `judged`.

        `see` maps observations to the input of the agent's network; other arguments are as for `judged`.
        """
        time_step = trajectory.time_step
        last = jax.tree.map(lambda x: x[-1], time_step.final_observation)
        seen = see(trajectory.observation), see(last)
        key = jax.random.fold_in(key, 1)
        found = self.judged(parameters, known, running, seen, time_step, key)
        return advantage + self.coefficient * found[0], *found[1:]

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

        Args:
          running: `[B]` float32, discounted novelty so far.
          seen: inputs of the agent's network: `[T, B, *obs]`, and `[B, *obs]` after the last step.
          step: `[T, B]`.
          key: selects the samples for the predictor.

        Returns:
          advantages `[T, B]`; samples `[T, B]`; `known` and `running` after the rollout; metrics.
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
        # A row is followed by the next, in whichever episode.
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
    """Observations with all parts to `[N, outputs]`."""

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


class Minibatch(NamedTuple):
    """Samples for one gradient step."""

    observation: Observation  # [N, *obs], normalised if observations are
    action: jax.Array  # [N, *action]
    decision: Decision  # [N]
    advantage: jax.Array  # [N] float32
    target: jax.Array  # [N] float32, what the value is fitted to
    novelty: Novelty | None = None  # [N]


@dataclasses.dataclass(frozen=True)
class PPO(Agent):
    """PPO for discrete, multi-discrete and continuous actions.

    Defaults are those of CleanRL's `ppo.py` (Huang et al. 2022, JMLR 23(274)); `PPO.preset(env_name)` has
    settings found good for an environment. Frozen and hashable.

    Raises:
      FdgError: (construction) a field is out of range, or sizes do not divide.

    >>> import envs
    >>> PPO(env=envs.make("CartPole-v1")).num_iterations
    976
    """

    presets_of: ClassVar[str] = "PPO"
    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=128, total_steps=500_000)
    epochs = Epochs()
    optimizer_settings = ClippedOptimizer(learning_rate=2.5e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    advantages = Advantages()
    objective = ProximalLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    novelty = RandomNetworkDistillation()
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        self.epochs.check_divides(self, self.num_steps)

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        statistics = self.normalizers.begin(self.env.observation_space, kept=True)
        returns = normalize.init(()), jnp.zeros(self.num_envs, jnp.float32)
        return on_policy.begin(self, key, statistics, returns, self._novelty.begin)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        return on_policy.iteration(self, state)

    actor = on_policy.actor

    updates_per_iteration = property(lambda self: self.epochs.updates)

    # --- fragments; `step` and `update` are those of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, `Decision [B]`."""
        policy, value = self._policy(parameters, self.normalizers.seen(statistics, observation))
        action = policy.sample(keys)
        return action, Decision(policy.log_prob(action), value)

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`.

        `learned`: parameters, optimiser state, statistics of observations and of returns, the novelty state.
        `running`: the running return `[B]`, and that of novelty.
        """
        parameters, optimizer_state, observation_statistics, return_statistics, known = learned
        running_return, running_novelty = running
        decision, time_step = trajectory.decision, trajectory.time_step
        reward, running_return, return_statistics = self.normalizers.reward(
            time_step, running_return, return_statistics, self.discount
        )
        # Statistics change only once the rollout is used up, so that actor and learner normalise alike; but
        # under a distribution policy with staleness the actor's, as its parameters, are older than these.
        see = functools.partial(self.normalizers.seen, observation_statistics)
        next_value = values_after(
            decision.value, time_step, lambda final: self._policy(parameters, see(final))[1]
        )
        advantage, target = self.advantage(reward, decision.value, next_value, time_step)
        advantage, novelty, known, running_novelty, found = self._novelty.added(
            advantage, parameters, known, running_novelty, see, trajectory, key
        )
        samples = self.samples(see, trajectory, advantage, target)._replace(novelty=novelty)
        # Environment-major and flat: a split of the environments stays a split of the samples, and
        # products of flat matrices are what XLA is quick at.
        samples = jax.tree.map(environment_major, samples)
        parameters, optimizer_state, losses = self.epochs.learn(
            key, samples, self.num_envs, parameters, optimizer_state, self.gradient, self.update
        )
        observation_statistics = self.normalizers.observed(observation_statistics, trajectory.observation)
        metrics = {
            **episode_metrics(time_step),
            **losses,
            "explained_variance": explained_variance(target, decision.value),
            **found,
        }
        learned = parameters, optimizer_state, observation_statistics, return_statistics, known
        return learned, (running_return, running_novelty), metrics

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Gradient of the loss over a minibatch `[N]`, and the loss's terms."""
        return jax.grad(self.loss, has_aux=True)(parameters, minibatch)

    def loss(self, parameters: Any, minibatch: Minibatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """PPO's loss over a minibatch `[N]`, and its terms; with `rnd` also the novelty losses."""
        policy, value = self._policy(parameters, minibatch.observation)
        loss, parts = self.objective.of(policy, value, minibatch)
        return self._novelty.learned(loss, parts, parameters, minibatch)

    def samples(
        self,
        see: Callable[[Observation], Observation],
        trajectory: Trajectory,
        advantage: jax.Array,
        target: jax.Array,
    ) -> Any:
        """The samples for `loss`: `Minibatch [T, B]`, or one with more fields; `see` normalises."""
        observation, action, decision, _ = trajectory
        return Minibatch(see(observation), action, decision, advantage, target)

    def advantage(
        self, reward: jax.Array, value: jax.Array, next_value: jax.Array, time_step: TimeStep
    ) -> tuple[jax.Array, jax.Array]:
        """Advantage and value target, both `[T, B]`; bootstraps from the observation after a truncation."""
        return self.advantages.of(reward, value, next_value, time_step)

    def _policy(self, parameters: Any, observation: Observation) -> tuple[Distribution, jax.Array]:
        """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
        return networks.policy_and_value(
            self._network, self._novelty.agent(parameters), observation, self.env.action_space
        )

    def check_when_traced(self, state: State) -> None:
        """Refuses a network whose outputs do not fit the action space."""
        self._check_actor_critic(self._network, self._novelty.agent(state.parameters))

    @property
    def _novelty(self) -> Distillation | Nothing:
        return self.novelty.of(self)

    _network = property(Agent._actor_critic)
