"""CrossQ (Bhatt, Palenicek, Belousov, Argus, Amiranashvili, Brox and Peters 2024, ICLR, arXiv 1902.05605).

Soft actor-critic without target networks, with batch renormalisation. A minibatch of the critics contains
the pairs (observation, action) and the next pairs, so that both are normalised by the same statistics; this
prevents divergence. The actor and the temperature are those of SAC, updated less often.

Shapes: `N` samples of a minibatch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import fdg
from algos import networks, off_policy, optimizers
from algos.agent import Agent, Rollouts
from algos.layers import head, hidden_layers, with_widths
from algos.networks import GaussianActor, TwinCritics
from algos.off_policy import ReturnGrid
from algos.redq import PolicyDelay, SplitState, split_update
from algos.replaying import ReplayUpdates, Transition
from algos.sac import SAC, Entropy, Parameters, squashed
from algos.values import Discount, Layers, Network, OptimizerSettings
from envs import Environment, Observation
from fdg.errors import FdgError
from fdg.settings.fields import hyperparameter, require, require_not_negative, require_within

# --- networks with batch renormalisation (Ioffe 2017, arXiv 1702.03275) ---

_EPSILON = 1e-3  # added to variances
_LARGEST_RATIO, _LARGEST_SHIFT = 3.0, 5.0  # r_max and d_max of the paper, section 4.1


class NormedNetwork(NamedTuple):
    """A network with running statistics, as two pure functions.

    `init(key, *inputs) -> (parameters, statistics)`; only shapes and dtypes of the inputs are used.
    `apply(parameters, statistics, *inputs, in_training, renormalize) -> (output, statistics)`: in training,
    a minibatch of inputs is normalised by its own statistics, and updates the running statistics.
    `renormalize` (bool, may be traced) corrects the normalisation towards the running statistics.
    """

    init: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]


def without_statistics(network: Network) -> NormedNetwork:
    """Wraps a network without normalisation; its statistics are empty."""

    def init(key: jax.Array, *inputs: Any) -> tuple[Any, Any]:
        return network.init(key, *inputs), ()

    def apply(parameters: Any, statistics: Any, *inputs: Any, **_: Any) -> tuple[Any, Any]:
        return network.apply(parameters, *inputs), statistics

    return NormedNetwork(init, apply)


class BatchRenorm(nn.Module):
    """Batch renormalisation of features: `[N, F]` to `[N, F]` (algorithm 1 of the paper).

    The running mean and variance (`batch_stats`) move `1 - decay` of the way to those of a minibatch.
    """

    @nn.compact
    def __call__(  # noqa: D102
        self, x: jax.Array, in_training: bool, renormalize: bool | jax.Array, decay: float | jax.Array
    ) -> jax.Array:
        shape = x.shape[-1:]
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        running_mean, running_std = mean.value, jnp.sqrt(var.value + _EPSILON)
        if in_training:
            batch_mean = jnp.mean(x, axis=0)
            batch_var = jnp.mean(jnp.square(x - batch_mean[None]), axis=0)
            batch_std = jnp.sqrt(batch_var + _EPSILON)
            # r and d of the paper, without gradients. With r = 1 and d = 0 this is batch normalisation.
            ratio = jnp.clip(batch_std / running_std, 1.0 / _LARGEST_RATIO, _LARGEST_RATIO)
            shift = jnp.clip((batch_mean - running_mean) / running_std, -_LARGEST_SHIFT, _LARGEST_SHIFT)
            ratio = jax.lax.stop_gradient(jnp.where(renormalize, ratio, 1.0))
            shift = jax.lax.stop_gradient(jnp.where(renormalize, shift, 0.0))
            normalized = (x - batch_mean[None]) / batch_std[None] * ratio[None] + shift[None]
            mean.value = jax.lax.stop_gradient(decay * mean.value + (1.0 - decay) * batch_mean)
            var.value = jax.lax.stop_gradient(decay * var.value + (1.0 - decay) * batch_var)
        else:
            normalized = (x - running_mean[None]) / running_std[None]
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return normalized * scale[None] + bias[None]


class _RenormMode(NamedTuple):
    """The arguments of `BatchRenorm` after `x`: see there, and `NormedNetwork`."""

    in_training: bool
    renormalize: bool | jax.Array
    decay: float | jax.Array


class _NormedTrunk(nn.Module):
    """`algos.layers.Trunk`, with batch renormalisation of the inputs of each layer."""

    layers: Layers
    outputs: int
    head_scale: float

    @nn.compact
    def __call__(self, inputs: Any, extra_inputs: jax.Array | None = None, *, mode: _RenormMode) -> jax.Array:
        if self.layers.torso != "dense":
            raise FdgError(
                f"torso='{self.layers.torso}': CrossQ normalises dense layers only: set torso='dense'"
            )
        x = BatchRenorm()(hidden_layers(inputs, self.layers, (), extra_inputs), *mode)
        for width in self.layers.hidden or ():
            x = BatchRenorm()(hidden_layers(x, self.layers, (width,)), *mode)
        return head(x, self.outputs, self.head_scale)


def _normed_network(module: nn.Module, decay: float | jax.Array) -> NormedNetwork:
    """Wraps a module with batch renormalisation; `decay` is that of its running statistics."""

    def init(key: jax.Array, *inputs: Any) -> tuple[Any, Any]:
        variables = module.init(key, *inputs, mode=_RenormMode(False, False, decay))
        return variables["params"], variables["batch_stats"]

    def apply(
        parameters: Any, statistics: Any, *inputs: Any, in_training: bool, renormalize: bool | jax.Array
    ) -> tuple[Any, Any]:
        variables = {"params": parameters, "batch_stats": statistics}
        mode = _RenormMode(in_training, renormalize, decay)
        output, new_variables = module.apply(variables, *inputs, mode=mode, mutable=["batch_stats"])
        return output, new_variables["batch_stats"]

    return NormedNetwork(init, apply)


class Statistics(NamedTuple):
    """Running means and variances of the networks."""

    actor: Any
    critics: Any  # of both critics


class Learned(NamedTuple):
    """All that an update changes."""

    parameters: Parameters
    statistics: Statistics
    optimizer_state: SplitState
    updates: jax.Array  # int32, gradient steps of the critics so far


@dataclasses.dataclass(frozen=True)
class CrossQ(Agent, driver=off_policy, presets="CrossQ"):
    """CrossQ for continuous actions within bounds.

    Defaults are those of the paper's table of hyperparameters, except that critics have half the width, as in
    Stable-Baselines3's sbx, and that four environments run in parallel.

    >>> import envs
    >>> CrossQ(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=2).updates_per_iteration
    8
    """

    env: Environment
    rollouts = Rollouts(num_envs=4, num_steps=1, total_steps=1_000_000)
    replaying = ReplayUpdates(
        buffer_size=1_000_000, batch_size=256, learning_starts=5_000, updates_per_step=1.0
    )
    optimizer_settings = OptimizerSettings(learning_rate=1e-3)
    discounting = Discount()
    entropy = Entropy()
    grid = ReturnGrid()
    layers = Layers(hidden=(256, 256), activation="relu")
    first_moment_decay: float = hyperparameter(
        0.5, "Adam's beta_1: low, since there are no slow target networks"
    )
    delay = PolicyDelay(policy_delay=3)
    critic_hidden: tuple[int, ...] | None = hyperparameter(
        (1024, 1024), "widths of the critics' layers; None: chosen by observation"
    )
    norm_decay: float = hyperparameter(
        0.99, "momentum of the running statistics of batch renormalization, per update"
    )
    renorm_after: int = hyperparameter(
        100_000, "updates before batch renormalization uses the running statistics"
    )

    def __post_init__(self):
        self._check()
        require_within(self, 0, 1, "first_moment_decay", "norm_decay")
        require(self, self.first_moment_decay < 1, "first_moment_decay=1: it must be below one")
        require_not_negative(self, "renorm_after")

    _keys_per_sample = 2  # in a gradient step

    # --- fragments; `step` and `observe` are inherited from `Agent` ---

    @fdg.fragment("gradient", in_axes=(None, None, None, None, 0, 1), out_axes=(None, None, 0, None))
    def gradient(self, parameters, statistics, is_due, renormalize, transition, keys):
        """Gradients over a minibatch `[N]` with `keys [2, N]`; the actor's are zero unless `is_due`.

        Also returns the updated statistics, and the terms of the loss.
        """
        critics, (critics_statistics, losses) = jax.grad(self._critic_loss, has_aux=True)(
            parameters.critics, parameters, statistics, renormalize, transition, keys[0]
        )

        def actor_gradient(trained):
            return jax.grad(self._actor_loss, has_aux=True)(
                trained, parameters.critics, statistics, renormalize, transition.observation, keys[1]
            )

        def zero_gradient(trained):
            return jax.tree.map(jnp.zeros_like, trained), statistics.actor

        trained = (parameters.actor, parameters.log_temperature)
        (actor, log_temperature), actor_statistics = jax.lax.cond(
            is_due, actor_gradient, zero_gradient, trained
        )
        gradient = Parameters(actor, critics, log_temperature)
        statistics = Statistics(actor_statistics, critics_statistics)
        return gradient, statistics, losses.pop("error", None), losses

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, statistics, learned, is_due):
        """One step of Adam; actor and temperature change only if `is_due`."""
        parameters, state = split_update(self, gradient, learned, is_due)
        return Learned(parameters, statistics, state, learned.updates + 1)

    def _init_learned(self, actor_key, critics_key, observation, action) -> Learned:
        actor, actor_statistics = self._normed_actor.init(actor_key, observation)
        critics, critics_statistics = self._normed_critics.init(critics_key, observation, action)
        log_temperature = self.entropy.begin()
        init = self._optimizer.init
        return Learned(
            Parameters(actor, critics, log_temperature),
            Statistics(actor_statistics, critics_statistics),
            SplitState(init(critics), init((actor, log_temperature))),
            jnp.int32(0),
        )

    def _acting_parameters(self, learned: Learned) -> tuple[Any, Any]:
        return learned.parameters.actor, learned.statistics.actor

    def _learn_from(self, learned: Learned, transition: Transition, keys) -> tuple[Learned, Any, Any]:
        is_due = (learned.updates + 1) % self.policy_delay == 0
        renormalize = learned.updates >= self.renorm_after
        gradient, statistics, error, losses = self.gradient(
            learned.parameters, learned.statistics, is_due, renormalize, transition, keys
        )
        return self.update(gradient, statistics, learned, is_due), error, losses

    def _critic_loss(
        self, critics, parameters: Parameters, statistics: Statistics, renormalize, transition, keys
    ):
        """The loss of both critics; also their next statistics, with errors and metrics."""
        temperature = jnp.exp(parameters.log_temperature)
        next_policy = self._policy((parameters.actor, statistics.actor), transition.next_observation)
        next_action, next_log_prob = next_policy.sample_with_log_prob(keys)
        values, next_statistics = self._normed_critics.apply(
            critics,
            statistics.critics,
            jax.tree.map(_interleave, transition.observation, transition.next_observation),
            _interleave(transition.action, next_action),
            in_training=True,
            renormalize=renormalize,
        )
        (first, next_first), (second, next_second) = map(_deinterleave, values)
        target = self.grid.critic_kind.target(
            transition.reward, transition.discount, next_first, next_second, temperature * next_log_prob
        )
        loss, error = self.grid.critic_kind.errors(
            (first, second), jax.lax.stop_gradient(target), transition.weight
        )
        return loss, (next_statistics, {
            **error,
            "critic_loss": loss,
            "value": jnp.mean(self.grid.critic_kind.lower((first, second))),
            "entropy": -jnp.mean(next_log_prob),
            "temperature": temperature,
        })  # fmt: skip

    def _actor_loss(self, trained, critics, statistics: Statistics, renormalize, observation, keys):
        """The losses of actor and temperature, and the actor's next statistics."""
        # Here the critics normalise by their running statistics, as they do outside of training.
        actor, log_temperature = trained
        output, next_statistics = self._normed_actor.apply(
            actor, statistics.actor, observation, in_training=True, renormalize=renormalize
        )
        action, log_prob = squashed(output, self.env.action_space.shape).sample_with_log_prob(keys)
        value = self.grid.critic_kind.lower(self._values(critics, statistics.critics, observation, action))
        actor_loss, temperature_loss, _ = self.entropy.losses(
            log_temperature, log_prob, value, self.env.action_space.shape
        )
        return actor_loss + temperature_loss, next_statistics

    _policy = SAC._policy

    def _actor_output(self, actor: Any, observation: Observation) -> jax.Array:
        """The actor's output, normalised by its running statistics: `[N, 2 * D]`."""
        output, _ = self._normed_actor.apply(*actor, observation, in_training=False, renormalize=False)
        return output

    def _critic_output(self, learned: Learned, observation: Observation, action: jax.Array) -> Any:
        return self._values(learned.parameters.critics, learned.statistics.critics, observation, action)

    def _values(self, critics, statistics, observation, action):
        values, _ = self._normed_critics.apply(
            critics, statistics, observation, action, in_training=False, renormalize=False
        )
        return values

    @property
    def _normed_actor(self) -> NormedNetwork:
        network, space = networks.user_network(self, "actor_network", "actor"), self.env.observation_space
        size, layers = math.prod(self.env.action_space.shape), with_widths(self.layers, space)
        module = GaussianActor(space, 2 * size, layers, _NormedTrunk)
        return self._with_statistics(network, module)

    @property
    def _normed_critics(self) -> NormedNetwork:
        network, space = networks.user_network(self, "critic_network", "critic"), self.env.observation_space
        layers = with_widths(dataclasses.replace(self.layers, hidden=self.critic_hidden), space)
        module = TwinCritics(space, layers, self.grid.critic_kind.outputs, _NormedTrunk)
        return self._with_statistics(network, module)

    def _with_statistics(self, network: Network | None, default: nn.Module) -> NormedNetwork:
        with_statistics = (
            without_statistics(network) if network else _normed_network(default, self.norm_decay)
        )
        return networks.with_precision(self, with_statistics)

    @property
    def _default_optimizer(self) -> optax.GradientTransformation:
        return optax.adam(optimizers.step_size_of(self), b1=self.first_moment_decay)


def _interleave(first: jax.Array, second: jax.Array) -> jax.Array:
    """Interleaves two minibatches `[N, ...]` into one, `[2 * N, ...]`.

    Interleaving keeps a sharding of the samples; concatenation would move samples between devices.
    """
    return jnp.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def _deinterleave(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undoes `_interleave`: `[2 * N, ...]` into two minibatches `[N, ...]`."""
    pairs = values.reshape(-1, 2, *values.shape[1:])
    return pairs[:, 0], pairs[:, 1]
