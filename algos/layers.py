"""Layers of networks: dense layers, convolutions, and the conversion of observations to numbers.

Shapes: `N` rows, `F` features.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from algos.on_policy import PolicyLayers as PolicyLayers
from algos.values import Activation, Layers, Torso
from envs import composite
from envs.composite import ObservationSpace
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.arguments import checked
from fdg.errors import FdgError, unknown_name

_ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "elu": nn.elu}

_Layers = TypeVar("_Layers", bound=Layers)
_VECTOR_HIDDEN = (64, 64)  # default widths of dense layers, without images

# Convolutions, each as (filters, size, stride).
# For small images, those of MinAtar's agents (Young and Tian 2019, arXiv 1903.03176).
_SMALL_IMAGE_CONVOLUTIONS = ((16, 3, 1),)
_SMALL_IMAGE_HIDDEN = (128,)
# For large images, those of DQN (Mnih et al. 2015, "Human-level control through deep reinforcement learning",
# Nature 518, Methods, "Model architecture"): made for 84 x 84 pixels, used from 36 x 36 on.
_LARGE_IMAGE_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_LARGE_IMAGE_HIDDEN = (512,)
_MIN_LARGE_SIDE = 36

_LARGEST_SPAN = 2.0**16  # integers with bounds further apart are not rescaled


class Trunk(nn.Module):
    """Maps the result of `features` to `[N, outputs]`: convolutions of images, dense layers, a head.

    A `layers.torso` of "simba" uses SimbaV2's layers, without choice of activation or dropout. With
    `layers.layer_norm` each layer but the head is normalised before its activation (Ba et al. 2016, arXiv
    1607.06450). `extra [N, G]` are further inputs of the dense layers, such as actions. With a `dropout` rate
    and `keys [N]`, the dense layers have dropout (`apply_dropout`).
    """

    layers: Layers
    outputs: int
    head_scale: float  # of the head's initial weights
    dropout: float = 0.0

    @nn.compact
    def __call__(  # noqa: D102
        self, inputs: Any, extra: jax.Array | None = None, keys: jax.Array | None = None
    ) -> jax.Array:
        x = hidden_layers(inputs, self.layers, self.layers.hidden or (), extra, self.dropout, keys)
        return head(x, self.outputs, self.head_scale, self.layers.torso)


class Convolution(nn.Module):
    """`flax.linen.Conv` for images `[N, H, W, C]` without padding, as one matrix product.

    In a compiled loop on a CPU, the gradient of XLA's convolution takes 31 times as long on MinAtar's images,
    18 times on Atari's (`make bench ARGS="-k convolution -s"`). `size` is a multiple of `stride`.
    """

    filters: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:  # noqa: D102
        count, stride, channels = images.shape[0], self.stride, images.shape[-1]
        per_side = self.size // stride
        # The pixels of a block of `stride` x `stride` become channels of one pixel; a filter covers
        # `per_side` x `per_side` blocks.
        rows, columns = ((length - self.size) // stride + per_side for length in images.shape[1:3])
        blocks = images[:, : rows * stride, : columns * stride].reshape(
            count, rows, stride, columns, stride, channels
        )
        blocks = blocks.swapaxes(2, 3).reshape(count, rows, columns, -1)
        rows, columns = rows - per_side + 1, columns - per_side + 1  # now of the output
        patches = jnp.concatenate(
            [blocks[:, i : i + rows, j : j + columns] for i in range(per_side) for j in range(per_side)], -1
        )
        shape = (self.size, self.size, channels, self.filters)
        kernel = self.param("kernel", nn.initializers.orthogonal(math.sqrt(2.0)), shape, jnp.float32)
        kernel = kernel.reshape(per_side, stride, per_side, stride, channels, self.filters).swapaxes(1, 2)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.filters,), jnp.float32)
        outputs = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, self.filters) + bias[None]
        return outputs.reshape(count, rows, columns, self.filters)


# Call `hidden_layers` and `head` inside a module's `__call__`, which then owns their layers.
def hidden_layers(
    inputs: Any,
    layers: Layers,
    hidden: Sequence[int],
    extra: jax.Array | None = None,
    dropout: float = 0.0,
    keys: jax.Array | None = None,
) -> jax.Array:
    """All layers of a `Trunk` but the head, with dense layers of the widths `hidden`: `[N, hidden[-1]]`.

    `inputs` are features `[N, F]`, images `[N, H, W, C]`, or a tuple of both: each image has its own
    convolutions, whose outputs are concatenated with the features before the dense layers.
    """
    kernel_init = nn.initializers.orthogonal(math.sqrt(2.0))

    def activate(x):
        return _ACTIVATIONS[layers.activation](nn.LayerNorm()(x) if layers.layer_norm else x)

    parts = []
    for x in jax.tree.leaves(inputs):
        if x.ndim == 4:
            is_large = _is_large(x.shape[1:])
            for layer in _LARGE_IMAGE_CONVOLUTIONS if is_large else _SMALL_IMAGE_CONVOLUTIONS:
                x = activate(Convolution(*layer)(x))
            x = x.reshape(x.shape[0], -1)
        parts.append(x)
    if extra is not None:
        parts.append(extra)
    x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    if layers.torso == "simba" and hidden:
        return _simba_blocks(x, hidden)
    # `x` has two axes, because XLA on a CPU is fast at products of matrices.
    for index, width in enumerate(hidden):
        x = nn.Dense(width, kernel_init=kernel_init)(x)
        x = activate(x if keys is None else apply_dropout(x, dropout, keys, index))
    return x


def apply_dropout(x: jax.Array, rate: float, keys: jax.Array, index: int = 0) -> jax.Array:
    """Dropout: sets a fraction `rate` of features `[N, F]` to zero, and divides others by `1 - rate`.

    Srivastava et al. 2014 (JMLR 15). Each sample has its own key in `keys [N]`, so results do not depend on
    how a minibatch is split. Each layer derives its own keys from `keys` and its `index`.
    """
    layer_keys = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)
    is_kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(layer_keys)
    return jnp.where(is_kept, x / (1.0 - rate), 0.0)


def _simba_blocks(x: jax.Array, hidden: Sequence[int]) -> jax.Array:
    """SimbaV2's embedding of inputs `[N, F]`, then one residual block per entry of `hidden`."""
    if len(set(hidden)) > 1:
        raise FdgError(f"torso='simba' has blocks of one width: hidden={tuple(hidden)} names several")
    x = embed_inputs(x, hidden[0])
    for _ in hidden:
        x = residual_block(x, len(hidden))
    return x


