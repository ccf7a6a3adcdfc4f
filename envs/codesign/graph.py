"""A network as a graph of layers, built operation by operation by the readers of ONNX files and jaxprs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from envs.codesign.layers import Layer, addition
from fdg.errors import FdgError

_MOST_LAYERS = 2000


class Network(NamedTuple):
    """Layers in an order in which each comes after those it needs."""

    # what is computed; activations, normalisation and changes of shape cost nothing
    layers: tuple[Layer, ...]
    # pairs (i, j) of layers: i has to end before j starts. None: one after another.
    branches: tuple[tuple[int, int], ...] | None


class Value(NamedTuple):
    """An array of a network."""

    # the layers that it is made of, with no other layer in between; empty for the network's input
    sources: frozenset[int] = frozenset()
    is_data: bool = False  # whether it depends on the network's input; weights and constants do not
    # False for a copy of fewer numbers along an axis, which needs no traffic of its own
    is_whole: bool = True


CONSTANT, INPUT = Value(), Value(is_data=True)


class Builder:
    """Collects layers and their dependencies."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._branches: set[tuple[int, int]] = set()

    def layer(self, layer: Layer, *read: Value) -> Value:
        """Appends a layer that reads some values; gives its output."""
        at = len(self._layers)
        if at >= _MOST_LAYERS:
            raise FdgError(f"more than {_MOST_LAYERS:,} layers; give a network of fewer")
        self._layers.append(layer)
        self._branches |= {(source, at) for value in read for source in value.sources}
        return Value(frozenset({at}), is_data=True)

    def joined(self, read: Sequence[Value]) -> Value:
        """What is made of some values at no cost: an activation, a change of shape, a concatenation."""
        data = [value for value in read if value.is_data]
        sources = frozenset[int]().union(*(value.sources for value in data))
        return Value(sources, bool(data), any(value.is_whole for value in data) or not data)

    def elementwise(self, read: Sequence[Value], sizes: tuple[int, int, int]) -> Value:
        """The result of an operation element by element.

        Feature maps of different layers are read from the buffer, as an addition: a layer. What is made of
        one layer alone, such as x * sigmoid(x), or of constants, is computed as the map passes. `sizes` are
        channels, rows and columns of the result.
        """
        result, *others = {
            value.sources: value for value in read if value.is_data and value.is_whole
        }.values() or [self.joined(read)]
        if not others:
            return self.joined(read)
        for other in others:
            result = self.layer(addition(*sizes), result, other)
        return result

    def product(self, sizes: tuple[int, int, int, int], left: Value, right: Value) -> Value:
        """Products of [rows, inner] with [inner, columns], each of a batch a group of one layer.

        Of two feature maps, as in attention, the one with fewer rows or columns is held as weights are.
        `sizes` are batch, rows, columns and inner. Constants on either side are the weights.
        """
        batch, rows, columns, inner = sizes
        if not (left.is_data or right.is_data):
            return CONSTANT
        if not left.is_data or (right.is_data and rows < columns):
            rows, columns = columns, rows
        layer = Layer(batch * columns, batch * inner, rows, 1, groups=batch)
        return self.layer(layer, left, right)

    def network(self) -> Network:
        """All of it."""
        if not any(layer.has_weights for layer in self._layers):
            raise FdgError("no convolution or matrix product in it; give a network that has some")
        chain = {(at, at + 1) for at in range(len(self._layers) - 1)}
        branches = None if self._branches == chain else tuple(sorted(self._branches))
        return Network(tuple(self._layers), branches)


def windowed(
    channels: tuple[int, int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    groups: int = 1,
    has_weights: int = 1,
) -> Layer:
    """A convolution or pooling of one or two spatial axes.

    `channels` are of output and input, `inputs` sizes without padding. A window with gaps (dilation)
    multiplies as often. `has_weights` is 0 for pooling.
    """
    if len(outputs) not in (1, 2):
        raise FdgError(f"windows along {len(outputs)} axes; one or two are supported")
    moving = {stride for stride, size in zip(strides, outputs, strict=True) if size > 1} or {1}
    if len(moving) > 1:
        raise FdgError(f"strides {tuple(strides)} differ; give one stride for both directions")
    (rows, columns), (in_rows, in_columns), (kernel_rows, kernel_columns) = (
        (*sizes, 1)[:2] for sizes in (outputs, inputs, kernel)
    )
    sizes = (rows, columns, kernel_rows, kernel_columns, moving.pop(), groups, in_rows, in_columns)
    return Layer(*channels, *sizes, has_weights=has_weights)


def map_sizes(shape: Sequence[int], channel_axis: int) -> tuple[int, int, int]:
    """Channels, rows and columns of a feature map; a batch of 1 counts as any other axis."""
    axis = channel_axis % max(len(shape), 1)
    rest = [size for at, size in enumerate(shape) if at != axis]
    return shape[axis] if shape else 1, math.prod(rest[:-1]), rest[-1] if rest else 1
