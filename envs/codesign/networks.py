"""Well-known networks as layers, for checking a cost model."""

from collections.abc import Callable

from envs.codesign.layers import (
    Layer,
    addition,
    convolution,
    depthwise,
    gemm,
    pooling,
    transposed_convolution,
)
from fdg.errors import unknown_name


def alexnet() -> list[Layer]:
    """The five convolutions of AlexNet, as in Eyeriss: two groups in the second, fourth and fifth."""
    return [
        convolution(3, 96, 227, kernel=11, stride=4, padding=0),
        convolution(96, 256, 27, kernel=5, groups=2),
        convolution(256, 384, 13),
        convolution(384, 384, 13, groups=2),
        convolution(384, 256, 13, groups=2),
    ]


def _resnet(blocks: tuple[int, ...], expansion: int) -> list[Layer]:
    """A ResNet (arXiv 1512.03385, table 1) for 224 x 224 images.

    `blocks` are residual blocks per stage, `expansion` is the ratio of a block's outputs to its width. Above
    1, blocks are bottlenecks, with the stride in the 3 x 3 convolution.
    """
    # Pooling reads 112 rows, and one of padding.
    layers = [convolution(3, 64, 224, kernel=7, stride=2), pooling(64, 113, kernel=3, stride=2)]
    channels, size = 64, 56
    for stage, num_blocks in enumerate(blocks):
        width = 64 << stage
        for block in range(num_blocks):
            stride, inner, outputs = 2 if stage and not block else 1, channels, expansion * width
            if expansion > 1:
                layers += [convolution(channels, width, size, kernel=1)]
                inner = width
            layers += [convolution(inner, width, size, stride=stride)]
            if channels != outputs:
                layers += [convolution(channels, outputs, size, kernel=1, stride=stride)]
            size, channels = size // stride, outputs
            last = convolution(width, outputs, size, kernel=1 if expansion > 1 else 3)
            layers += [last, addition(outputs, size)]
    return [*layers, pooling(channels, 7, kernel=7, stride=1), gemm(1, 1000, channels)]


def resnet18() -> list[Layer]:
    """ResNet-18: 1.81 billion multiplications."""
    return _resnet((2, 2, 2, 2), 1)


def resnet50() -> list[Layer]:
    """ResNet-50: 4.1 billion multiplications."""
    return _resnet((3, 4, 6, 3), 4)


def mobilenet_v2() -> list[Layer]:
    """MobileNetV2 (arXiv 1801.04381, table 2) for 224 x 224 images: 0.3 billion multiplications."""
    stages = (  # expansion, filters, blocks, stride of the first block
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    )  # fmt: skip
    layers, channels, size = [convolution(3, 32, 224, stride=2)], 32, 112
    for expansion, width, blocks, first_stride in stages:
        for block in range(blocks):
            stride, inner = first_stride if not block else 1, expansion * channels
            if expansion > 1:
                layers += [convolution(channels, inner, size, kernel=1)]
            layers += [depthwise(inner, size, stride=stride)]
            size //= stride
            layers += [convolution(inner, width, size, kernel=1)]
            if stride == 1 and channels == width:
                layers += [addition(width, size)]
            channels = width
    layers += [convolution(320, 1280, 7, kernel=1), pooling(1280, 7, kernel=7, stride=1)]
    return [*layers, gemm(1, 1000, 1280)]


def unet(size: int = 128, height: int = 4, width: int = 16) -> list[Layer]:
    """A U-Net (arXiv 1505.04597) that keeps the image's size, with two convolutions at each level."""
    layers, channels = [], 1
    for level in range(height):
        if level:
            layers += [pooling(channels, size, kernel=2, stride=2)]
            size //= 2
        layers += [
            convolution(channels, width << level, size),
            convolution(width << level, width << level, size),
        ]
        channels = width << level
    for level in reversed(range(height - 1)):
        layers += [transposed_convolution(channels, width << level, size, kernel=2, stride=2)]
        size *= 2
        layers += [
            convolution(channels, width << level, size),
            convolution(width << level, width << level, size),
        ]
        channels = width << level
    return [*layers, convolution(channels, 1, size, kernel=1)]


NETWORKS: dict[str, Callable[[], list[Layer]]] = {
    "alexnet": alexnet, "mobilenet_v2": mobilenet_v2, "resnet18": resnet18, "resnet50": resnet50, "unet": unet
}  # fmt: skip


def get(name: str) -> list[Layer]:
    """The layers of a well-known network.

    Raises:
      FdgError: the name is none of `NETWORKS`.

    >>> round(sum(layer.macs for layer in get("resnet18")) / 1e9, 2)
    1.81
    """
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    return NETWORKS[name]()
