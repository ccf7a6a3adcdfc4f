"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), clipped form.

`fdg.fragment` marks fragments and the batch axes of their arrays; `Agent` defines `step` and `update`.

Shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax

import fdg
from algos import on_policy, registry
from algos.agent import Agent, Rollouts
from algos.losses import Advantages, Decision, Distribution, ProximalLoss, explained_variance, values_after
from algos.on_policy import Epochs, PolicyLayers, State, Trajectory, environment_major
from algos.rollout import episode_metrics
from algos.values import NETWORK, ClippedOptimizer, Network, Normalizers, Transforming
from envs import Box, Discrete, Environment, MultiDiscrete, Observation, TimeStep


class Minibatch(NamedTuple):
    """Samples for one gradient step."""

    observation: Observation  # [N, *obs], normalised if the settings say so
    action: jax.Array  # [N, *action]
    decision: Decision  # [N]
    advantage: jax.Array  # [N] float32
    target: jax.Array  # [N] float32, for the value
    novelty: Any = None  # an `algos.rnd.Novelty [N]`; None without `rnd`


@dataclasses.dataclass(frozen=True)
class PPO(Agent, presets="PPO"):
    """PPO for discrete, multi-discrete and continuous actions.

    Defaults are those of CleanRL's `ppo.py` (Huang et al. 2022, JMLR 23(274)); `PPO.preset(env_name)` has
    tuned settings for an environment.

    >>> import envs
    >>> PPO(env=envs.make("CartPole-v1")).num_iterations
    976
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)
    values_novelty: ClassVar[bool] = True

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=128, total_steps=500_000)
    epochs = Epochs()
    optimizer_settings = ClippedOptimizer(learning_rate=2.5e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    advantages = Advantages()
    objective = ProximalLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        registry.option("checks").check_divides(self, self.num_steps)

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        return on_policy.begin(self, key, keep_statistics=True, novelty=self._novelty.begin)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments, and all updates on it."""
        return on_policy.iteration(self, state)

    actor = on_policy.actor

    updates_per_iteration = property(lambda self: self.epochs.updates)

    # --- fragments; `step` and `update` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, `Decision [B]`."""
        policy, value = self.policy_and_value(parameters, self.normalizers.seen(statistics, observation))
        action = policy.sample(keys)
        return action, Decision(policy.log_prob(action), value)

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`.

        `learned`: parameters, optimiser state, statistics of observations and of returns, the novelty state.
        `running`: the running returns `[B]` of rewards and of novelty.
        """
        parameters, optimizer_state, observation_statistics, return_statistics, novelty_state = learned
        running_return, running_novelty = running
        decision, time_step = trajectory.decision, trajectory.time_step
        reward, running_return, return_statistics = self.normalizers.reward(
            time_step, running_return, return_statistics, self.discount
        )
        # Statistics change only after learning, so that actor and learner use the same statistics. (Under a
        # distribution policy with staleness, the actor's statistics are as old as its parameters.)
        normalize = functools.partial(self.normalizers.seen, observation_statistics)
        next_value = values_after(
            decision.value, time_step, lambda final: self.policy_and_value(parameters, normalize(final))[1]
        )
        advantage, target = self.advantage(reward, decision.value, next_value, time_step)
        advantage, novelty, novelty_state, running_novelty, novelty_metrics = self._novelty.add_advantages(
            advantage, parameters, novelty_state, running_novelty, normalize, trajectory, key
        )
        samples = self.samples(normalize, trajectory, advantage, target)._replace(novelty=novelty)
        samples = jax.tree.map(environment_major, samples)
        parameters, optimizer_state, losses = self.epochs.learn(
            key, samples, self.num_envs, parameters, optimizer_state, self.gradient, self.update
        )
        observation_statistics = self.normalizers.update(observation_statistics, trajectory.observation)
        explained = {"explained_variance": explained_variance(target, decision.value)}
        metrics = {**episode_metrics(time_step), **losses, **explained, **novelty_metrics}
        learned = parameters, optimizer_state, observation_statistics, return_statistics, novelty_state
        return learned, (running_return, running_novelty), metrics

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Gradient of the loss over a minibatch `[N]`, and the loss's terms."""
        return jax.grad(self.loss, has_aux=True)(parameters, minibatch)

    def loss(self, parameters: Any, minibatch: Minibatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """PPO's loss over a minibatch `[N]`, and its terms; with `rnd` also the novelty losses."""
        policy, value = self.policy_and_value(parameters, minibatch.observation)
        loss, terms = self.objective.of(policy, value, minibatch)
        return self._novelty.add_losses(loss, terms, parameters, minibatch)

    def samples(
        self, see: Callable[[Any], Any], trajectory: Trajectory, advantage: jax.Array, target: jax.Array
    ) -> Any:
        """The samples for `loss`: a `Minibatch [T, B]`, or a tuple with further fields.

        `see` normalises observations.
        """
        observation, action, decision, _ = trajectory
        return Minibatch(see(observation), action, decision, advantage, target)

    def advantage(
        self, reward: jax.Array, value: jax.Array, next_value: jax.Array, time_step: TimeStep
    ) -> tuple[jax.Array, jax.Array]:
        """Advantage and value target, both `[T, B]`; a truncation bootstraps from the final observation."""
        return self.advantages.of(reward, value, next_value, time_step)

    def policy_and_value(self, parameters: Any, observation: Observation) -> tuple[Distribution, jax.Array]:
        """Distribution over actions and value `[N]`, for observations `[N, *obs]`."""
        return registry.option("networks").policy_and_value(
            self._network, self._novelty.agent_parameters(parameters), observation, self.env.action_space
        )

    def check_when_traced(self, state: State) -> None:
        """Refuses a network whose outputs do not fit the action space."""
        agent = self._novelty.agent_parameters(state.parameters)
        registry.option("checks").check_actor_critic(self, self._network, agent)

    _novelty = property(lambda self: self.novelty.of(self))
    _network = property(lambda self: registry.option("networks").actor_critic_of(self))
