"""Soft actor-critics with an ensemble of critics: `REDQ`, `DroQ` and `TQC`.

Each algorithm is SAC (`algos/sac.py`) with any number of critics; the actor maximises their mean. Actor and
temperature may be updated less often than the critics. Subclasses define the critics' targets.

REDQ is randomized ensembled double Q-learning (Chen, Wang, Zhou and Ross 2021, ICLR, arXiv 2101.05982). It
takes many gradient steps per environment step; a target is the lowest value of a random subset of critics.
DroQ (Hiraoka, Imagawa, Hashimoto, Onishi and Tsuruoka 2022, ICLR, arXiv 2110.02034) has two critics with
dropout and layer normalisation. TQC has truncated quantile critics (Kuznetsov, Shvechikov, Grishin and Vetrov
2020, ICML, arXiv 2005.04269): they output quantiles of the return; targets leave out the largest quantiles.

Shapes: `E` critics, `K` outputs of each, `N` samples of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import fdg
from algos import networks, off_policy, optimizers
from algos.agent import Agent, Rollouts
from algos.checks import check_shape
from algos.distributional import quantile_error
from algos.layers import Trunk, features, with_widths
from algos.off_policy import PolyakTargets
from algos.replaying import ReplayUpdates, Transition
from algos.sac import SAC, Entropy, Parameters
from algos.values import Discount, Layers, Network, OptimizerSettings
from envs import Environment
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require, require_positive
from fdg.settings.parts import Part

# --- ensembles of critics ---


@dataclasses.dataclass(frozen=True)
class PolicyDelay(Part):
    """How much less often the actor is updated than the critics."""

    policy_delay: int = hyperparameter(1, "critic updates per update of the actor and the temperature")


@dataclasses.dataclass(frozen=True)
class Ensemble(Part):
    """The number of critics, and their sizes."""

    num_critics: int = hyperparameter(10, "E, critics of the ensemble")
    critic_hidden: tuple[int, ...] | None = hyperparameter(
        None, "widths of the critics' layers; None: those of the actor"
    )
    critic_layer_norm: bool = hyperparameter(
        False, "layer normalisation in the critics alone; layer_norm applies it in the actor too"
    )
    dropout: float = hyperparameter(
        0.0, "dropout rate of the critics' features in training", structural="whether there is dropout"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses an empty ensemble, and a dropout rate that is outside [0, 1) or has no effect."""
        require_positive(algorithm, "num_critics")
        require(algorithm, 0 <= self.dropout < 1, f"dropout={self.dropout}: it must be from 0 to below 1")
        require(
            algorithm,
            self.dropout == 0 or (algorithm.critic_network is None and algorithm.torso == "dense"),
            f"dropout={self.dropout}: only dense default critics have it: set dropout=0, or leave out"
            " torso='simba' and critic_network",
        )

    def network(self, observation_space: ObservationSpace, layers: Layers, outputs: int = 1) -> Network:
        """The critics: `apply(parameters, observation [N, *obs], action [N, *action], keys [N] or None)`.

        The critics return `[E, N]` float32, or `[E, N, outputs]`; without keys there is no dropout.
        Parameters have a leading axis `E`.
        """
        hidden = layers.hidden if self.critic_hidden is None else self.critic_hidden
        layer_norm = layers.layer_norm or self.critic_layer_norm
        layers = with_widths(
            dataclasses.replace(layers, hidden=hidden, layer_norm=layer_norm), observation_space
        )
        return networks.of_module(Critics(observation_space, layers, self.num_critics, outputs, self.dropout))


