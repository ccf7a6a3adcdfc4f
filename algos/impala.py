"""IMPALA, importance-weighted actor-learners (Espeholt et al. 2018, arXiv 1802.01561).

Actors record the log-probability of their actions. The learner's policy is newer; V-trace corrects for this
difference with importance weights. The distribution policy's `staleness` is the age of the actors' parameters
in iterations. With `staleness=0` both policies are equal, and V-trace targets are lambda-returns.

Shapes: `T` steps of a rollout, `B` environments.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import fdg
from algos import one_update, optimizers
from algos.agent import Agent, Rollouts
from algos.losses import approximate_kl, value_error, values_after
from algos.on_policy import PolicyLayers, Trajectory
from algos.one_update import WeightedLoss
from algos.returns import v_trace
from algos.values import NETWORK, AnyNetwork, ClippedOptimizer, Discount, Normalizers, Transforming
from envs import Box, Discrete, Environment, MultiDiscrete
from fdg.settings.fields import hyperparameter, require, require_positive, require_within


@dataclasses.dataclass(frozen=True)
class IMPALA(Agent, driver=one_update, presets="IMPALA"):
    """IMPALA for discrete, multi-discrete and continuous actions, one update for each rollout.

    Rollout length, discount, clips, loss weights and RMSProp are those of the paper's Atari experiments. The
    number of environments and the step size were tuned on CartPole-v1.

    >>> import envs
    >>> IMPALA(env=envs.make("CartPole-v1")).steps_per_iteration
    320
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    env: Environment
    rollouts = Rollouts(num_envs=16, num_steps=20, total_steps=1_000_000)
    optimizer_settings = ClippedOptimizer(learning_rate=2e-3, anneal_learning_rate=True, max_grad_norm=40.0)
    discounting = Discount()
    trace_lambda: float = hyperparameter(1.0, "lambda of V-trace")
    rho_clip: float = hyperparameter(1.0, "rho-bar of V-trace: bounds the weight of each step's error")
    c_clip: float = hyperparameter(1.0, "c-bar of V-trace: bounds the traces that carry errors back")
    objective = WeightedLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: AnyNetwork | None = dataclasses.field(default=None, metadata=NETWORK)
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        require_within(self, 0, 1, "trace_lambda")
        require_positive(self, "rho_clip", "c_clip")
        require(
            self,
            self.c_clip <= self.rho_clip,
            f"c_clip={self.c_clip} is above rho_clip={self.rho_clip}: V-trace requires c_clip <= rho_clip",
        )

    _default_optimizer = property(optimizers.rmsprop_of)

    # --- fragments; `step` and `update` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]` and its log-probability `[B]`."""
        policy, _ = self.policy_and_value(parameters, self.normalizers.seen(statistics, observation))
        action = policy.sample(keys)
        return action, policy.log_prob(action)

    def loss(self, parameters: Any, trajectory: Trajectory) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a rollout `[T, B]`, and its terms: scalars."""
        policy, value = one_update.over_time(
            lambda rows: self.policy_and_value(parameters, rows), trajectory.observation
        )
        log_prob = policy.log_prob(trajectory.action)
        log_ratio = jax.lax.stop_gradient(log_prob) - trajectory.decision
        time_step = trajectory.time_step
        fixed_parameters, fixed_value = jax.lax.stop_gradient((parameters, value))
        next_value = values_after(
            fixed_value, time_step, lambda final: self.policy_and_value(fixed_parameters, final)[1]
        )
        # Equation 1 of the paper, and the advantage of section 4.2.
        advantage, target = v_trace(
            jnp.exp(log_ratio), time_step.reward, fixed_value, next_value,
            time_step.terminated, time_step.truncated,
            self.discount, self.trace_lambda, self.rho_clip, self.c_clip,
        )  # fmt: skip
        # The three terms of section 4.2. The paper's code sums losses over the rollout; here they are means.
        policy_loss = -jnp.mean(log_prob * advantage)
        loss, terms = self.objective.of(policy_loss, value_error(value, target), jnp.mean(policy.entropy()))
        # `approx_kl` shows how much the actors' policy differs from the learner's.
        return loss, {**terms, "approx_kl": approximate_kl(log_ratio)}
