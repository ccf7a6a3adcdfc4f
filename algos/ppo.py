"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), clipped form.

Top to bottom: state, iterate, act, learn. Hyperparameters, loss and epochs are those of all PPO's relatives:
`algos/proximal.py`. Nothing here knows of devices: the `fdg.fragment`s say what the parts are, and which axis
of their arrays is the batch. Two of them, `step` and `update`, are the same for every algorithm:
`algos/agent.py`.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import networks, normalize, outputs
from algos.acting import Actor, without_memory
from algos.hyperparameters import NETWORK, hyperparameter, require_positive, require_within
from algos.losses import explained_variance
from algos.networks import Network
from algos.normalize import RunningStatistics
from algos.proximal import Decision, ProximalAgent
from algos.rnd import Distillation, Known, Novelty, agent_of
from algos.rollout import environment_major, episode_metrics, rollout, values_after
from envs import Observation, features_and_mask


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any  # RunningStatistics of [*obs], or of each part of it
    return_statistics: RunningStatistics  # of the discounted return that rewards are scaled by
    running_return: jax.Array  # [B] float32, that return so far
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32


class ExploringState(NamedTuple):
    """`State`, and with `rnd` what there is to know of novelty."""

    parameters: Any
    optimizer_state: Any
    observation_statistics: Any
    return_statistics: RunningStatistics
    running_return: jax.Array
    env_state: Any
    observation: Observation
    key: jax.Array
    iteration: jax.Array
    known: Known
    running_novelty: jax.Array  # [B] float32, the discounted return of novelty so far


class Minibatch(NamedTuple):
    """Samples that a gradient is taken over."""

    observation: Observation  # [N, *obs], normalised if observations are
    action: jax.Array  # [N, *action]
    decision: Decision  # [N]
    advantage: jax.Array  # [N] float32
    target: jax.Array  # [N] float32, what the value is fitted to
    novelty: Novelty | None = None  # [N]