class Critics(nn.Module):
    """Independent trunks on the same inputs, mapped over a leading axis of the parameters."""

    observation_space: ObservationSpace
    layers: Layers
    count: int
    outputs: int = 1
    dropout: float = 0.0

    @nn.compact
    def __call__(  # noqa: D102
        self, observation: Any, action: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        inputs = features(observation, self.observation_space, self.layers.convolve)
        fold_in_each = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
        critic_indices = jnp.arange(self.count)
        critic_keys = None if keys is None else fold_in_each(keys, critic_indices)
        trunks = nn.vmap(
            Trunk,
            in_axes=(None, None, 0),
            out_axes=0,
            axis_size=self.count,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        trunk = trunks(self.layers, self.outputs, 1.0, self.dropout, name="critics")
        values = trunk(inputs, action.reshape(action.shape[0], -1), critic_keys)
        return values[..., 0] if self.outputs == 1 else values


# --- soft actor-critics with an ensemble of critics ---


class SplitState(NamedTuple):
    """Optimiser states of the critics and of the actor, which are updated at different times."""

    critics: Any
    actor: Any  # of actor and temperature


def split_update(
    self: Any, gradient: Parameters, learned: Any, is_due: jax.Array
) -> tuple[Parameters, SplitState]:
    """Updates the critics and, if `is_due`, actor and temperature; `self` is a `SoftEnsemble` or CrossQ."""
    parameters, state = learned.parameters, learned.optimizer_state
    critics, critics_state = self._one_update(gradient.critics, state.critics, parameters.critics)
    before = (parameters.actor, parameters.log_temperature), state.actor
    after = self._one_update((gradient.actor, gradient.log_temperature), state.actor, before[0])
    (actor, log_temperature), actor_state = optimizers.update_if(is_due, after, before)
    return Parameters(actor, critics, log_temperature), SplitState(critics_state, actor_state)


class Learned(NamedTuple):
    """All values that an update changes."""

    parameters: Parameters
    target_critics: Any  # moving averages of `parameters.critics`
    optimizer_state: SplitState
    updates: jax.Array  # int32, gradient steps of the critics so far


class Keys(NamedTuple):
    """Random keys of a gradient step, one for each sample: `[N]` each."""

    next_action: jax.Array
    target: jax.Array  # for other random choices of a target, such as a subset of critics
    action: jax.Array
    target_dropout: jax.Array
    critic_dropout: jax.Array
    actor_dropout: jax.Array


@dataclasses.dataclass(frozen=True)
class SoftEnsemble(Agent, driver=off_policy):
    """Base of `REDQ`, `DroQ` and `TQC`.

    A subclass defines `_target` and `_error`, and overrides `_outputs` if a critic has several outputs.
    """

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=1, total_steps=1_000_000)
    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=5_000, updates_per_step=1.0
    )
    optimizer_settings = OptimizerSettings(learning_rate=3e-4)
    discounting = Discount()
    entropy = Entropy()
    ensemble = Ensemble()
    layers = Layers(hidden=(256, 256), activation="relu")
    targets = PolyakTargets()
    delay = PolicyDelay()

    _keys_per_sample = len(Keys._fields)  # keys per sample of a gradient step

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("gradient", in_axes=(None, None, None, 0, 1), out_axes=(None, 0, None))
    def gradient(self, parameters, target_critics, is_due, transition, keys):
        """Gradients over a minibatch `[N]` with `keys [6, N]`; the actor's are zero unless `is_due`."""
        keys = Keys(*keys)
        critics, losses = jax.grad(self._critic_loss, has_aux=True)(
            parameters.critics, parameters, target_critics, transition, keys
        )
        actor, log_temperature = jax.lax.cond(
            is_due,
            lambda x: jax.grad(self._actor_loss)(x, parameters.critics, transition, keys),
            lambda x: jax.tree.map(jnp.zeros_like, x),
            (parameters.actor, parameters.log_temperature),
        )
        gradient = Parameters(actor, critics, log_temperature)
        return gradient, *off_policy.split_off_error(self, losses)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, learned, is_due):
        """One step of Adam, and of the target critics; actor and temperature change only if `is_due`."""
        parameters, state = split_update(self, gradient, learned, is_due)
        critics = optax.incremental_update(parameters.critics, learned.target_critics, self.target_rate)
        return Learned(parameters, critics, state, learned.updates + 1)

    def _target(self, transition: Transition, next_values, entropy_term, keys) -> Any:
        """The regression target of the critics, leading axis `N`.

        `next_values [E, N]` or `[E, N, K]` are the target critics' outputs for the next action;
        `entropy_term [N]` is the temperature times the log-probability of that action; `transition` and
        `keys` are `[N]`.
        """
        raise NotImplementedError

    def _error(self, values: jax.Array, target: Any) -> jax.Array:
        """Errors of the critics' outputs `[E, N]` or `[E, N, K]`, summed over critics: `[N]`."""
        raise NotImplementedError

    @property
    def _outputs(self) -> int:
        """K, the outputs of each critic."""
        return 1

    def _init_learned(self, actor_key, critics_key, observation, action) -> Learned:
        critics = self._critics.init(critics_key, observation, action)
        actor, log_temperature = self._actor.init(actor_key, observation), self.entropy.begin()
        states = SplitState(self._optimizer.init(critics), self._optimizer.init((actor, log_temperature)))
        parameters = Parameters(actor, critics, log_temperature)
        return Learned(parameters, jax.tree.map(jnp.copy, critics), states, jnp.int32(0))

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, Any, Any]:
        is_due = (learned.updates + 1) % self.policy_delay == 0
        gradient, error, losses = self.gradient(
            learned.parameters, learned.target_critics, is_due, transition, keys
        )
        return self.update(gradient, learned, is_due), error, losses

    def _critic_loss(self, critics, parameters: Parameters, target_critics, transition, keys: Keys):
        temperature = jnp.exp(parameters.log_temperature)
        next_policy = self._policy(parameters.actor, transition.next_observation)
        next_action, next_log_prob = next_policy.sample_with_log_prob(keys.next_action)
        next_values = self._values(
            target_critics, transition.next_observation, next_action, keys.target_dropout
        )
        target = self._target(transition, next_values, temperature * next_log_prob, keys.target)
        values = self._values(critics, transition.observation, transition.action, keys.critic_dropout)
        target, weight = jax.lax.stop_gradient(target), transition.weight
        error = self._error(values, target)
        loss = jnp.mean(error if weight is None else weight * error)
        return loss, {
            **({} if weight is None else {"error": _absolute_errors(values, target)}),
            "critic_loss": loss,
            "value": jnp.mean(values),
            "entropy": -jnp.mean(next_log_prob),
            "temperature": temperature,
        }

    def _actor_loss(self, actor_and_temperature, critics, transition: Transition, keys: Keys) -> jax.Array:
        """The sum of the temperature's loss and the actor's, which maximises the mean of all critics."""
        actor, log_temperature = actor_and_temperature
        action, log_prob = self._policy(actor, transition.observation).sample_with_log_prob(keys.action)
        values = self._values(critics, transition.observation, action, keys.actor_dropout)
        value = jnp.mean(values, axis=0) if values.ndim == 2 else jnp.mean(values, axis=(0, 2))
        actor_loss, temperature_loss, _ = self.entropy.losses(
            log_temperature, log_prob, value, self.env.action_space.shape
        )
        return actor_loss + temperature_loss

    def _values(self, critics, observation, action, keys: jax.Array) -> jax.Array:
        dropout_keys = (keys,) if self.dropout else ()
        return self._critics.apply(critics, observation, action, *dropout_keys)

    _policy = SAC._policy

    def _check_critics(self, output: Any) -> None:
        outputs, shape = self._outputs, (self.num_critics, self.num_envs)
        last_axis, what = ((), "value") if outputs == 1 else ((outputs,), f"{outputs} numbers")
        why = f"{what} of each of num_critics={self.num_critics} critics for each sample"
        check_shape("critic_network gives", output, (*shape, *last_axis), why)

    @property
    def _critics(self) -> Network:
        default = self.ensemble.network(self.env.observation_space, self.layers, self._outputs)
        return networks.with_precision(
            self, networks.user_network(self, "critic_network", "critic") or default
        )


