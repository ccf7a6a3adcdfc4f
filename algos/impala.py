"""IMPALA, importance-weighted actor-learners (Espeholt et al. 2018, arXiv 1802.01561).

This file has the actor and the loss; `algos/actor_critic.py` has the rest. Actors record the log-probability
of their actions. The learner's policy is newer by then; V-trace corrects for that by importance weights. How
old the actors' parameters are is a field of the distribution policy (`staleness`). With `staleness=0` the two
policies are equal, and V-trace gives plain returns.

Letters in shapes: `T` steps of a rollout, `B` environments.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fdg
from algos.actor_critic import ActorCritic, Trajectory
from algos.agent import Rollouts
from algos.hyperparameters import NETWORK, hyperparameter, require, require_positive, require_within
from algos.layers import PolicyLayers
from algos.losses import approximate_kl, value_error, weighted_sum
from algos.networks import Network
from algos.normalizing import Normalizers
from algos.optimizers import ClippedOptimizer
from algos.returns import v_trace
from envs import Environment


@dataclasses.dataclass(frozen=True)
class IMPALA(ActorCritic):
    """IMPALA for discrete, multi-discrete and continuous actions, one update for each rollout.

    Unroll length, discount, clips, loss weights and RMSProp are those of the paper's Atari experiments. The
    number of environments and the step size were tuned on CartPole-v1.

    Raises:
      FdgError: (construction) a field out of range.

    >>> import envs
    >>> IMPALA(env=envs.make("CartPole-v1")).steps_per_iteration
    320
    """

    env: Environment
    rollouts = Rollouts(num_envs=16, num_steps=20, total_steps=1_000_000)
    optimizer_settings = ClippedOptimizer(learning_rate=2e-3, anneal_learning_rate=True, max_grad_norm=40.0)
    discount: float = hyperparameter(0.99, "gamma")
    trace_lambda: float = hyperparameter(1.0, "lambda of V-trace")
    rho_clip: float = hyperparameter(1.0, "rho-bar of V-trace: bounds the weight of each step's error")
    c_clip: float = hyperparameter(1.0, "c-bar of V-trace: bounds how far back errors are carried")
    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check_common()
        require_within(self, 0, 1, "trace_lambda")
        require_positive(self, "rho_clip", "c_clip")
        require(
            self,
            self.c_clip <= self.rho_clip,
            f"c_clip={self.c_clip} is above rho_clip={self.rho_clip}: V-trace wants it at most equal",
        )

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]` and its log-probability `[B]`."""
        policy, _ = self._policy(parameters, self._seen(statistics, observation))
        action = policy.sample(keys)
        return action, policy.log_prob(action)

    def _loss(self, parameters, trajectory: Trajectory):
        policy, value = self._policy_over_time(parameters, trajectory.observation)
        log_prob = policy.log_prob(trajectory.action)
        log_ratio = jax.lax.stop_gradient(log_prob) - trajectory.log_prob
        time_step = trajectory.time_step
        # Equation 1 of the paper, and the advantage of section 4.2.
        advantage, target = v_trace(
            jnp.exp(log_ratio),
            time_step.reward,
            jax.lax.stop_gradient(value),
            self._next_value(parameters, value, time_step),
            time_step.terminated,
            time_step.truncated,
            self.discount,
            self.trace_lambda,
            self.rho_clip,
            self.c_clip,
        )
        # The three gradients of section 4.2. Means over the rollout, where the paper's code has sums.
        policy_loss = -jnp.mean(log_prob * advantage)
        loss, parts = weighted_sum(
            policy_loss,
            value_error(value, target),
            jnp.mean(policy.entropy()),
            self.value_coefficient,
            self.entropy_coefficient,
        )
        return loss, {**parts, "approx_kl": approximate_kl(log_ratio)}  # how far the actors are behind
