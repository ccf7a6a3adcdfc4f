"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), clipped form.

Top to bottom: settings, the two functions of every algorithm, fragments, parts. Nothing here knows of
devices: the `fdg.fragment`s say what the parts are, and which axis of their arrays is the batch. Two of them,
`step` and `update`, are the same for every algorithm: `algos/agent.py`.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import networks, normalize, on_policy
from algos.agent import Agent, Rollouts
from algos.distributions import Distribution
from algos.given import NETWORK, Network
from algos.layers import PolicyLayers
from algos.losses import Decision, ProximalLoss, explained_variance, generalized_advantage_estimation
from algos.normalize import Normalizers, Transforming
from algos.on_policy import State, Trajectory
from algos.optimizers import ClippedOptimizer, Epochs
from algos.rnd import Distillation, Nothing, Novelty, RandomNetworkDistillation
from algos.rollout import environment_major, episode_metrics, values_after
from envs import Box, Discrete, Environment, MultiDiscrete, Observation, TimeStep
from fdg.settings.fields import hyperparameter, require_within


class Minibatch(NamedTuple):
    """Samples that a gradient is taken over."""

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
    those found good for one environment. Frozen and hashable; equal values are equal algorithms.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

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
    discount: float = hyperparameter(0.99, "gamma")
    gae_lambda: float = hyperparameter(0.95, "lambda of generalised advantage estimation")
    objective = ProximalLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    novelty = RandomNetworkDistillation()
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        self.epochs.check_divides(self, self.num_steps)
        require_within(self, 0, 1, "gae_lambda")

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        statistics = normalize.init_observations(self.env.observation_space)
        returns = normalize.init(()), jnp.zeros(self.num_envs)
        return on_policy.begin(self, key, statistics, returns, self._novelty.begin)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        return on_policy.iteration(self, state)

    actor = on_policy.actor

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return self.epochs.updates

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

        `learned`: parameters, optimiser state, statistics of observations and of returns, what is known of
        novelty. `running`: the running return `[B]`, and that of novelty.
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
        """Gradient of the loss over a minibatch `[N]`, and what the loss is made of."""
        return jax.grad(self.loss, has_aux=True)(parameters, minibatch)

    # --- parts ---

    def loss(self, parameters: Any, minibatch: Minibatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """PPO's loss over a minibatch `[N]`, and its parts; with `rnd` also what novelty is learned by."""
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
        """What minibatches are drawn from, and `loss` gets: `Minibatch [T, B]`, or a tuple with more fields.

        Args:
          see: observations as the network sees them.
          trajectory: `[T, B]`, as it was recorded.
          advantage, target: `[T, B]`.
        """
        observation, action, decision, _ = trajectory
        return Minibatch(see(observation), action, decision, advantage, target)

    def advantage(
        self, reward: jax.Array, value: jax.Array, next_value: jax.Array, time_step: TimeStep
    ) -> tuple[jax.Array, jax.Array]:
        """Advantage and value target, both `[T, B]`; a truncation is followed by its observation's value."""
        return generalized_advantage_estimation(
            reward, value, next_value, time_step.terminated, time_step.truncated,
            self.discount, self.gae_lambda,
        )  # fmt: skip

    def _policy(self, parameters: Any, observation: Observation) -> tuple[Distribution, jax.Array]:
        """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
        return networks.policy_and_value(
            self._network, self._novelty.agent(parameters), observation, self.env.action_space
        )

    def check_when_traced(self, state: State) -> None:
        """Refuses a network whose results do not fit the action space."""
        self._check_actor_critic(self._network, self._novelty.agent(state.parameters))

    @property
    def _novelty(self) -> Distillation | Nothing:
        return self.novelty.of(self)

    @property
    def _network(self) -> Network:
        return self._actor_critic()
