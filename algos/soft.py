"""What soft actor-critics share: an actor that is paid for its entropy, and the temperature that weighs it.

Haarnoja et al. 2018 (arXiv 1812.05905), by whose numbers equations go here. How critics are fitted is said in
`algos/sac.py`; how they act, store and draw minibatches, in `algos/off_policy.py`.

Letters in shapes: `N` samples of a minibatch.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from algos import networks, outputs
from algos.agent import Rollouts
from algos.critic_readings import ReturnGrid
from algos.distributions import TanhNormal
from algos.hyperparameters import NETWORK, hyperparameter, require_positive
from algos.layers import Layers
from algos.networks import Network
from algos.normalize import ObservationNormalizer
from algos.off_policy import OffPolicy, State
from algos.optimizers import OptimizerSettings
from algos.replay import ReplayUpdates
from envs import Environment

_LOG_STD_BOUNDS = (-20.0, 2.0)  # as in the authors' code, github.com/rail-berkeley/softlearning


class Parameters(NamedTuple):
    """What gradients are taken by."""

    actor: Any
    critics: Any  # of both
    log_temperature: jax.Array  # [] float32, log alpha


@dataclasses.dataclass(frozen=True)
class SoftActorCritic(OffPolicy):
    """Base of soft actor-critics for continuous actions within bounds.

    Defaults are those of the paper (table 1), but for four environments that are stepped together and a start
    as in CleanRL (Huang et al. 2022, JMLR 23(274)). An iteration takes `updates_per_step` gradient steps for
    each environment step, however many environments there are.
    """

    keys_a_sample: ClassVar[int] = 2

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=1, total_steps=1_000_000)
    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=5_000, updates_per_step=1.0
    )
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discount: float = hyperparameter(0.99, "gamma")
    initial_temperature: float = hyperparameter(1.0, "alpha at first: the weight of the entropy")
    target_entropy: float | None = hyperparameter(
        None, "nats that the temperature aims at, of actions in [-1, 1]; None: minus one for each component"
    )
    grid = ReturnGrid()
    normalizers = ObservationNormalizer()
    layers = Layers(hidden=(256, 256), activation="relu")
    # Any (init, apply) pairs in place of the defaults. The actor's results are means and logs of standard
    # deviations, [N, 2 * size]; the critics take observations and actions, and give two values, each [N].
    actor_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)
    critic_network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check()
        require_positive(self, "initial_temperature")

    def check_when_traced(self, state: State) -> None:
        """Refuses networks whose results do not fit the action space."""
        actor = jax.eval_shape(self._of_actor, self._acting(state.learned), state.observation)
        outputs.gaussian(actor, self.env.action_space, self.num_envs)
        super().check_when_traced(state)

    # --- parts ---

    def _policy(self, actor, observation) -> TanhNormal:
        """Distribution over actions in [-1, 1], for observations `[N, *obs]`."""
        return self._squashed(self._of_actor(actor, observation))

    def _of_actor(self, actor, observation) -> jax.Array:
        """What the actor's network gives: `[N, 2 * D]`."""
        return self._actor.apply(actor, observation)

    def _squashed(self, output: jax.Array) -> TanhNormal:
        """What the actor's network gives, `[N, 2 * D]`, as a distribution."""
        mean, log_std = jnp.split(output, 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, *_LOG_STD_BOUNDS), self.env.action_space.shape)

    def _target(self, transition, temperature, following, next_log_prob) -> jax.Array:
        """What the critics are fitted to: equation 2, and for the value that follows equation 3.

        `following` is what both critics give for the action that follows; the lower counts (section 6).
        """
        # The discount is zero where the episode terminated, and not where it was truncated.
        (first, second), cost = following, temperature * next_log_prob
        target = self._reading.target(transition.reward, transition.discount, first, second, cost)
        return jax.lax.stop_gradient(target)

    def _soft_losses(self, log_temperature, log_prob, value) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """The losses of the actor and of the temperature, and what is told of them.

        Each has a gradient by its own part of the parameters only: the temperature is a constant to the
        actor, and the actor's actions are constants to it.
        """
        temperature = jnp.exp(jax.lax.stop_gradient(log_temperature))
        actor_loss = jnp.mean(temperature * log_prob - value)  # equations 7 and 9
        entropy = -jnp.mean(jax.lax.stop_gradient(log_prob))
        temperature_loss = jnp.exp(log_temperature) * (entropy - self._target_entropy)  # equation 18
        told = {
            "actor_loss": actor_loss,
            "value": jnp.mean(value),
            "entropy": entropy,
            "temperature": temperature,
        }
        return actor_loss, temperature_loss, told

    @property
    def _target_entropy(self) -> float:
        """Minus one for each component (appendix D), unless told otherwise."""
        if self.target_entropy is not None:
            return self.target_entropy
        return -float(math.prod(self.env.action_space.shape))

    @property
    def _actor(self) -> Network:
        return self._computing(self._own("actor_network", "actor") or networks.gaussian_actor(
            self.env.observation_space, self.env.action_space,
            **vars(self.layers),
        ))  # fmt: skip
