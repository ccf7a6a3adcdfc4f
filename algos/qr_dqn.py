"""Quantile-regression DQN (Dabney et al. 2017, arXiv 1710.10044): DQN with the distribution of returns.

The network gives quantiles of each action's return; acting takes their mean, so all of `DQN`, its options
included, stays as it is.

Letters in shapes: `N` samples of a minibatch, `n` actions, `K` quantiles.
"""

import dataclasses

import jax
import jax.numpy as jnp

from algos import networks, outputs
from algos.distributions import allowed_only
from algos.dqn import DQN
from algos.hyperparameters import hyperparameter, require, require_positive
from algos.networks import Network
from algos.replay import Transition
from envs import Discrete, Observation, features_and_mask


@dataclasses.dataclass(frozen=True)
class QRDQN(DQN):
    """QR-DQN for discrete actions, with the fields of `DQN` and two of its own.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> QRDQN(env=envs.make("CartPole-v1")).quantiles
    51
    """

    quantiles: int = hyperparameter(51, "K, of each action's return")
    huber_threshold: float = hyperparameter(1.0, "kappa: error from which on the quantile loss is a line")
    max_error: float | None = hyperparameter(
        None, "not used here: huber_threshold is", structural="nothing here (huber_threshold is what counts)"
    )

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "quantiles", "huber_threshold")
        require(
            self,
            self.max_error is None,
            f"max_error={self.max_error}: quantiles have a loss of their own, bent at huber_threshold",
        )
        require(self, not self.dueling, "dueling=True: quantiles have no head of values and advantages here")

    def check_when_traced(self, state) -> None:
        """Refuses a network that does not give K quantiles for each action."""
        space = self.env.action_space
        assert isinstance(space, Discrete)  # checked when constructed
        features = features_and_mask(state.observation)[0]
        found = jax.eval_shape(self._network.apply, state.learned.parameters, features)
        outputs.action_values(found, space.n * self.quantiles, self.num_envs)

    # --- parts ---

    def _quantiles(self, parameters, observation: Observation) -> jax.Array:
        """Quantiles of every action's return, `[N, n, K]`; `-inf` where it is not allowed."""
        features, action_mask = features_and_mask(observation)
        found = self._network.apply(parameters, features)
        each = found.reshape(*found.shape[:-1], -1, self.quantiles)
        return jax.vmap(lambda values: allowed_only(values, action_mask), in_axes=-1, out_axes=-1)(each)

    def _values(self, parameters, observation: Observation) -> jax.Array:
        """Q of every action `[N, n]`: the mean of its quantiles (equation 1 of the paper's section 3)."""
        return jnp.mean(self._quantiles(parameters, observation), axis=-1)

    def _loss(self, parameters, target_parameters, transition: Transition, weight):
        quantiles = _of_action(self._quantiles(parameters, transition.observation), transition.action)
        target = jax.lax.stop_gradient(self._target(parameters, target_parameters, transition))
        # Equations 9 and 10: every quantile against every target's.
        error = target[None] - quantiles[:, None]  # [K, K', N]
        size = jnp.abs(error)
        kappa = self.huber_threshold
        huber = jnp.where(size <= kappa, 0.5 * jnp.square(error), kappa * (size - 0.5 * kappa)) / kappa
        at = (jnp.arange(self.quantiles) + 0.5) / self.quantiles  # the midpoints of lemma 2
        tilted = jnp.abs(at[:, None, None] - (error < 0)) * huber
        loss = jnp.mean(weight * jnp.sum(jnp.mean(tilted, axis=1), axis=0))
        mean_error = jnp.mean(target, axis=0) - jnp.mean(quantiles, axis=0)
        return loss, (mean_error, {"loss": loss, "value": jnp.mean(quantiles)})

    def _target(self, parameters, target_parameters, transition: Transition) -> jax.Array:
        """What the quantiles should be, `[K, N]`: by those of the best action in the mean (algorithm 1)."""
        following = self._quantiles(target_parameters, transition.next_observation)
        choosing = parameters if self.double else target_parameters
        best = jnp.argmax(self._values(choosing, transition.next_observation), axis=-1)
        return transition.reward[None] + transition.discount[None] * _of_action(following, best)

    @property
    def _network(self) -> Network:
        space = self.env.action_space
        assert isinstance(space, Discrete)
        return self._own("network", "actor") or networks.q_network(
            self.env.observation_space, Discrete(space.n * self.quantiles),
            self.hidden, self.activation, self.dueling, self.layer_norm, self.convolve,
        )  # fmt: skip


def _of_action(quantiles: jax.Array, action: jax.Array) -> jax.Array:
    """Of quantiles `[N, n, K]` those of the actions `[N]`: `[K, N]`."""
    return jax.vmap(networks.of_action, in_axes=(-1, None))(quantiles, action)
