"""Reads the layers of a JAX function from its jaxpr: convolutions, matrix products, pooling and additions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from envs.codesign import graph
from envs.codesign.graph import Builder, Network, Value
from envs.codesign.onnx_file import transposed_layer
from fdg.arguments import quoted
from fdg.batch.rules import elementwise, lookup, random, reduce, shape
from fdg.errors import FdgError, one_line
from fdg.jaxprs import bodies, is_literal, open_jaxpr

# Free operations: elementwise ones, changes of shape, look-ups, random bits, and reductions other than
# pooling.
_RULES = (elementwise.RULES, shape.RULES, lookup.RULES, random.RULES, reduce.RULES)  # by primitive
_FREE = {name for rules in _RULES for name in rules} - {"fft"} | {"iota", "rng_bit_generator"}
# primitives that may be pooling
_POOLING = ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window")
# primitives: pooling if they reduce rows and columns, else free
_REDUCING = ("reduce_sum", "reduce_max", "reduce_min")


def read(function: Callable[..., Any], *inputs: Any, weights: Any = None) -> Network:
    """The network that a function computes, for one input (a batch of 1).

    The function is traced, not run; values that do not depend on its arguments count as weights. Inputs are
    arrays or `jax.ShapeDtypeStruct`s. `weights` is a pytree that the function takes before its inputs;
    None if it takes only inputs.

    >>> import jax.numpy as jnp
    >>> network = read(lambda x: jnp.tanh(x @ jnp.zeros((8, 4))), jax.ShapeDtypeStruct((1, 8), "float32"))
    >>> [layer.macs for layer in network.layers]
    [32]
    """
    try:
        arguments = inputs if weights is None else (weights, *inputs)
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    except FdgError:
        raise
    except Exception as error:
        shapes = ", ".join(quoted(list(x.shape) if hasattr(x, "shape") else x) for x in inputs)
        problem = f"tracing the network with inputs {shapes} fails: {one_line(error)[:300]}"
        raise FdgError(f"{problem}: correct the function, or its input shape (a batch of 1)") from error
    reader = _Reader()
    num_weights = len(jax.tree.leaves(weights))
    reader.run(jaxpr, [graph.CONSTANT] * num_weights + [graph.INPUT] * (len(jaxpr.invars) - num_weights))
    return reader.builder.network()


class _Reader:
    """Follows the equations of a jaxpr, and adds layers to a `Builder`."""

    def __init__(self) -> None:
        self.builder = Builder()
        self._channel_axis = -1  # of feature maps, as in the last convolution

    def run(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """The values of a jaxpr's outputs."""
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= dict.fromkeys(jaxpr.constvars, graph.CONSTANT)

        def value_of(atom: Any) -> Value:
            return graph.CONSTANT if is_literal(atom) else values[atom]

        for eqn in jaxpr.eqns:
            reads = [value_of(atom) for atom in eqn.invars]
            results = self._results(eqn, reads) if any(value.is_data for value in reads) else [graph.CONSTANT]
            outputs_of_eqn = results if len(results) == len(eqn.outvars) else results[:1] * len(eqn.outvars)
            values |= dict(zip(eqn.outvars, outputs_of_eqn, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, reads: list[Value]) -> list[Value]:
        """The values of an equation's outputs, or one value for all of them; `reads` are its inputs."""
        name = eqn.primitive.name
        rules = {"conv_general_dilated": self._convolution, "dot_general": self._product}
        rules |= dict.fromkeys(_POOLING, self._pooling) | dict.fromkeys(_REDUCING, self._reduction)
        try:
            if name in rules:
                return [rules[name](eqn, reads)]
            if inner := bodies(eqn):
                return self._inner_jaxpr(eqn, inner, reads)
            if name not in _FREE:
                raise FdgError("this operation is not supported: give a network without it")
            if name == "broadcast_in_dim":
                grows = math.prod(eqn.outvars[0].aval.shape) > math.prod(eqn.invars[0].aval.shape)
                return [reads[0]._replace(is_full_size=not grows and reads[0].is_full_size)]
            if name in elementwise.RULES:
                shapes, result = [v.aval.shape for v in eqn.invars], eqn.outvars[0].aval.shape
                channel_axis = self._channel_axis if len(result) == 4 else -1
                return [self.builder.elementwise(reads, shapes, result, channel_axis)]
            return [self.builder.free_result(reads)]
        except FdgError as error:
            message = str(error)
            raise (
                error
                if message.startswith("operation ")
                else FdgError(
                    f"operation {name} of {', '.join(str(list(v.aval.shape)) for v in eqn.invars)}: {message}"
                )
            ) from None

    def _inner_jaxpr(self, eqn: Any, inner: Sequence[Any], reads: list[Value]) -> list[Value]:
        """Follows calls and loops of known length. Other loops and branches may not contain layers."""
        if eqn.primitive.name in ("cond", "while"):
            if any(_has_layers(body.jaxpr) for body in inner):
                raise FdgError(
                    "layers run in a branch, or a loop of unknown length; give a network that always runs all"
                )
            return [self.builder.free_result(reads)]
        (body,) = inner
        arguments = [reads[i] for i in body.operands]
        results = [graph.CONSTANT] * len(body.jaxpr.outvars)
        for _ in range(body.trips if _has_layers(body.jaxpr) else 1):
            results = self.run(body.jaxpr, arguments)
            for i, result in body.carry:
                arguments[i] = results[result]
        return [results[i] for i in body.results]

    def _convolution(self, eqn: Any, reads: list[Value]) -> Value:
        params = eqn.params
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        image, kernel, result = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
        (batch, channel, *axes), (out, _, *window), (_, out_channel, *out_axes) = numbers
        if image[batch] > 1 or params["batch_group_count"] > 1:
            raise FdgError(f"a batch of {image[batch]}; give an input of one example")
        self._channel_axis = out_channel
        inputs, sizes = [image[axis] for axis in axes], [kernel[axis] for axis in window]
        dilation = params["lhs_dilation"]
        if max(dilation, default=1) > 1:
            layer = transposed_layer(image[channel], kernel[out], inputs, sizes, dilation, groups)
        else:
            channels = kernel[out], image[channel]
            outputs = [result[axis] for axis in out_axes]
            layer = graph.window_layer(channels, inputs, outputs, sizes, params["window_strides"], groups)
        return self.builder.add_layer(layer, *reads)

    def _product(self, eqn: Any, reads: list[Value]) -> Value:
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        left, right = (v.aval.shape for v in eqn.invars)
        inner, batches = (math.prod(left[axis] for axis in axes) for axes in (contracted, batch))
        rows, columns = (math.prod(side) // max(inner * batches, 1) for side in (left, right))
        left_value, right_value = reads
        return self.builder.add_product((batches, rows, columns, inner), left_value, right_value)

    def _pooling(self, eqn: Any, reads: list[Value]) -> Value:
        image, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        kernel, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
        pooled = [axis for axis in range(len(image)) if kernel[axis] > 1 or strides[axis] > 1]
        if len(image) < 3 or not pooled or min(pooled) == 0 or image[0] > 1:
            return self.builder.free_result(reads)
        axes = [axis for axis in range(1, len(image)) if axis != self._channel_axis % len(image)]
        axes = axes if set(pooled) <= set(axes) else [axis for axis in range(1, len(image)) if axis in pooled]
        return self._pooling_layer(image, result, kernel, strides, axes, reads)

    def _reduction(self, eqn: Any, reads: list[Value]) -> Value:
        """A mean over rows and columns is pooling."""
        image = eqn.invars[0].aval.shape
        axes = [axis for axis in range(1, len(image)) if axis != self._channel_axis % max(len(image), 1)]
        if len(image) != 4 or sorted(eqn.params["axes"]) != axes or image[0] > 1:
            return self.builder.free_result(reads)
        return self._pooling_layer(image, (1,) * len(image), image, image, axes, reads)

    def _pooling_layer(
        self,
        image: Sequence[int],
        result: Sequence[int],
        kernel: Sequence[int],
        strides: Sequence[int],
        axes: Sequence[int],
        reads: list[Value],
    ) -> Value:
        """Adds pooling along `axes`; the other arguments but `reads` are sizes by axis."""
        channels = math.prod(size for axis, size in enumerate(image) if axis not in axes)
        sizes = ([by_axis[axis] for axis in axes] for by_axis in (image, result, kernel, strides))
        inputs, outputs, window, steps = sizes
        layer = graph.window_layer((channels, channels), inputs, outputs, window, steps, channels, 0)
        return self.builder.add_layer(layer, *reads[:1])


def _has_layers(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in ("conv_general_dilated", "dot_general", *_POOLING)
        or any(_has_layers(body.jaxpr) for body in bodies(eqn))
        for eqn in open_jaxpr(jaxpr).eqns
    )
