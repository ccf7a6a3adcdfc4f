"""Hidden layers on unit spheres: SimbaV2 (Lee, Lee, Seno, Kim, Stone and Choo 2025, ICML, arXiv 2502.15280).

Section 4 of the paper. Features have length one after each block, and so has each column of a weight matrix
after each update (`projected`, which every algorithm calls). So neither can grow while targets move. What the
paper adds around the network are settings of algorithms: observations by running statistics
(`normalize_observation`), and critics that give distributions of returns (`atoms`).

Letters in shapes: `N` rows of any origin, `F` features, `D` the width.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_SHIFT = 3.0  # c_shift, the number that joins the inputs before they are put on a sphere
_EXPANSION = 4  # of the layer within a block
_KERNEL = "unit_kernel"
_SMALLEST = 1e-16


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """Vectors along an axis, divided by their length; zero where they are zero, with a gradient of zero.

    >>> unit(jnp.array([[3.0, 4.0], [0.0, 0.0]])).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, _SMALLEST))


def projected(parameters: Any) -> Any:
    """Parameters after an update, with each column of each `UnitDense` of length one again.

    All others are as they were. Matrices may have leading axes, `[..., F, D]`.
    """

    def one(path: Any, x: Any) -> Any:
        return unit(x, axis=-2) if path and getattr(path[-1], "key", None) == _KERNEL else x

    return jax.tree_util.tree_map_with_path(one, parameters)


class UnitDense(nn.Module):
    """A product with a matrix whose columns have length one: `[N, F]` to `[N, width]`, without a bias."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        def first(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
            return unit(nn.initializers.orthogonal()(key, shape), axis=0)

        return x @ self.param(_KERNEL, first, (x.shape[-1], self.width))


class Scaler(nn.Module):
    """A learned scale of each feature: `first` at first, when its parameter is `size`."""

    first: float
    size: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        scale = self.param("scale", nn.initializers.constant(self.size), x.shape[-1:])
        return x * (scale * (self.first / self.size))[None]


class UnitHead(nn.Module):
    """The last two layers, `[N, D]` to `[N, outputs]`, with a bias."""

    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        hidden = Scaler(1.0, 1.0)(UnitDense(x.shape[-1])(x))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.outputs,))
        return UnitDense(self.outputs)(hidden) + bias[None]


# The two below are called inside a module's `__call__`; their layers belong to that module.
def embedding(x: jax.Array, width: int) -> jax.Array:
    """Inputs `[N, F]` to features of length one, `[N, width]`."""
    shifted = jnp.concatenate([x, jnp.full((len(x), 1), _SHIFT)], axis=-1)
    return unit(_scaled(UnitDense(width)(unit(shifted))))


def block(x: jax.Array, depth: int) -> jax.Array:
    """A step from features `[N, D]` towards what two layers make of them.

    `depth` is the number of blocks of the network.
    """
    width = x.shape[-1]
    inner = nn.relu(_scaled(UnitDense(_EXPANSION * width)(x)))
    towards = unit(UnitDense(width)(inner)) - x
    return unit(x + Scaler(1.0 / (depth + 1), 1.0 / math.sqrt(width))(towards))


def _scaled(x: jax.Array) -> jax.Array:
    size = math.sqrt(2.0 / x.shape[-1])
    return Scaler(size, size)(x)
