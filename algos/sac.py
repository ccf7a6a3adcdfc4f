"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), with a learned temperature.

Two critics of observation and action, a squashed Gaussian actor, and a temperature that weighs its entropy
against reward. Equations below are numbered as in the paper. How it acts, stores and draws minibatches is
`algos/off_policy.py`.

Letters in shapes: `N` samples of a minibatch.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import networks, outputs
from algos.distributions import TanhNormal
from algos.hyperparameters import NETWORK, hyperparameter, require_positive
from algos.losses import value_error
from algos.networks import Network
from algos.off_policy import OffPolicy, State
from algos.replay import Transition
from envs import Environment

_LOG_STD_BOUNDS = (-20.0, 2.0)  # as in the authors' code, github.com/rail-berkeley/softlearning


class Parameters(NamedTuple):
    """What gradients are taken by."""

    actor: Any
    critics: Any  # of both
    log_temperature: jax.Array  # [] float32, log alpha


class Learned(NamedTuple):
    """All that an update changes."""

    parameters: Parameters
    target_critics: Any  # follows `parameters.critics` slowly
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class SAC(OffPolicy):
    """SAC for continuous actions within bounds.

    Defaults are those of the paper (table 1), but for four environments that are stepped together and a start
    as in CleanRL (Huang et al. 2022, JMLR 23(274)). An iteration takes `updates_per_step` gradient steps for
    each environment step, however many environments there are. Frozen and hashable; equal values are equal
    algorithms.

    Raises:
      FdgError: (construction) a field out of range, or actions without bounds.

    >>> import envs
    >>> algorithm = SAC(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=2)
    >>> algorithm.updates_per_iteration, algorithm.num_iterations
    (8, 125000)
    """

    keys_a_sample: ClassVar[int] = 2

    env: Environment
    num_envs: int = hyperparameter(4, "environments stepped together")
    num_steps: int = hyperparameter(1, "steps of each environment in one iteration")
    total_steps: int = hyperparameter(1_000_000, "environment steps of the whole run")
    buffer_size: int = hyperparameter(1_000_000, "steps that are kept for replay")
    learning_starts: int = hyperparameter(5_000, "first steps, of random actions, that nothing is learned in")
    batch_size: int = hyperparameter(256, "samples of one gradient step")
    updates_per_step: float = hyperparameter(
        1.0, "gradient steps for each environment step", structural="how often a loop runs"
    )
    learning_rate: float = hyperparameter(3e-4, "Adam's step size, for actor, critics and temperature")
    anneal_learning_rate: bool = hyperparameter(False, "let the step size fall linearly to zero")
    discount: float = hyperparameter(0.99, "gamma")
    target_rate: float = hyperparameter(0.005, "tau: the part of the way that targets go at an update")
    initial_temperature: float = hyperparameter(1.0, "alpha at first: the weight of the entropy")
    target_entropy: float | None = hyperparameter(
        None, "nats that the temperature aims at, of actions in [-1, 1]; None: minus one for each component"
    )
    hidden: tuple[int, ...] | None = hyperparameter((256, 256), "widths of the layers; None: by observation")
    activation: Literal["tanh", "relu", "silu", "gelu", "elu"] = hyperparameter("relu", "of the layers")
    convolve: bool = hyperparameter(True, "convolve images; else flatten them")
    layer_norm: bool = hyperparameter(False, "normalise each layer before its activation")
    # Any (init, apply) pairs in place of the defaults. The actor's results are means and logs of standard
    # deviations, [N, 2 * size]; the critics take observations and actions, and give two values, each [N].
    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    critic_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check_common()
        require_positive(self, "initial_temperature")

    # --- fragments; `act` and `learn` are those of `OffPolicy`, `step` is that of every agent ---

    @fdg.fragment("gradient", in_axes=(None, None, 0, 1), out_axes=None)
    def gradient(self, parameters, target_critics, transition, keys):
        """Gradient of the losses over a minibatch `[N]`, `keys [2, N]`, and what they are made of."""
        return jax.grad(self._loss, has_aux=True)(parameters, target_critics, transition, keys)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, learned):
        """One step of Adam on all parameters; then the targets follow the critics."""
        parameters, optimizer_state = self._one_update(gradient, learned.optimizer_state, learned.parameters)
        # Algorithm 1, its last line.
        target_critics = optax.incremental_update(
            parameters.critics, learned.target_critics, self.target_rate
        )
        return Learned(parameters, target_critics, optimizer_state)

    def check_when_traced(self, state: State) -> None:
        """Refuses networks whose results do not fit the action space."""
        actor = jax.eval_shape(self._actor.apply, state.learned.parameters.actor, state.observation)
        outputs.gaussian(actor, self.env.action_space, self.num_envs)
        super().check_when_traced(state)

    # --- parts ---

    def _begin(self, actor: Any, critics: Any) -> Learned:
        parameters = Parameters(actor, critics, jnp.log(jnp.float32(self.initial_temperature)))
        return Learned(parameters, jax.tree.map(jnp.copy, critics), self._optimizer.init(parameters))

    def _learn_from(self, learned: Learned, transition: Transition, keys: jax.Array) -> tuple[Learned, Any]:
        gradient, losses = self.gradient(learned.parameters, learned.target_critics, transition, keys)
        return self.update(gradient, learned), losses

    def _loss(self, parameters: Parameters, target_critics, transition: Transition, keys):
        """The sum of three losses, each of which has a gradient by its own part of the parameters only.

        One sum and one gradient, so all parts move at once; in algorithm 1 they move one after the other.
        """
        constant = jax.lax.stop_gradient(parameters)
        temperature = jnp.exp(constant.log_temperature)

        # Critics: equation 5, with the targets of equations 2 and 3.
        next_policy = self._policy(constant.actor, transition.next_observation)
        next_drawn = next_policy.sample_with_log_prob(keys[0])
        target = self._target(target_critics, temperature, transition, *next_drawn)
        first, second = self._critics.apply(parameters.critics, transition.observation, transition.action)
        critic_loss = value_error(first, target) + value_error(second, target)

        # Actor: equations 7 and 9, with the lower of both critics (section 6).
        policy = self._policy(parameters.actor, transition.observation)
        action, log_prob = policy.sample_with_log_prob(keys[1])
        value = jnp.minimum(*self._critics.apply(constant.critics, transition.observation, action))
        actor_loss = jnp.mean(temperature * log_prob - value)

        # Temperature: equation 18.
        entropy = -jnp.mean(jax.lax.stop_gradient(log_prob))
        temperature_loss = jnp.exp(parameters.log_temperature) * (entropy - self._target_entropy)

        return critic_loss + actor_loss + temperature_loss, {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(value),
            "entropy": entropy,
            "temperature": temperature,
        }

    def _target(self, target_critics, temperature, transition: Transition, next_action, next_log_prob):
        """What the critics are fitted to, `[N]`: equation 2, and for the value that follows equation 3."""
        lower = jnp.minimum(*self._critics.apply(target_critics, transition.next_observation, next_action))
        # The discount is zero where the episode terminated, and not where it was truncated.
        return transition.reward + transition.discount * (lower - temperature * next_log_prob)

    def _policy(self, actor, observation) -> TanhNormal:
        """Distribution over actions in [-1, 1], for observations `[N, *obs]`."""
        mean, log_std = jnp.split(self._actor.apply(actor, observation), 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, *_LOG_STD_BOUNDS), self.env.action_space.shape)

    @property
    def _target_entropy(self) -> float:
        """Minus one for each component (appendix D), unless told otherwise."""
        if self.target_entropy is not None:
            return self.target_entropy
        return -float(math.prod(self.env.action_space.shape))

    @property
    def _actor(self) -> Network:
        return self._own("actor_network", "actor") or networks.gaussian_actor(
            self.env.observation_space, self.env.action_space,
            self.hidden, self.activation, self.convolve, self.layer_norm,
        )  # fmt: skip

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self._step_size)
