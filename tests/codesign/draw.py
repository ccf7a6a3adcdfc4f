"""Random layers, sub-accelerators and scheduling problems of many sizes and kinds."""

import jax.numpy as jnp
import numpy as np

from envs.codesign import cost, layers, schedule

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


def random_work(seed, num_layers, num_subs=None):
    """A scheduling problem: two or three chains of layers, or two networks with branches.

    There are two or three sub-accelerators, unless `num_subs` is set. Cycles differ by up to 64 times between
    layers and 8 times between sub-accelerators; a transfer takes at most half as long as its layer. Energies
    equal cycles. `cpsat.json` has the optima of the first seeds, by number of layers.
    """
    random = np.random.default_rng(seed)
    num_subs = num_subs or int(random.integers(2, 4))
    base = 2 ** random.uniform(8, 14, num_layers)
    cycles = np.maximum(1, base[:, None] * 2 ** random.uniform(-1.5, 1.5, (num_layers, num_subs))).astype(int)
    transfer = (base * random.uniform(0, 0.5) * random.uniform(0, 1, num_layers)).astype(int)
    before = np.zeros((num_layers, num_layers), bool)
    if seed % 3 < 2:
        starts = random.choice(np.arange(1, num_layers), 1 + seed % 3, replace=False)  # of further chains
        before[np.arange(num_layers - 1), np.arange(1, num_layers)] = True
        before[:, starts] = False
    else:
        for low, high in ((0, num_layers // 2), (num_layers // 2, num_layers)):
            for j in range(low + 1, high):
                before[random.integers(max(low, j - 3), j, random.integers(1, 3)), j] = True
    return schedule.Work(
        jnp.asarray(cycles, jnp.int32), jnp.asarray(cycles, jnp.float32), jnp.asarray(transfer, jnp.int32),
        jnp.asarray(before),
    )  # fmt: skip
