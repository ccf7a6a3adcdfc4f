"""What PPO and its relatives share, whatever their network remembers: hyperparameters, loss, epochs.

Acting, and cutting a rollout into minibatches, are in the algorithms' files: in `algos/ppo.py` a sample is
a step, in `algos/recurrent_ppo.py` a sequence. The multi-agent variants (`IPPO`, `MAPPO`) are the latter
with an agent axis: `algos/multi_agent_ppo.py`.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import optax

import fdg
from algos import optimizers
from algos.agent import Rollouts
from algos.distributions import Distribution
from algos.hyperparameters import hyperparameter, require, require_positive, require_within
from algos.layers import PolicyLayers
from algos.losses import proximal_loss
from algos.minibatches import own_blocks, shuffled_rows, take, take_of_every_env, updated
from algos.normalizing import NormalizedAgent, Normalizers
from algos.optimizers import ClippedOptimizer
from algos.returns import generalized_advantage_estimation
from envs import Box, Discrete, Environment, MultiDiscrete, TimeStep


class Decision(NamedTuple):
    """What the actor knew when it acted."""

    log_prob: jax.Array  # [...] float32, of the action taken
    value: jax.Array  # [...] float32, V(observation)


@dataclasses.dataclass(frozen=True)
class ProximalAgent(NormalizedAgent):
    """Base of `PPO` and `RecurrentPPO`: all but the network and what it remembers.

    Defaults are those of CleanRL's `ppo.py` (Huang et al. 2022, JMLR 23(274)). A subclass adds the field
    `network`, `init`, `iterate`, `actor`, the fragments `act` and `learn`, and `_predict`. A minibatch is
    any tuple with the fields `action`, `decision`, `advantage` and `target`.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=128, total_steps=500_000)
    num_epochs: int = hyperparameter(4, "passes over each rollout")
    num_minibatches: int = hyperparameter(4, "gradient steps in one pass")
    shuffle: Literal["each", "all", "time"] = hyperparameter(
        "each",
        "how an epoch shuffles; each: within each environment; all: all samples together (devices exchange"
        " them); time: time steps, in the same order for every environment",
    )
    optimizer_settings = ClippedOptimizer(learning_rate=2.5e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    discount: float = hyperparameter(0.99, "gamma")
    gae_lambda: float = hyperparameter(0.95, "lambda of generalised advantage estimation")
    clip_ratio: float = hyperparameter(
        0.2, "epsilon: the probability ratio is clipped to [1 - epsilon, 1 + epsilon]"
    )
    clip_value: bool = hyperparameter(True, "clip the change of the value by the same epsilon")
    normalize_advantage: bool = hyperparameter(
        True, "normalise advantages to zero mean and unit variance in each minibatch"
    )
    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")
    normalizers = Normalizers()
    layers = PolicyLayers()

    def __post_init__(self):
        self._check_common()
        require_positive(self, "num_epochs", "num_minibatches", "clip_ratio", "max_grad_norm")
        require_within(self, 0, 1, "gae_lambda")
        require(
            self,
            self.shuffle in ("each", "all", "time"),
            f"shuffle={self.shuffle!r}: it must be 'each', 'all' or 'time'",
        )
        shuffled, what = self._shuffled
        require(
            self,
            shuffled % self.num_minibatches == 0,
            f"num_minibatches={self.num_minibatches} does not divide {what}={shuffled}: choose a divisor",
        )

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        return self.num_epochs * self.num_minibatches

    # --- fragments; `step` and `update` are those of every agent ---

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Gradient of the loss over a minibatch `[N]`, and what the loss is made of."""
        return jax.grad(self._loss, has_aux=True)(parameters, minibatch)

    # --- parts ---

    def _predict(self, parameters: Any, minibatch: Any) -> tuple[Distribution, jax.Array]:
        """Distribution over actions, and value, of each sample."""
        raise NotImplementedError

    def _loss(self, parameters: Any, minibatch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a minibatch, and its parts (`algos.losses.proximal_loss`)."""
        policy, value = self._predict(parameters, minibatch)
        return proximal_loss(
            policy,
            value,
            minibatch.action,
            minibatch.decision.log_prob,
            minibatch.decision.value,
            minibatch.advantage,
            minibatch.target,
            clip_ratio=self.clip_ratio,
            clip_value=self.clip_value,
            normalize_advantage=self.normalize_advantage,
            value_coefficient=self.value_coefficient,
            entropy_coefficient=self.entropy_coefficient,
        )

    def _advantage(self, reward, value, next_value, time_step: TimeStep):
        """Advantage and value target, both `[T, B]`; a truncation is followed by its observation's value."""
        return generalized_advantage_estimation(
            reward, value, next_value, time_step.terminated, time_step.truncated,
            self.discount, self.gae_lambda,
        )  # fmt: skip

    def _updated(self, parameters, optimizer_state, samples, key):
        """Parameters and optimiser state after all epochs, and the mean losses."""
        blocks, per_env = 1, self._samples_per_env
        if self.shuffle == "each":
            blocks = own_blocks(self.num_envs, per_env, self.num_minibatches)
        count = per_env if self.shuffle == "time" else self.num_envs * per_env // blocks
        rows = shuffled_rows(key, count, self.num_epochs, self.num_minibatches, blocks)
        return updated(
            self.gradient,
            self.update,
            parameters,
            optimizer_state,
            rows,
            lambda some: self._take(samples, some),
        )

    def _take(self, samples, rows):
        """The minibatch of some rows; of time steps, those of every environment."""
        if self.shuffle == "time":
            return take_of_every_env(samples, rows, self.num_envs)
        return take(samples, rows)

    @property
    def _samples_per_env(self) -> int:
        """Samples that a rollout of one environment makes."""
        return self.num_steps

    @property
    def _shuffled(self) -> tuple[int, str]:
        """How many samples minibatches are made of, and what makes that number."""
        if self.shuffle == "time":
            return self._samples_per_env, "num_steps"
        return self.num_envs * self._samples_per_env, "num_envs * num_steps"

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optimizers.clipped_adam(self._step_size, self.max_grad_norm)
