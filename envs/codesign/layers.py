"""Neural-network layers as seven loops, the input of a cost model.

A `Layer` has checked Python integers; `stack` makes arrays (`Layers`) of several, for programs. The batch
size is 1.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError

# Counts are int32, and saturate at this value ("at least"), so nothing overflows.
LARGEST_COUNT = 2_147_000_000


class Layers(NamedTuple):
    """Fields of `Layer` as int32 arrays of one shape; all 0 for an empty layer, which costs nothing."""

    out_channels: jax.Array
    in_channels: jax.Array
    out_rows: jax.Array
    out_columns: jax.Array
    kernel_rows: jax.Array
    kernel_columns: jax.Array
    stride: jax.Array
    groups: jax.Array
    in_rows: jax.Array
    in_columns: jax.Array
    operands: jax.Array
    has_weights: jax.Array


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, batch 1: each output, `out_channels` x `out_rows` x `out_columns`, is a sum over a window."""

    out_channels: int  # K
    in_channels: int  # C; both count all groups together
    out_rows: int  # P
    out_columns: int  # Q
    kernel_rows: int = 1  # R
    kernel_columns: int = 1  # S
    stride: int = 1  # u, in both directions
    groups: int = 1  # G; each output reads C / G channels
    # rows of the input without padding; None: all that the windows cover
    in_rows: int | None = None
    in_columns: int | None = None  # columns of the input without padding
    operands: int = 1  # feature maps read: 2 for an addition
    has_weights: int = 1  # 0 for pooling and additions: only traffic, no multiplications

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "has_weights" else 1
            is_size = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least
            if not (is_size or (value is None and field.name in ("in_rows", "in_columns"))):
                raise FdgError(f"layer: {field.name} is {value!r}; give a whole number of at least {least}")
            if value is not None:
                object.__setattr__(self, field.name, int(value))
        if self.has_weights > 1:
            raise FdgError(f"layer: has_weights is {self.has_weights}; give 0 or 1")
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise FdgError(
                    f"layer: {name}={getattr(self, name)} does not divide into groups={self.groups}; "
                    "give groups that divide both numbers of channels"
                )
        covered = {
            "in_rows": (self.out_rows - 1) * self.stride + self.kernel_rows,
            "in_columns": (self.out_columns - 1) * self.stride + self.kernel_columns,
        }
        for name, size in covered.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)
        counts = {
            "multiplications": self.macs,
            "words of weights": self.weight_words,
            "words of inputs": self.input_words,
            "words of outputs": self.output_words,
        }
        for name, count in counts.items():
            if count > LARGEST_COUNT:
                raise FdgError(
                    f"layer: {count:,} {name}, more than the {LARGEST_COUNT:,} that int32 holds; "
                    "split the layer, by its output channels or its rows"
                )

    @property
    def macs(self) -> int:
        """Multiply-accumulates: K C/G P Q R S."""
        return self.weight_words * self.out_rows * self.out_columns

    @property
    def weight_words(self) -> int:
        """K C/G R S."""
        window = self.in_channels // self.groups * self.kernel_rows * self.kernel_columns
        return self.has_weights * self.out_channels * window

    @property
    def input_words(self) -> int:
        """Words of the inputs that windows cover, without padding; each word counts once."""
        rows = (self.out_rows - 1) * min(self.stride, self.kernel_rows) + self.kernel_rows
        columns = (self.out_columns - 1) * min(self.stride, self.kernel_columns) + self.kernel_columns
        rows, columns = min(self.in_rows or rows, rows), min(self.in_columns or columns, columns)
        return self.operands * self.in_channels * rows * columns

    @property
    def output_words(self) -> int:
        """K P Q."""
        return self.out_channels * self.out_rows * self.out_columns