def head(x: jax.Array, outputs: int, scale: float, torso: Torso = "dense") -> jax.Array:
    """The last layer, `[N, F]` to `[N, outputs]`; `scale` of its initial weights is unused with "simba"."""
    if torso == "simba":
        return UnitHead(outputs, name="head")(x)
    return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale), name="head")(x)


def with_widths(layers: _Layers, space: ObservationSpace) -> _Layers:
    """Sets `hidden`, if None, to default widths for the observations; checks the activation."""
    if layers.activation not in _ACTIVATIONS:
        raise unknown_name("activation", layers.activation, _ACTIVATIONS)
    if layers.hidden is not None:
        return layers
    images = [part.shape for _, part in composite.parts(space) if layers.convolve and _is_image(part)]
    image_hidden = _LARGE_IMAGE_HIDDEN if any(map(_is_large, images)) else _SMALL_IMAGE_HIDDEN
    return dataclasses.replace(layers, hidden=image_hidden if images else _VECTOR_HIDDEN)


def _is_image(space: Space) -> bool:
    return isinstance(space, Box) and space.is_image


def _is_large(image_shape: tuple[int, ...]) -> bool:
    return min(image_shape[:2]) >= _MIN_LARGE_SIDE


def features(observation: Any, space: ObservationSpace, convolve: bool = True) -> Any:
    """Observations `[N, *obs]` as float32: images to convolve `[N, H, W, C]`, all else `[N, F]`.

    For observations in parts, a tuple: the images one by one, then all other parts concatenated.
    """
    if isinstance(space, Box | Discrete | MultiDiscrete):
        return _part_features(observation, space, convolve)
    if not composite.has_parts_of(space, observation):
        raise FdgError(
            f"the network was made for observations of {space!r:.200}, but was given"
            f" {jax.tree.map(jnp.shape, observation)}"
        )
    part_features = jax.tree.leaves(
        jax.tree.map(lambda part, x: _part_features(x, part, convolve), composite.tree(space), observation)
    )
    images, vectors = [x for x in part_features if x.ndim == 4], [x for x in part_features if x.ndim != 4]
    return (*images, *([jnp.concatenate(vectors, axis=-1)] if vectors else []))


