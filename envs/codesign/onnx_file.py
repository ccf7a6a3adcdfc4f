"""The layers of an ONNX file: reads only shapes; weights may be absent."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.codesign import graph
from envs.codesign.graph import Builder, Network, Value
from envs.codesign.layers import transposed_convolution
from fdg.errors import FdgError, nearest, one_line
from fdg.reading import read_bytes

_MAX_FILE_BYTES = 2**31  # the limit of protocol buffers

# Free operations: computed while a feature map is transferred, or only changes of indices.
_FREE = """
Abs Acos And ArgMax ArgMin Asin Atan BatchNormalization BitShift Cast CastLike Ceil Celu Clip Compress Concat
Constant ConstantOfShape Cos CumSum DepthToSpace DequantizeLinear Dropout Elu Equal Erf Exp Expand EyeLike
Flatten Floor Gather GatherElements GatherND Gelu Greater GreaterOrEqual GroupNormalization HardSigmoid
HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual
Log LogSoftmax LpNormalization MeanVarianceNormalization Mish Mod Neg NonZero Not OneHot Or Pad
QuantizeLinear RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize Round Selu Shrink Sigmoid
Sign Sin Sinh Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Swish Tanh
ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Xor
""".split()
# operators: additions if they read several feature maps, else free
_ELEMENTWISE = "Add Sub Mul Div Max Min Sum Mean Pow PRelu Where".split()
# operators: pooling if they reduce rows and columns, else free
_REDUCING = ("ReduceMean", "ReduceMax", "ReduceSum", "ReduceMin")


def read(path: Path) -> Network:
    """The network of an ONNX file, for one input: an unknown batch size counts as 1."""
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise FdgError(f"{path}: reading it needs the package onnx: pip install 'fdg[codesign]'") from error
    content = read_bytes(path, _MAX_FILE_BYTES)
    try:
        model = onnx.load_model_from_string(content)
        if model.functions:
            from onnx import inliner

            model = inliner.inline_local_functions(model)
    except Exception as error:  # protocol buffers have no common exception class
        raise FdgError(f"{path} cannot be read as ONNX: {one_line(error)[:200]}") from error
    if not model.graph.node:
        raise FdgError(f"{path} cannot be read as ONNX: it has no nodes")
    try:
        return _Reader(model).network()
    except FdgError as error:
        raise FdgError(f"{path}: {error}") from None


def _infer_shapes(model: Any) -> dict[str, tuple[int | None, ...]]:
    """Shapes of all arrays that can be inferred; None for unknown sizes."""
    from onnx import shape_inference

    constants = {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.input:
        sizes = tensor.type.tensor_type.shape.dim
        if tensor.name in constants or not sizes:
            continue
        if sizes[0].dim_value > 1:
            batch = sizes[0].dim_value
            raise FdgError(f"input '{tensor.name}' has a batch of {batch}; export it with a batch of 1")
        sizes[0].dim_value = 1
        for axis, size in enumerate(sizes):
            if size.dim_value < 1:
                name = f" ('{size.dim_param}')" if size.dim_param else ""
                raise FdgError(
                    f"input '{tensor.name}': the size of axis {axis} is not fixed{name}; "
                    "export it with fixed sizes"
                )
    del model.graph.value_info[:]  # these shapes may be for another batch size
    for tensor in model.graph.output:
        tensor.type.tensor_type.ClearField("shape")
    try:
        inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception as error:
        raise FdgError(f"its shapes do not fit together ({one_line(error)[:200]})") from error
    shapes: dict[str, tuple[int | None, ...]] = {x.name: tuple(x.dims) for x in inferred.initializer}
    for tensor in (*inferred.input, *inferred.value_info, *inferred.output):
        tensor_type = tensor.type.tensor_type
        if tensor_type.HasField("shape"):
            shapes[tensor.name] = tuple(size.dim_value or None for size in tensor_type.shape.dim)
    return shapes


class _Reader:
    """Follows the nodes of a graph, and adds layers to a `Builder`.

    `_rules` has a function for each operator, which takes a node and returns the value of its outputs. Of
    these functions, `weights` and `right` are positions among the node's inputs.
    """

    def __init__(self, model: Any):
        onnx_graph = model.graph
        self._graph, self._builder = onnx_graph, Builder()
        self._values: dict[str, Value] = {tensor.name: graph.INPUT for tensor in onnx_graph.input}
        self._constants: dict[str, Any] = {tensor.name: tensor for tensor in onnx_graph.initializer}
        self._values |= dict.fromkeys(self._constants, graph.CONSTANT)
        rules: dict[str, Callable] = {"Conv": self._convolution, "ConvInteger": self._convolution}
        rules |= {"QLinearConv": functools.partial(self._convolution, weights=3)}
        rules |= {"ConvTranspose": self._transposed_convolution}
        rules |= dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), self._pooling)
        rules |= dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), self._pooling)
        rules |= {"Gemm": self._gemm, "MatMul": self._matmul, "MatMulInteger": self._matmul}
        rules |= {"QLinearMatMul": functools.partial(self._matmul, right=3)}
        rules |= dict.fromkeys(_ELEMENTWISE, self._elementwise)
        rules |= dict.fromkeys(("Shape", "Size"), lambda node: graph.CONSTANT)
        rules |= dict.fromkeys(_FREE, self._free_result) | dict.fromkeys(_REDUCING, self._reduction)
        rules |= {"Constant": self._constant}
        self._rules = rules
        aliases: dict[str, str] = {}  # shape inference does not see constants through an Identity
        for node in onnx_graph.node:
            self._check_supported(node)
            node.input[:] = [aliases.get(name, name) for name in node.input]
            if node.op_type == "Identity":
                aliases |= zip(node.output, node.input, strict=False)
        self._shapes = _infer_shapes(model)

    def _check_supported(self, node: Any) -> None:
        """Refuses an operator that is not supported."""
        name = _operator(node)
        if name not in self._rules:
            close = nearest(name, [known for known in self._rules if known not in _FREE], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise FdgError(
                f"{_node_label(node)}: this operator is not supported{hint}; export with convolutions, "
                "pooling, Gemm, MatMul and elementwise operators"
            )

    def network(self) -> Network:
        """The network of the whole graph."""
        for node in self._graph.node:
            try:
                value = self._rules[_operator(node)](node)
            except FdgError as error:
                raise FdgError(f"{_node_label(node)}: {error}") from None
            except Exception as error:  # exceptions of the package onnx have no common class
                problem = f"its inputs or attributes cannot be read ({one_line(error)[:200]})"
                raise FdgError(f"{_node_label(node)}: {problem}; export it again") from error
            self._values |= dict.fromkeys(node.output, value)
        return self._builder.network()

    def _inputs(self, node: Any) -> list[Value]:
        return [self._values.get(name, graph.CONSTANT) for name in node.input if name]

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None or None in shape:
            raise FdgError(f"the sizes of '{name}' are not known; export it with fixed sizes")
        return tuple(size for size in shape if size is not None)

    def _constant(self, node: Any) -> Value:
        self._constants[node.output[0]] = next(iter(_attributes(node).values()))
        return graph.CONSTANT

    def _free_result(self, node: Any) -> Value:
        return self._builder.free_result(self._inputs(node))

    def _elementwise(self, node: Any) -> Value:
        names, inputs = [name for name in node.input if name], self._inputs(node)
        if len({value.sources for value in inputs if value.is_data}) < 2:
            return self._builder.free_result(inputs)
        shape = self._shape(node.output[0])
        return self._builder.elementwise(
            inputs, [self._shape(name) for name in names], shape, 1 if len(shape) == 4 else -1
        )

    def _convolution(self, node: Any, weights: int = 1) -> Value:
        kernel = self._shape(node.input[weights])
        groups = _attributes(node).get("group", 1)
        _check_fits(self._shape(node.input[0])[1], kernel[1] * groups)
        return self._window_layer(node, kernel[2:], (kernel[0], kernel[1] * groups), groups)

    def _transposed_convolution(self, node: Any) -> Value:
        attrs = _attributes(node)
        kernel, inputs = self._shape(node.input[1]), self._shape(node.input[0])
        _check_fits(inputs[1], kernel[0])
        strides = attrs.get("strides", [1] * len(kernel[2:]))
        return self._builder.add_layer(
            transposed_layer(kernel[0], kernel[1], inputs[2:], kernel[2:], strides, attrs.get("group", 1)),
            self._values[node.input[0]],
        )

    def _pooling(self, node: Any) -> Value:
        _, channels, *sizes = self._shape(node.input[0])
        is_global = node.op_type.startswith(("Global", "Reduce"))
        kernel = sizes if is_global else _attributes(node)["kernel_shape"]
        return self._window_layer(node, kernel, (channels, channels), channels, has_weights=0)

    def _window_layer(
        self, node: Any, kernel: Sequence[int], channels: tuple[int, int], groups: int, has_weights: int = 1
    ) -> Value:
        inputs = self._shape(node.input[0])[2:]
        outputs = self._shape(node.output[0])[2:] or [1] * len(inputs)
        strides = _attributes(node).get("strides", [1] * len(kernel))
        layer = graph.window_layer(channels, inputs, outputs, kernel, strides, groups, has_weights)
        return self._builder.add_layer(layer, *self._inputs(node)[:1])

    def _reduction(self, node: Any) -> Value:
        """A mean over rows and columns is pooling."""
        if len(self._shapes.get(node.input[0]) or ()) != 4:
            return self._free_result(node)
        axes = _attributes(node).get("axes")
        if axes is None and len(node.input) > 1 and (name := node.input[1]):
            from onnx import numpy_helper

            if (axes := self._constants.get(name)) is None:
                raise FdgError(f"its axes '{name}' are computed; export it with constant axes")
            # A list of integers, or a tensor.
            axes = axes if isinstance(axes, list) else numpy_helper.to_array(axes).tolist()
        if not axes or sorted(axis % 4 for axis in axes) != [2, 3]:
            return self._free_result(node)
        return self._pooling(node)

    def _gemm(self, node: Any) -> Value:
        left = self._shape(node.input[0])
        rows, inner = reversed(left) if _attributes(node).get("transA", 0) else left
        right = self._shape(node.input[1])
        columns, expected = right if _attributes(node).get("transB", 0) else reversed(right)
        _check_fits(inner, expected)
        return self._product(node, (1, rows, columns, inner), 1)

    def _matmul(self, node: Any, right: int = 1) -> Value:
        # the shapes of the two operands
        a, b = self._shape(node.input[0]), self._shape(node.input[right])
        a = (1, *a) if len(a) == 1 else a
        columns = b[-1] if len(b) > 1 else 1
        _check_fits(a[-1], b[-2] if len(b) > 1 else b[0])
        batches = math.prod(b[:-2])  # above 1 in attention
        batches = 1 if batches == 1 else math.prod(np.broadcast_shapes(a[:-2], b[:-2]))
        rows = math.prod(a[:-1]) if batches == 1 else a[-2]
        return self._product(node, (batches, rows, columns, a[-1]), right)

    def _product(self, node: Any, sizes: tuple[int, int, int, int], right: int) -> Value:
        left_value, right_value = (self._values.get(node.input[at], graph.CONSTANT) for at in (0, right))
        return self._builder.add_product(sizes, left_value, right_value)


def transposed_layer(
    in_channels: int,
    out_channels: int,
    inputs: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    groups: int,
) -> Any:
    """A transposed convolution as a layer; raises an `FdgError` unless it is square and has one group."""
    if len(inputs) != 2 or len(set(kernel)) > 1 or len(set(strides)) > 1 or groups > 1:
        raise FdgError(
            f"a transposed convolution of kernel {tuple(kernel)}, strides {tuple(strides)} and {groups} "
            "groups; only square ones of one group are supported"
        )
    return transposed_convolution(in_channels, out_channels, *inputs, kernel=kernel[0], stride=strides[0])


def _check_fits(size: int, expected: int) -> None:
    """Raises unless weights fit the feature map's channels, which ONNX's shape inference does not check."""
    if size != expected:
        raise FdgError(f"its input has {size} channels, and its weights are for {expected}; export it again")


def _operator(node: Any) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _node_label(node: Any) -> str:
    return f"node '{node.name or ' '.join(node.output)}' ({_operator(node)})"


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