def _absolute_errors(values: jax.Array, target: jax.Array) -> jax.Array:
    """Absolute errors of the critics' values (means over their quantiles), averaged over critics: `[N]`."""
    count = len(target)
    value = jnp.mean(values.reshape(len(values), count, -1), axis=2)
    return jnp.mean(jnp.abs(value - jnp.mean(target.reshape(1, count, -1), axis=2)), axis=0)


@dataclasses.dataclass(frozen=True)
class REDQ(SoftEnsemble, presets="REDQ"):
    """REDQ for continuous actions within bounds.

    Defaults are those of the paper, except that four environments run in parallel: 10 critics, of which a
    target uses 2; 20 gradient steps of the critics per environment step, and one of the actor after each 20.

    >>> import envs
    >>> REDQ(env=envs.make("Pendulum-v1"), num_envs=1).updates_per_iteration
    20
    """

    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=5_000, updates_per_step=20.0
    )
    ensemble = Ensemble(num_critics=10)
    subset: int = hyperparameter(2, "M, random critics whose lowest value is the target")
    delay = PolicyDelay(policy_delay=20)

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "subset")
        require(
            self,
            self.subset <= self.num_critics,
            f"subset={self.subset} is more than num_critics={self.num_critics}: choose at most as many",
        )

    def _target(self, transition: Transition, next_values, entropy_term, keys) -> jax.Array:
        """Algorithm 1: `[N]`, from the lowest value of `M` critics, drawn separately for each sample.

        The paper draws one subset for each minibatch; the expectation of the gradient is the same.
        """
        if self.subset < len(next_values):
            draws = jax.vmap(lambda key: jax.random.uniform(key, next_values.shape[:1]), out_axes=1)(keys)
            in_subset = draws <= jnp.sort(draws, axis=0)[self.subset - 1][None]
            next_values = jnp.where(in_subset, next_values, jnp.inf)
        return transition.reward + transition.discount * (jnp.min(next_values, axis=0) - entropy_term)

    def _error(self, values, target) -> jax.Array:
        return 0.5 * jnp.sum(jnp.square(values - target[None]), axis=0)