def convolution(
    in_channels: int,
    out_channels: int,
    in_rows: int,
    in_columns: int | None = None,
    *,
    kernel: int | tuple[int, int] = 3,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
) -> Layer:
    """A convolution of an image of `in_rows` x `in_columns` (square if absent).

    Args:
      in_channels: C.
      out_channels: K.
      in_rows: rows of the image without padding.
      in_columns: columns of the image without padding.
      kernel: R and S; one number for both.
      stride: in both directions.
      padding: on each side; default: half of the kernel, which keeps the size at stride 1.
      groups: number of channel groups.

    >>> layer = convolution(3, 64, 224, kernel=7, stride=2)
    >>> layer.out_rows, layer.macs
    (112, 118013952)
    """
    in_columns = in_rows if in_columns is None else in_columns
    kernel_rows, kernel_columns = (kernel, kernel) if isinstance(kernel, int) else kernel
    sizes = []
    for size, kernel_size in ((in_rows, kernel_rows), (in_columns, kernel_columns)):
        padded = size + 2 * (kernel_size // 2 if padding is None else padding)
        if stride < 1:
            raise FdgError(f"convolution: stride is {stride}; give a number of at least 1")
        if padded < kernel_size:
            raise FdgError(
                f"convolution: the kernel of {kernel_size} is larger than the image, {padded} with padding,"
                f" {size} without; give a smaller kernel or more padding"
            )
        sizes.append((padded - kernel_size) // stride + 1)
    rows, columns = sizes
    fields = (out_channels, in_channels, rows, columns, kernel_rows, kernel_columns, stride, groups)
    return Layer(*fields, in_rows, in_columns)


def depthwise(channels: int, in_rows: int, in_columns: int | None = None, **settings: int) -> Layer:
    """A convolution of each channel by itself: as many groups as channels.

    >>> depthwise(32, 112).macs == 32 * 9 * 112 * 112
    True
    """
    return convolution(channels, channels, in_rows, in_columns, groups=channels, **settings)


def transposed_convolution(
    in_channels: int,
    out_channels: int,
    in_rows: int,
    in_columns: int | None = None,
    *,
    kernel: int,
    stride: int,
) -> Layer:
    """A transposed convolution, to an image `stride` times as large, without multiplications by zero.

    Computed as the equivalent convolution: each input position makes `stride` x `stride` outputs, with
    kernels of ceil(kernel / stride) (sub-pixel convolution, arXiv 1609.07009). Kernels are zero-padded to a
    multiple of `stride`.

    >>> layer = transposed_convolution(64, 32, 8, kernel=2, stride=2)
    >>> layer.macs == 64 * 32 * 8 * 8 * 2 * 2, layer.output_words == 32 * 16 * 16
    (True, True)
    """
    if kernel < 1 or stride < 1:
        raise FdgError(f"transposed convolution: kernel {kernel}, stride {stride}; give at least 1 each")
    kernel_part = math.ceil(kernel / stride)
    in_columns = in_rows if in_columns is None else in_columns
    return Layer(
        out_channels * stride**2, in_channels, in_rows, in_columns, kernel_part, kernel_part, 1, 1, in_rows,
        in_columns,
    )  # fmt: skip


def gemm(rows: int, columns: int, inner: int) -> Layer:
    """A matrix product [rows, inner] x [inner, columns]; the second matrix is the weights.

    >>> gemm(1, 1000, 512).macs
    512000
    """
    return Layer(columns, inner, rows, 1)


def pooling(channels: int, in_rows: int, in_columns: int | None = None, *, kernel: int, stride: int) -> Layer:
    """Pooling without padding: reads and writes feature maps, without multiplications."""
    settings = {"kernel": kernel, "stride": stride, "padding": 0, "groups": channels}
    return dataclasses.replace(
        convolution(channels, channels, in_rows, in_columns, **settings), has_weights=0
    )


def addition(channels: int, rows: int, columns: int | None = None) -> Layer:
    """The sum of two feature maps of equal size: reads both, writes one, without multiplications."""
    columns = rows if columns is None else columns
    return Layer(channels, channels, rows, columns, groups=channels, operands=2, has_weights=0)


def stack(layers: Sequence[Layer | None]) -> Layers:
    """Stacks `layers` to int32 arrays [L]; None becomes zeros."""
    table = [[getattr(layer, name) if layer else 0 for name in Layers._fields] for layer in layers]
    columns = np.asarray(table, np.int32).reshape(len(table), len(Layers._fields)).T
    return Layers(*map(jnp.asarray, columns))


def product(*factors: jax.Array | int) -> jax.Array:
    """Product of counts, int32, saturating at `LARGEST_COUNT`.

    The float32 product, with a relative error below 1e-6, detects overflow: its threshold lies between
    `LARGEST_COUNT` and 2^31.

    >>> import jax.numpy as jnp
    >>> product(jnp.int32(3), 5).item(), product(jnp.int32(70_000), 70_000).item()
    (15, 2147000000)
    """
    exact, approximate = jnp.int32(1), jnp.float32(1)
    for factor in factors:
        exact = exact * jnp.asarray(factor, jnp.int32)
        approximate = approximate * jnp.asarray(factor, jnp.float32)
    return jnp.where(approximate >= 2.1474e9, LARGEST_COUNT, jnp.minimum(exact, LARGEST_COUNT))


def add(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """Sum of two counts, int32, saturating at `LARGEST_COUNT`."""
    return jnp.where(a > LARGEST_COUNT - b, LARGEST_COUNT, a + b)


def ceil_div(a: jax.Array | int, b: jax.Array | int) -> jax.Array:
    """Quotient of counts, rounded up; `b` = 0 counts as 1."""
    a, b = jnp.asarray(a, jnp.int32), jnp.maximum(jnp.asarray(b, jnp.int32), 1)
    return a // b + (a % b > 0)


def group_channels(layer: Layers) -> tuple[jax.Array, jax.Array]:
    """Output and input channels of one group, int32."""
    groups = jnp.maximum(layer.groups, 1)
    return layer.out_channels // groups, layer.in_channels // groups


def macs(layer: Layers) -> jax.Array:
    """As `Layer.macs`, int32."""
    return product(weight_words(layer), layer.out_rows, layer.out_columns)


def weight_words(layer: Layers) -> jax.Array:
    """As `Layer.weight_words`, int32."""
    in_group = group_channels(layer)[1]
    return product(layer.out_channels, in_group, layer.kernel_rows, layer.kernel_columns, layer.has_weights)


def input_words(layer: Layers) -> jax.Array:
    """As `Layer.input_words`, int32."""
    rows, columns = input_window(layer)
    return product(layer.operands, layer.in_channels, rows, columns)


def output_words(layer: Layers) -> jax.Array:
    """As `Layer.output_words`, int32."""
    return product(layer.out_channels, layer.out_rows, layer.out_columns)


def input_window(layer: Layers) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of the input that windows cover, without padding, int32."""
    rows = with_halo(layer.out_rows, jnp.int32(1), layer.stride, layer.kernel_rows)
    columns = with_halo(layer.out_columns, jnp.int32(1), layer.stride, layer.kernel_columns)
    return jnp.minimum(layer.in_rows, rows), jnp.minimum(layer.in_columns, columns)


def with_halo(outputs: jax.Array, tiles: jax.Array, stride: jax.Array, kernel: jax.Array) -> jax.Array:
    """Inputs along a direction that the windows of `outputs` cover, if `tiles` parts are read separately."""
    return (outputs - tiles) * jnp.minimum(stride, kernel) + tiles * kernel
