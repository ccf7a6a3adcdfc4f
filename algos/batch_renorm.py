"""Networks with batch renormalisation, and the statistics that it keeps: what `algos/crossq.py` is made of.

Batch renormalisation (Ioffe 2017, "Batch Renormalization: Towards Reducing Minibatch Dependence in
Batch-Normalized Models", arXiv 1702.03275): samples are normalised by the mean and the deviation of their own
minibatch, corrected towards the running ones that are used where there is no minibatch.

Statistics are given and returned, never hidden: an array in the algorithm's state, as parameters are.

Letters in shapes: `N` samples of a minibatch, `F` features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos.given import Network
from algos.layers import Layers, features, head, hidden_layers
from algos.networks import actor_features
from envs.composite import ObservationSpace
from fdg.errors import FdgError

_EPSILON = 1e-3  # added to variances
_LARGEST_RATIO, _LARGEST_SHIFT = 3.0, 5.0  # r_max and d_max of the paper, section 4.1


class NormedNetwork(NamedTuple):
    """A network with running statistics, as two pure functions.

    `init(key, *inputs) -> (parameters, statistics)`; of the inputs only shape and dtype count.
    `apply(parameters, statistics, *inputs, in_training, renormalize) -> (output, statistics)`: in training
    inputs are a minibatch, normalised by its own statistics, and the running ones have taken it in
    afterwards; `renormalize` (bool, may be traced) corrects it towards these.
    """

    init: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]


def gaussian_actor(
    space: ObservationSpace, size: int, layers: Layers, decay: float | jax.Array
) -> NormedNetwork:
    """`algos.networks.gaussian_actor` with each layer's inputs normalised: `[N, *obs]` to `[N, 2 * size]`."""
    return _network(_Actor(space, 2 * size, layers.sized(space)), decay)


def twin_critics(
    space: ObservationSpace, layers: Layers, decay: float | jax.Array, outputs: int = 1
) -> NormedNetwork:
    """`algos.networks.twin_critics` with each layer's inputs normalised: two values of each action, `[N]`."""
    return _network(_Critics(space, layers.sized(space), outputs), decay)


def without_statistics(network: Network) -> NormedNetwork:
    """A network that normalises nothing, as one whose statistics are empty."""

    def init(key: jax.Array, *inputs: Any) -> tuple[Any, Any]:
        return network.init(key, *inputs), ()

    def apply(parameters: Any, statistics: Any, *inputs: Any, **_: Any) -> tuple[Any, Any]:
        return network.apply(parameters, *inputs), statistics

    return NormedNetwork(init, apply)


class BatchRenorm(nn.Module):
    """Batch renormalisation of features: `[N, F]` to `[N, F]` (algorithm 1 of the paper).

    The running mean and variance (`batch_stats`) go `1 - decay` of the way to those of a minibatch.
    """

    @nn.compact
    def __call__(  # noqa: D102
        self, x: jax.Array, in_training: bool, renormalize: bool | jax.Array, decay: float | jax.Array
    ) -> jax.Array:
        shape = x.shape[-1:]
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape)
        var = self.variable("batch_stats", "var", jnp.ones, shape)
        running_mean, running_std = mean.value, jnp.sqrt(var.value + _EPSILON)
        if in_training:
            batch_mean = jnp.mean(x, axis=0)
            batch_var = jnp.mean(jnp.square(x - batch_mean[None]), axis=0)
            batch_std = jnp.sqrt(batch_var + _EPSILON)
            # r and d of the paper, constants to the gradient; without them this is batch normalisation.
            ratio = jnp.clip(batch_std / running_std, 1.0 / _LARGEST_RATIO, _LARGEST_RATIO)
            shift = jnp.clip((batch_mean - running_mean) / running_std, -_LARGEST_SHIFT, _LARGEST_SHIFT)
            ratio = jax.lax.stop_gradient(jnp.where(renormalize, ratio, 1.0))
            shift = jax.lax.stop_gradient(jnp.where(renormalize, shift, 0.0))
            normalized = (x - batch_mean[None]) / batch_std[None] * ratio[None] + shift[None]
            mean.value = jax.lax.stop_gradient(decay * mean.value + (1.0 - decay) * batch_mean)
            var.value = jax.lax.stop_gradient(decay * var.value + (1.0 - decay) * batch_var)
        else:
            normalized = (x - running_mean[None]) / running_std[None]
        scale = self.param("scale", nn.initializers.ones, shape)
        bias = self.param("bias", nn.initializers.zeros, shape)
        return normalized * scale[None] + bias[None]


class _Trunk(nn.Module):
    """`algos.layers.Trunk` with its inputs, and what each dense layer gives, renormalised."""

    layers: Layers
    outputs: int
    head_scale: float

    @nn.compact
    def __call__(self, how: "_How", inputs: Any, more: jax.Array | None = None) -> jax.Array:
        if self.layers.torso != "dense":
            raise FdgError(
                f"torso='{self.layers.torso}': these layers are normalised by batch: set torso='dense'"
            )
        x = BatchRenorm()(hidden_layers(inputs, self.layers, (), more), *how)
        for width in self.layers.hidden or ():
            x = BatchRenorm()(hidden_layers(x, self.layers, (width,)), *how)
        return head(x, self.outputs, self.head_scale)


class _Actor(nn.Module):
    space: ObservationSpace
    outputs: int
    layers: Layers

    @nn.compact
    def __call__(self, how: "_How", observation: Any) -> jax.Array:
        seen = actor_features(observation, self.space, self.layers.convolve)
        return _Trunk(self.layers, self.outputs, 0.01, name="actor")(how, seen)


class _Critics(nn.Module):
    space: ObservationSpace
    layers: Layers
    outputs: int

    @nn.compact
    def __call__(self, how: "_How", observation: Any, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = features(observation, self.space, self.layers.convolve)
        action = action.reshape(action.shape[0], -1)
        names = ("critic_1", "critic_2")
        critics = [_Trunk(self.layers, self.outputs, 1.0, name=name) for name in names]
        first, second = (critic(how, inputs, action) for critic in critics)
        return (first[:, 0], second[:, 0]) if self.outputs == 1 else (first, second)


class _How(NamedTuple):
    """How samples are normalised."""

    in_training: bool
    renormalize: bool | jax.Array
    decay: float | jax.Array


def _network(module: nn.Module, decay: float | jax.Array) -> NormedNetwork:
    def init(key: jax.Array, *inputs: Any) -> tuple[Any, Any]:
        made = module.init(key, _How(False, False, decay), *inputs)
        return made["params"], made["batch_stats"]

    def apply(
        parameters: Any, statistics: Any, *inputs: Any, in_training: bool, renormalize: bool | jax.Array
    ) -> tuple[Any, Any]:
        variables = {"params": parameters, "batch_stats": statistics}
        how = _How(in_training, renormalize, decay)
        output, changed = module.apply(variables, how, *inputs, mutable=["batch_stats"])
        return output, changed["batch_stats"]

    return NormedNetwork(init, apply)
