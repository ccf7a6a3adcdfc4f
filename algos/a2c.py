"""Advantage actor-critic: the synchronous form of A3C (Mnih et al. 2016, arXiv 1602.01783).

One gradient step follows each rollout, so learning is on-policy. `algos/a3c.py` is the asynchronous form,
with the same loss.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` rows of any origin.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import fdg
from algos import on_policy, optimizers
from algos.agent import Agent, Rollouts
from algos.layers import PolicyLayers
from algos.losses import Advantages, WeightedLoss
from algos.networks import NETWORK, Network
from algos.normalize import Normalizers, Transforming
from algos.on_policy import Trajectory
from algos.optimizers import ClippedOptimizer
from algos.rollout import values_after
from envs import Box, Discrete, Environment, MultiDiscrete


@dataclasses.dataclass(frozen=True)
class A2C(Agent):
    """A2C for discrete, multi-discrete and continuous actions.

    Defaults are those of OpenAI's baselines (`baselines/a2c`, Dhariwal et al. 2017), which Stable-Baselines3
    follows.

    Raises:
      FdgError: (construction) a field out of range.

    >>> import envs
    >>> A2C(env=envs.make("CartPole-v1")).steps_per_iteration
    80
    """

    presets_of: ClassVar[str] = "A2C"
    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    env: Environment
    rollouts = Rollouts(num_envs=16, num_steps=5, total_steps=1_000_000)
    optimizer_settings = ClippedOptimizer(learning_rate=7e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    advantages = Advantages(gae_lambda=1.0)  # as in the paper
    objective = WeightedLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    transforming = Transforming()

    def __post_init__(self):
        self._check()

    # --- what all have that learn once from each rollout: `algos/on_policy.py` ---

    init, iterate, actor = on_policy.init, on_policy.iterate_once, on_policy.actor
    updates_per_iteration = property(lambda self: 1)
    learn, gradient = on_policy.learn_once, on_policy.gradient_of_rollout
    _policy, check_when_traced = on_policy.policy_and_value, on_policy.check_when_traced
    _network, _default_optimizer = property(Agent._actor_critic), property(optimizers.rmsprop_of)

    # --- fragments; `step` and `update` are those of every agent ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`; its log-probability is not needed."""
        policy, _ = self._policy(parameters, self.normalizers.seen(statistics, observation))
        return policy.sample(keys), None

    # --- parts ---

    def loss(self, parameters: Any, trajectory: Trajectory) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a rollout `[T, B]`, and its terms: scalars."""
        policy, value = on_policy.over_time(
            lambda rows: self._policy(parameters, rows), trajectory.observation
        )
        time_step = trajectory.time_step
        constant, known = jax.lax.stop_gradient((parameters, value))
        # The longest returns that the rollout allows, as in algorithm S3 of the paper; with lambda below 1,
        # a mean of those and of shorter ones.
        advantage, target = self.advantages.of(
            time_step.reward,
            known,
            values_after(known, time_step, lambda final: self._policy(constant, final)[1]),
            time_step,
        )
        # The gradients of section 4 of the paper ("Asynchronous advantage actor-critic"), with their entropy
        # term; those of the value as in algorithm S3. Means over the rollout, where the paper has sums.
        policy_loss = -jnp.mean(policy.log_prob(trajectory.action) * advantage)
        value_loss = jnp.mean(jnp.square(target - value))
        return self.objective.of(policy_loss, value_loss, jnp.mean(policy.entropy()))