@dataclasses.dataclass(frozen=True)
class DroQ(REDQ, presets="DroQ"):
    """DroQ for continuous actions within bounds.

    Defaults are those of the paper, except that four environments run in parallel. In a critic, each hidden
    layer is dense, with dropout at a rate of 0.01, layer normalisation and ReLU; target critics have dropout
    too. There are 20 gradient steps per environment step.
    """

    ensemble = Ensemble(num_critics=2, critic_layer_norm=True, dropout=0.01)


@dataclasses.dataclass(frozen=True)
class TQC(SoftEnsemble, presets="TQC"):
    """TQC for continuous actions within bounds.

    Defaults are those of the paper, except that four environments run in parallel: five critics, each with
    three layers of 512 units and 25 quantiles, of which targets leave out two.
    """

    ensemble = Ensemble(num_critics=5, critic_hidden=(512, 512, 512))
    quantiles: int = hyperparameter(25, "K, quantiles of each critic")
    dropped_quantiles: int = hyperparameter(2, "d: largest target quantiles to drop, per critic")
    huber_threshold: float = hyperparameter(1.0, "kappa: error above which the quantile Huber loss is linear")

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "quantiles", "huber_threshold")
        require(
            self,
            0 <= self.dropped_quantiles < self.quantiles,
            f"dropped_quantiles={self.dropped_quantiles}: it is from 0 to below quantiles={self.quantiles}",
        )

    def _target(self, transition: Transition, next_values, entropy_term, keys) -> jax.Array:
        """Algorithm 1: `[N, K']`, the `K' = E * (K - d)` smallest quantiles of all critics."""
        count = len(next_values) * (self.quantiles - self.dropped_quantiles)
        smallest = jnp.sort(next_values.swapaxes(0, 1).reshape(next_values.shape[1], -1), axis=-1)[:, :count]
        return transition.reward[:, None] + transition.discount[:, None] * (smallest - entropy_term[:, None])

    def _error(self, values, target) -> jax.Array:
        error = jax.vmap(lambda quantiles: quantile_error(quantiles, target, self.huber_threshold))
        return jnp.sum(error(values), axis=0) / self.quantiles

    @property
    def _outputs(self) -> int:
        return self.quantiles