def _part_features(observation: jax.Array, space: Space, convolve: bool) -> jax.Array:
    """`features` of observations that are a single array."""
    if observation.shape[1:] != space.shape:
        raise FdgError(
            f"the network was made for observations [{', '.join(map(str, ('N', *space.shape)))}] of"
            f" {space!r:.200}, but was given {list(observation.shape)}: give one leading axis, then"
            " those of the space"
        )
    count = observation.shape[0]
    match space:
        case Discrete(n):
            return jax.nn.one_hot(observation, n, dtype=jnp.float32)
        case MultiDiscrete(nvec):
            columns = [jax.nn.one_hot(observation[:, i], n, dtype=jnp.float32) for i, n in enumerate(nvec)]
            return jnp.concatenate(columns, axis=-1)
    inputs = _as_numbers(observation, space)
    if convolve and _is_image(space):
        return inputs if inputs.ndim == 4 else inputs[..., None]
    return inputs.reshape(count, -1)


def _as_numbers(observation: jax.Array, space: Box) -> jax.Array:
    """Observations as float32 `[N, *shape]`; the codes of each channel become one-hot on the last axis.

    Bounded integers are scaled to [0, 1]. Floats, such as normalised observations, are unchanged.
    """
    inputs = observation.astype(jnp.float32)
    if not jnp.issubdtype(observation.dtype, jnp.integer):
        return inputs
    if space.codes is None:
        low, span = _low_and_span(space)
        return (inputs - low if low.any() else inputs) * (1.0 / span)
    channels = observation if len(space.shape) == 3 else observation[..., None]
    columns = []
    for i, (lowest, count) in enumerate(space.codes):
        code = channels[..., i].astype(jnp.int32) - lowest
        # Two codes become one number, 0 or 1.
        columns.append(
            jax.nn.one_hot(code, count, dtype=jnp.float32)
            if count > 2
            else code[..., None].astype(jnp.float32)
        )
    return jnp.concatenate(columns, axis=-1)


def _low_and_span(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """Offset and divisor for bounded integers, float32: scalars, or `[1, *shape]`."""
    low, high = (np.asarray(side, np.float32) for side in (space.low, space.high))
    span = np.asarray(np.maximum(high - low, 1.0), np.float32)
    if not space.is_bounded or span.max() > _LARGEST_SPAN:
        low, span = (
            np.zeros((), np.float32),
            np.full((), 255.0 if space.dtype == "uint8" else 1.0, np.float32),
        )
    low, span = np.broadcast_arrays(low, span)
    return (low[None], span[None]) if low.ndim else (low, span)


# --- layers as one value, for the field `network` of any algorithm ---


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Settings of a default network, such as `algos.networks.mlp(64, 64)`.

    As the value of a field `network`, it sets the algorithm's fields of these names.
    """

    settings: tuple[tuple[str, Any], ...]


@checked
def mlp(*hidden: int, activation: Activation | None = None, layer_norm: bool | None = None) -> Architecture:
    """Dense layers of these widths; images are flattened. None keeps the algorithm's setting.

    `PPO(env=env, network=mlp(64, 64))` is `PPO(env=env, hidden=(64, 64), convolve=False)`.
    """
    return _architecture(hidden=hidden or None, activation=activation, layer_norm=layer_norm, convolve=False)


@checked
def convolutional(
    *hidden: int, activation: Activation | None = None, layer_norm: bool | None = None
) -> Architecture:
    """Convolutions of each image, then dense layers of these widths, or of default widths."""
    return _architecture(hidden=hidden or None, activation=activation, layer_norm=layer_norm, convolve=True)


@checked
def simba(width: int = 128, blocks: int = 1, critic: tuple[int, int] | None = None) -> Architecture:
    """SimbaV2's blocks (Lee et al. 2025, arXiv 2502.15280), whose features and weights have unit length.

    `SAC(env=env, actor_network=simba(128, 2))` is `SAC(env=env, hidden=(128, 128), torso="simba")`: it sets
    the layers of all networks, not only the actor's. The paper has one block of 128 for the actor and two of
    512 for the critics: `simba(128, 1, critic=(512, 2))`, if the algorithm has `critic_hidden`.
    """
    critic_hidden = None if critic is None else (critic[0],) * critic[1]
    return _architecture(hidden=(width,) * blocks, critic_hidden=critic_hidden, torso="simba")


@checked
def gru(size: int = 128, *hidden: int, activation: Activation | None = None) -> Architecture:
    """A GRU of this size after dense layers of these widths; see `algos.memories` for other memories.

    `RecurrentPPO(env=env, network=gru(128))` is `RecurrentPPO(env=env, memory="gru", memory_size=128)`.
    """
    return _architecture(memory="gru", memory_size=size, hidden=hidden or None, activation=activation)


@checked
def lstm(size: int = 128, *hidden: int, activation: Activation | None = None) -> Architecture:
    """Like `gru`, but with an LSTM."""
    return _architecture(memory="lstm", memory_size=size, hidden=hidden or None, activation=activation)


@checked
def transformer(size: int = 128, window: int = 32, layers: int = 1, heads: int = 4) -> Architecture:
    """A causal transformer that attends to the last `window` steps."""
    return _architecture(
        memory="transformer", memory_size=size, memory_window=window, memory_layers=layers, memory_heads=heads
    )


def _architecture(**settings: Any) -> Architecture:
    return Architecture(tuple((name, value) for name, value in settings.items() if value is not None))


# --- hidden layers on unit spheres: SimbaV2 (Lee, Lee, Seno, Kim, Stone and Choo 2025, arXiv 2502.15280) ---
#
# Section 4 of the paper. Features have unit length after each block; each column of a weight matrix has unit
# length after each update, since every algorithm calls `project_kernels`. So neither features nor weights
# grow while targets change. Other elements of the paper are settings of algorithms: running statistics of
# observations (`normalize_observation`), and distributional critics (`atoms`).

_SHIFT = 3.0  # c_shift, appended to the inputs before they are projected to the sphere
_EXPANSION = 4  # ratio of a block's hidden width to its output width
_KERNEL = "unit_kernel"  # name of the parameter by which `project_kernels` finds kernels of `UnitDense`
_MIN_SQUARED_LENGTH = 1e-16


def to_unit_length(x: jax.Array, axis: int = -1) -> jax.Array:
    """Normalises vectors along an axis to unit length; zero stays zero, with a gradient of zero.

    >>> to_unit_length(jnp.array([[3.0, 4.0], [0.0, 0.0]])).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    squared_length = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squared_length, _MIN_SQUARED_LENGTH))


