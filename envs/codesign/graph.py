"""Builds a network as a graph of layers; used by the readers of ONNX files and jaxprs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from envs.codesign.layers import Layer, addition
from fdg.errors import FdgError

_MAX_LAYERS = 2000


class Network(NamedTuple):
    """Layers in topological order."""

    # activations, normalisation and changes of shape cost nothing, and are left out
    layers: tuple[Layer, ...]
    # pairs (i, j) of layers: i must end before j starts. None: a chain.
    branches: tuple[tuple[int, int], ...] | None


class Value(NamedTuple):
    """An array of a network."""

    # indices of the layers whose outputs it is computed from; empty for the network's input
    sources: frozenset[int] = frozenset()
    is_data: bool = False  # True if it depends on the network's input, not only on weights and constants
    # False for a broadcast of a smaller array, which is not read from the buffer again
    is_full_size: bool = True


CONSTANT, INPUT = Value(), Value(is_data=True)  # weights and constants; the network's input


class Builder:
    """Collects layers and their dependencies."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._branches: set[tuple[int, int]] = set()

    def add_layer(self, layer: Layer, *read: Value) -> Value:
        """Appends a layer that reads some values; returns its output."""
        index = len(self._layers)
        if index >= _MAX_LAYERS:
            raise FdgError(f"more than {_MAX_LAYERS:,} layers; give a network with fewer")
        self._layers.append(layer)
        self._branches |= {(source, index) for value in read for source in value.sources}
        return Value(frozenset({index}), is_data=True)

    def free_result(self, read: Sequence[Value]) -> Value:
        """A value computed from others at no cost: an activation, a change of shape, a concatenation."""
        data = [value for value in read if value.is_data]
        sources = frozenset[int]().union(*(value.sources for value in data))
        return Value(sources, bool(data), any(value.is_full_size for value in data) or not data)

    def elementwise(
        self, read: Sequence[Value], shapes: Sequence[Sequence[int]], shape: Sequence[int], channel_axis: int
    ) -> Value:
        """The result `shape` of an elementwise operation on operands of these `shapes`.

        Operands of different layers must be read from the buffer: the result is then an addition layer.
        Otherwise, as for x * sigmoid(x) and for constants, it is free.
        """
        is_full_size = [math.prod(operand) == math.prod(shape) for operand in shapes]
        read = [
            value._replace(is_full_size=value.is_full_size and fits)
            for value, fits in zip(read, is_full_size, strict=True)
        ]
        result, *others = {
            value.sources: value for value in read if value.is_data and value.is_full_size
        }.values() or [self.free_result(read)]
        if not others:
            return self.free_result(read)
        for other in others:
            result = self.add_layer(addition(*map_sizes(shape, channel_axis)), result, other)
        return result

    def add_product(self, sizes: tuple[int, int, int, int], left: Value, right: Value) -> Value:
        """Appends products of [rows, inner] with [inner, columns], a batch as the groups of one layer.

        Returns the output; a product of constants adds no layer.

        Constants on either side are the weights. If both sides are feature maps, as in attention, the one
        with fewer rows or columns counts as the weights. `sizes` are batch, rows, columns and inner.
        """
        batch, rows, columns, inner = sizes
        if not (left.is_data or right.is_data):
            return CONSTANT
        if not left.is_data or (right.is_data and rows < columns):
            rows, columns = columns, rows
        layer = Layer(batch * columns, batch * inner, rows, 1, groups=batch)
        return self.add_layer(layer, left, right)

    def network(self) -> Network:
        """The network built so far."""
        if not any(layer.has_weights for layer in self._layers):
            raise FdgError("it has no convolution or matrix product: give a network that has one")
        chain = {(index, index + 1) for index in range(len(self._layers) - 1)}
        branches = None if self._branches == chain else tuple(sorted(self._branches))
        return Network(tuple(self._layers), branches)


def window_layer(
    channels: tuple[int, int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    groups: int = 1,
    has_weights: int = 1,
) -> Layer:
    """A convolution or pooling of one or two spatial axes.

    `channels` are the output's and the input's; `inputs` are sizes without padding. Dilation does not change
    the number of multiplications. `has_weights` is 0 for pooling.
    """
    if len(outputs) not in (1, 2):
        raise FdgError(f"windows along {len(outputs)} axes; one or two are supported")
    distinct = {stride for stride, size in zip(strides, outputs, strict=True) if size > 1} or {1}
    if len(distinct) > 1:
        raise FdgError(f"strides {tuple(strides)} differ; give one stride for both directions")
    (rows, columns), (in_rows, in_columns), (kernel_rows, kernel_columns) = (
        (*sizes, 1)[:2] for sizes in (outputs, inputs, kernel)
    )
    sizes = (rows, columns, kernel_rows, kernel_columns, distinct.pop(), groups, in_rows, in_columns)
    return Layer(*channels, *sizes, has_weights=has_weights)


def map_sizes(shape: Sequence[int], channel_axis: int) -> tuple[int, int, int]:
    """Channels, rows and columns of a feature map; a batch of 1 counts as any other axis."""
    axis = channel_axis % max(len(shape), 1)
    others = [size for index, size in enumerate(shape) if index != axis]
    return shape[axis] if shape else 1, math.prod(others[:-1]), others[-1] if others else 1