@dataclasses.dataclass(frozen=True)
class PPO(ProximalAgent):
    """PPO for discrete, multi-discrete and continuous actions.

    Defaults are those of CleanRL's `ppo.py` (Huang et al. 2022, JMLR 23(274)); `PPO.preset(env_name)` has
    those found good for one environment. Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> PPO(env=envs.make("CartPole-v1")).num_iterations
    976
    """

    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    rnd: bool = hyperparameter(
        False, "random network distillation: add an intrinsic reward for novel observations"
    )
    intrinsic_coefficient: float = hyperparameter(
        0.5, "weight of the intrinsic advantage; the environment's has weight 1 (with rnd)"
    )
    intrinsic_discount: float = hyperparameter(0.99, "discount of intrinsic rewards (with rnd)")
    rnd_features: int = hyperparameter(64, "output size of the target and predictor networks (with rnd)")
    rnd_share: float = hyperparameter(1.0, "share of the samples that train the predictor (with rnd)")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "rnd_features")
        require_within(self, 0, 1, "intrinsic_discount", "rnd_share")

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State | ExploringState:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self._reset(env_key)
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        known: Known | None = None
        if self.rnd:
            rnd_key = jax.random.fold_in(parameter_key, 1)
            parameters, known = self._distillation.begin(rnd_key, parameters, observation)
        state = State(
            parameters=parameters,
            optimizer_state=self._optimizer.init(parameters),
            observation_statistics=normalize.init_observations(self.env.observation_space),
            return_statistics=normalize.init(()),
            running_return=jnp.zeros(self.num_envs),
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=jnp.int32(0),
        )
        return state if known is None else ExploringState(*state, known, jnp.zeros(self.num_envs))

    def iterate(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)
        env_state, observation, ((observations, actions), decisions, time_steps) = rollout(
            act=lambda observation, keys: self.act(
                state.parameters, state.observation_statistics, observation, keys
            ),
            step=self.step,
            key=rollout_key,
            env_state=state.env_state,
            observation=state.observation,
            num_steps=self.num_steps,
        )
        statistics = state.observation_statistics, state.return_statistics
        learned, running, metrics = self.learn(
            (state.parameters, state.optimizer_state, *statistics, *((state.known,) if self.rnd else ())),
            (state.running_return, state.running_novelty) if self.rnd else state.running_return,
            (observations, actions, decisions, time_steps),
            shuffle_key,
        )
        parameters, optimizer_state, observation_statistics, return_statistics, *known = learned
        changed = {"known": known[0], "running_novelty": running[1]} if self.rnd else {}
        state = state._replace(
            parameters=parameters,
            optimizer_state=optimizer_state,
            observation_statistics=observation_statistics,
            return_statistics=return_statistics,
            running_return=running[0] if self.rnd else running,
            env_state=env_state,
            observation=observation,
            key=key,
            iteration=state.iteration + 1,
            **changed,
        )
        return state, metrics

    def actor(self, state: State) -> Actor:
        """How it acts with these parameters and statistics."""

        def policy(observation):
            return self._policy(state.parameters, self._seen(state.observation_statistics, observation))[0]

        return without_memory(policy, self._for_environment)

    # --- fragments; `gradient` is that of `ProximalAgent`, `step` and `update` are those of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, `Decision [B]`."""
        policy, value = self._policy(parameters, self._seen(statistics, observation))
        action = policy.sample(keys)
        return action, Decision(policy.log_prob(action), value)

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`.

        `learned`: parameters, optimiser state, statistics of observations and of returns; with `rnd` also
        `Known`. `running`: the running return `[B]`; with `rnd` that of novelty beside it.
        """
        parameters, optimizer_state, observation_statistics, return_statistics, *known = learned
        both: tuple[Any, Any] = running if self.rnd else (running, None)
        running_return, running_novelty = both
        observation, action, decision, time_step = trajectory
        reward, running_return, return_statistics = self._reward(time_step, running_return, return_statistics)
        # Statistics change only once the rollout is used up, so that actor and learner normalise alike; but
        # under a distribution policy with staleness the actor's, as its parameters, are older than these.
        seen = self._seen(observation_statistics, observation)
        next_value = values_after(
            decision.value,
            time_step,
            lambda final: self._policy(parameters, self._seen(observation_statistics, final))[1],
        )
        advantage, target = self._advantage(reward, decision.value, next_value, time_step)
        novelty: Novelty | None = None
        found: dict[str, jax.Array] = {}
        if self.rnd:
            last = jax.tree.map(lambda x: x[-1], time_step.final_observation)
            by_novelty, novelty, known[0], running_novelty, found = self._distillation.judged(
                parameters, known[0], running_novelty, (seen, self._seen(observation_statistics, last)),
                time_step, jax.random.fold_in(key, 1),
            )  # fmt: skip
            advantage += self.intrinsic_coefficient * by_novelty
        # Environment-major and flat: a split of the environments stays a split of the samples, and
        # products of flat matrices are what XLA is quick at.
        samples = jax.tree.map(
            environment_major, Minibatch(seen, action, decision, advantage, target, novelty)
        )
        parameters, optimizer_state, losses = self._updated(parameters, optimizer_state, samples, key)
        observation_statistics = self._with_observed(observation_statistics, observation)
        metrics = {
            **episode_metrics(time_step),
            **losses,
            "explained_variance": explained_variance(target, decision.value),
            **found,
        }
        running = (running_return, running_novelty) if self.rnd else running_return
        statistics = observation_statistics, return_statistics, *known
        return (parameters, optimizer_state, *statistics), running, metrics

    # --- parts ---

    def _loss(self, parameters: Any, minibatch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """PPO's, and with `rnd` what predictor and value of novelty learn by."""
        loss, parts = super()._loss(parameters, minibatch)
        if minibatch.novelty is None:
            return loss, parts
        more, of_novelty = self._distillation.loss(
            parameters, minibatch.novelty, minibatch.observation, self.value_coefficient
        )
        return loss + more, {**parts, **of_novelty}

    def _predict(self, parameters, minibatch):
        """Distribution over actions, and value, of each sample."""
        return self._policy(parameters, minibatch.observation)

    def _policy(self, parameters, observation):
        """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
        return networks.policy_and_value(
            self._network, agent_of(parameters), observation, self.env.action_space
        )

    def check_when_traced(self, state: Any) -> None:
        """Refuses a network whose results do not fit the action space."""
        features = features_and_mask(state.observation)[0]
        output = jax.eval_shape(self._network.apply, agent_of(state.parameters), features)
        outputs.actor_and_critic(output, self.env.action_space, (self.num_envs,))

    @property
    def _distillation(self) -> Distillation:
        space = self.env.observation_space
        return Distillation(
            space,
            dataclasses.replace(self.layers.sized(space), layer_norm=False),
            self.rnd_features,
            self.intrinsic_discount,
            self.gae_lambda,
            self.rnd_share,
        )

    @property
    def _network(self) -> Network:
        return self._computing(
            self._own("network")
            or networks.actor_critic(self.env.observation_space, self.env.action_space, **vars(self.layers))
        )