def project_kernels(parameters: Any) -> Any:
    """Updated parameters with the columns of `UnitDense` kernels `[..., F, D]` scaled to unit length."""

    def project(path: Any, x: Any) -> Any:
        return to_unit_length(x, axis=-2) if path and getattr(path[-1], "key", None) == _KERNEL else x

    return jax.tree_util.tree_map_with_path(project, parameters)


class UnitDense(nn.Module):
    """A dense layer without bias, `[N, F]` to `[N, width]`; initially, kernel columns have unit length."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        def init(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
            return to_unit_length(nn.initializers.orthogonal()(key, shape, jnp.float32), axis=0)

        return x @ self.param(_KERNEL, init, (x.shape[-1], self.width))


class Scaler(nn.Module):
    """A learned scale of each feature.

    The scale is the parameter times `initial_scale / initial_parameter`, so it changes the faster, the
    smaller `initial_parameter` is.
    """

    initial_scale: float
    initial_parameter: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        scale = self.param(
            "scale", nn.initializers.constant(self.initial_parameter), x.shape[-1:], jnp.float32
        )
        return x * (scale * (self.initial_scale / self.initial_parameter))[None]


class UnitHead(nn.Module):
    """The last two layers, `[N, D]` to `[N, outputs]`, with a bias."""

    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        hidden = Scaler(1.0, 1.0)(UnitDense(x.shape[-1])(x))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.outputs,), jnp.float32)
        return UnitDense(self.outputs)(hidden) + bias[None]


# Call `embed_inputs` and `residual_block` inside a module's `__call__`, which then owns their layers.
def embed_inputs(x: jax.Array, width: int) -> jax.Array:
    """Embeds inputs `[N, F]` as features of unit length, `[N, width]`."""
    shifted = jnp.concatenate([x, jnp.full((len(x), 1), _SHIFT, jnp.float32)], axis=-1)
    return to_unit_length(_scale_features(UnitDense(width)(to_unit_length(shifted))))


def residual_block(x: jax.Array, depth: int) -> jax.Array:
    """One of `depth` residual blocks, on features of unit length `[N, D]`."""
    width = x.shape[-1]
    inner = nn.relu(_scale_features(UnitDense(_EXPANSION * width)(x)))
    difference = to_unit_length(UnitDense(width)(inner)) - x
    return to_unit_length(x + Scaler(1.0 / (depth + 1), 1.0 / math.sqrt(width))(difference))


def _scale_features(x: jax.Array) -> jax.Array:
    initial = math.sqrt(2.0 / x.shape[-1])
    return Scaler(initial, initial)(x)
