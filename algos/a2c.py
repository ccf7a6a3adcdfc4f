"""Advantage actor-critic: the synchronous form of A3C (Mnih et al. 2016, arXiv 1602.01783).

How it acts and what its loss is; `algos/actor_critic.py` has the rest. One gradient step follows each
rollout, so what is learned from is on policy. `algos/a3c.py` is the asynchronous form, with the same loss.

Letters in shapes: `T` steps of a rollout, `B` environments.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fdg
from algos.actor_critic import ActorCritic, Trajectory
from algos.agent import Rollouts
from algos.hyperparameters import NETWORK, hyperparameter, require_within
from algos.layers import PolicyLayers
from algos.losses import weighted_sum
from algos.networks import Network
from algos.normalizing import Normalizers
from algos.optimizers import ClippedOptimizer
from algos.returns import generalized_advantage_estimation
from envs import Environment


@dataclasses.dataclass(frozen=True)
class A2C(ActorCritic):
    """A2C for discrete, multi-discrete and continuous actions.

    Defaults are those of OpenAI's baselines (`baselines/a2c`, Dhariwal et al. 2017), which Stable-Baselines3
    follows.

    Raises:
      FdgError: (construction) a field out of range.

    >>> import envs
    >>> A2C(env=envs.make("CartPole-v1")).steps_per_iteration
    80
    """

    env: Environment
    rollouts = Rollouts(num_envs=16, num_steps=5, total_steps=1_000_000)
    optimizer_settings = ClippedOptimizer(learning_rate=7e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    discount: float = hyperparameter(0.99, "gamma")
    gae_lambda: float = hyperparameter(1.0, "lambda of generalised advantage estimation; 1 as in the paper")
    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check_common()
        require_within(self, 0, 1, "gae_lambda")

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`; its log-probability is not needed."""
        policy, _ = self._policy(parameters, self._seen(statistics, observation))
        return policy.sample(keys), None

    def _loss(self, parameters, trajectory: Trajectory):
        policy, value = self._policy_over_time(parameters, trajectory.observation)
        time_step = trajectory.time_step
        # The longest returns that the rollout allows, as in algorithm S3 of the paper; with lambda below 1,
        # a mean of those and of shorter ones.
        advantage, target = generalized_advantage_estimation(
            time_step.reward,
            jax.lax.stop_gradient(value),
            self._next_value(parameters, value, time_step),
            time_step.terminated,
            time_step.truncated,
            self.discount,
            self.gae_lambda,
        )
        # The gradients of section 4 of the paper ("Asynchronous advantage actor-critic"), with their entropy
        # term; those of the value as in algorithm S3. Means over the rollout, where the paper has sums.
        policy_loss = -jnp.mean(policy.log_prob(trajectory.action) * advantage)
        value_loss = jnp.mean(jnp.square(target - value))
        return weighted_sum(
            policy_loss,
            value_loss,
            jnp.mean(policy.entropy()),
            self.value_coefficient,
            self.entropy_coefficient,
        )
