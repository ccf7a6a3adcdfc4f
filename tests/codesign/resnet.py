"""ResNet-18 in ONNX and in Flax: inputs for tests of `envs.codesign.given`."""

import flax.linen as nn
import jax.numpy as jnp
from onnx import TensorProto, helper

STAGES = (64, 128, 256, 512)


def onnx_model(rows=224, batch="batch", widths=STAGES, classes=1000):
    """A model whose weights have shapes but no stored values."""
    nodes, weights = [], []

    def add(kind, *inputs, **attributes):
        name = f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [name], name=f"node {name}", **attributes))
        return name

    def weight(*sizes):
        tensor = TensorProto(name=f"w{len(weights)}", dims=sizes, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="absent.bin")
        weights.append(tensor)
        return tensor.name

    def convolution(x, into, out, kernel, stride, padding):
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
        x = add("Conv", x, weight(out, into, kernel, kernel), **attributes)
        return add("BatchNormalization", x, *(weight(out) for _ in range(4)))

    x = add("Relu", convolution("image", 3, widths[0], 7, 2, 3))
    x = add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = add("Relu", convolution(x, channels, width, 3, stride, 1))
            y = convolution(y, width, width, 3, 1, 1)
            x = convolution(x, channels, width, 1, stride, 0) if stride > 1 else x
            x, channels = add("Relu", add("Add", y, x)), width
    x = add("Flatten", add("GlobalAveragePool", x))
    x = add("Gemm", x, weight(classes, channels), weight(classes), transB=1)
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, rows, rows])
    result = helper.make_tensor_value_info(x, TensorProto.FLOAT, [batch, classes])
    graph = helper.make_graph(nodes, "resnet18", [image], [result], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


class ResNet18(nn.Module):
    widths: tuple = STAGES
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        def convolution(x, width, kernel, stride):
            padding = [(kernel // 2, kernel // 2)] * 2
            x = nn.Conv(width, (kernel, kernel), (stride, stride), padding, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=False)(x)

        x = nn.relu(convolution(x, self.widths[0], 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])
        for stage, width in enumerate(self.widths):
            for block in range(2):
                stride = 2 if stage and not block else 1
                y = nn.relu(convolution(x, width, 3, stride))
                y = convolution(y, width, 3, 1)
                x = nn.relu(y + (convolution(x, width, 1, stride) if stride > 1 else x))
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))
