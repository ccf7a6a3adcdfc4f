"""Random layers and sub-accelerators of many sizes and kinds."""

import numpy as np

from envs.codesign import cost, layers

KNOWN = ("dla", "shi", "rs", "systolic-os", "systolic-ws", "systolic-is")
_KINDS = ("convolution", "depthwise", "transposed", "gemm", "pooling", "addition")


def random_layer(random):
    size, stride = int(random.integers(1, 40)), int(random.integers(1, 4))
    channels, kernels = (int(2 ** random.uniform(0, 6)) for _ in range(2))
    kernel, groups = int(random.choice([1, 2, 3, 5, 7])), int(random.choice([1, 1, 2, 4]))
    match random.choice(_KINDS, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]):
        case "convolution":
            both = channels * groups, kernels * groups
            return layers.convolution(*both, size, size + 3, kernel=kernel, stride=stride, groups=groups)
        case "depthwise":
            return layers.depthwise(channels, size, kernel=kernel, stride=stride)
        case "transposed":
            return layers.transposed_convolution(channels, kernels, size, kernel=kernel, stride=stride)
        case "gemm":
            return layers.gemm(size, kernels, channels)
        case "pooling":
            return layers.pooling(channels, size + kernel, kernel=kernel, stride=stride)
        case _:
            return layers.addition(channels, size)


def random_layers(random, number):
    return [random_layer(random) for _ in range(number)]


def random_subs(random, number):
    """`SubAccelerators` of arrays [number]."""
    rates = [(2 ** random.uniform(-2, 7, number)).astype(np.float32) for _ in range(2)]
    template = random.integers(0, len(KNOWN), number).astype(np.int32)
    rows, columns = random.integers(1, 65, (2, number)).astype(np.int32)
    return cost.SubAccelerators(
        template, rows, columns, (2 ** random.uniform(8, 21, number)).astype(np.int32), *rates
    )
