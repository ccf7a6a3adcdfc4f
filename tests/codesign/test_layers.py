import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.codesign import layers, networks
from envs.codesign.layers import LARGEST_COUNT, Layer, product
from tests.codesign.draw import random_layers
from tests.refusing import refuses

COUNTS = {
    name: jax.jit(jax.vmap(getattr(layers, name)))
    for name in ("macs", "weight_words", "input_words", "output_words")
}


PRODUCTS = jax.jit(jax.vmap(lambda x: product(*x)))


def windows(size, kernel, stride, padding):
    """The input indices of each window."""
    starts = range(-padding, size + padding - kernel + 1, stride)
    return [[i for i in range(start, start + kernel) if 0 <= i < size] for start in starts]


@pytest.mark.parametrize(
    "size, kernel, stride", [(7, 3, 1), (8, 3, 2), (5, 1, 2), (9, 5, 3), (6, 2, 3), (13, 4, 2)]
)
def test_counts_of_convolutions(size, kernel, stride):
    down, across = windows(size, kernel, stride, kernel // 2), windows(size + 2, kernel, stride, kernel // 2)
    layer = layers.convolution(6, 4, size, size + 2, kernel=kernel, stride=stride, groups=2)
    assert (layer.out_rows, layer.out_columns) == (len(down), len(across))
    assert layer.macs == 4 * 3 * len(down) * len(across) * kernel**2
    assert layer.weight_words == 4 * 3 * kernel**2
    touched = len({i for window in down for i in window}) * len({i for window in across for i in window})
    # Inputs between disjoint windows are not read; an unreached border may still be counted.
    assert 6 * touched <= layer.input_words <= 6 * size * (size + 2)
    if stride <= kernel and (size, kernel, stride) != (13, 4, 2):
        assert layer.input_words == 6 * touched


def test_counts_of_transposed_convolutions():
    image, kernels = np.arange(25.0).reshape(1, 1, 5, 5), np.arange(48.0).reshape(3, 1, 4, 4)
    layer = layers.transposed_convolution(1, 3, 5, kernel=4, stride=2)
    # Multiplications by inserted zeros do not count: each of the 25 inputs is multiplied by every weight.
    assert layer.macs == image.size * kernels.size and layer.output_words == 3 * 10 * 10
    assert layer.input_words == image.size and layer.weight_words == kernels.size
    assert (
        layers.transposed_convolution(8, 8, 5, kernel=3, stride=2).macs == 8 * 8 * 4 * 25 * 4
    )  # padded to 4 x 4


def test_counts_of_pooling_and_additions():
    pool, add = layers.pooling(8, 6, kernel=2, stride=2), layers.addition(8, 6)
    assert (pool.macs, pool.weight_words, pool.input_words, pool.output_words) == (0, 0, 8 * 36, 8 * 9)
    assert (add.macs, add.weight_words, add.input_words, add.output_words) == (0, 0, 2 * 8 * 36, 8 * 36)


def test_published_counts_of_networks():
    # AlexNet's convolutions with groups: 666 M; ResNet-18 and -50, MobileNetV2: torchvision's model cards.
    found = {name: sum(layer.macs for layer in make()) for name, make in networks.NETWORKS.items()}
    assert found["alexnet"] == 665_784_864
    assert found["resnet18"] == pytest.approx(1.81e9, rel=0.01)
    assert found["resnet50"] == pytest.approx(4.09e9, rel=0.01)
    assert found["mobilenet_v2"] == pytest.approx(0.30e9, rel=0.01)
    weights = {name: sum(layer.weight_words for layer in make()) for name, make in networks.NETWORKS.items()}
    assert weights["resnet18"] == pytest.approx(11.69e6, rel=0.01)
    assert weights["resnet50"] == pytest.approx(25.56e6, rel=0.01)
    assert weights["mobilenet_v2"] == pytest.approx(3.50e6, rel=0.02)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_counts_of_stacked_layers(seed):
    found = random_layers(np.random.default_rng(seed), 32)
    stacked = layers.stack(found)
    for name in COUNTS:
        counts = COUNTS[name](stacked)
        assert counts.dtype == jnp.int32
        assert counts.tolist() == [getattr(layer, name) for layer in found]


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_products_saturate(seed):
    factors = (2 ** np.random.default_rng(seed).uniform(0, 14, (200, 4))).astype(np.int64)
    near_limit = [[a, LARGEST_COUNT // a + more, 1, 1] for a in (3, 7, 1000, 46341) for more in (-1, 0, 1, 2)]
    factors = np.concatenate([factors, near_limit])
    found = PRODUCTS(jnp.asarray(factors, jnp.int32))
    assert found.tolist() == [
        min(int(np.prod(list(map(int, x)), dtype=object)), LARGEST_COUNT) for x in factors
    ]


def test_sums_saturate():
    a = jnp.asarray([5, LARGEST_COUNT - 3, LARGEST_COUNT - 3, LARGEST_COUNT])
    b = jnp.asarray([6, 3, 4, LARGEST_COUNT])
    assert layers.add(a, b).tolist() == [11, LARGEST_COUNT, LARGEST_COUNT, LARGEST_COUNT]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Layer(0, 3, 8, 8), "out_channels is 0; give a whole number of at least 1"),
        (lambda: Layer(4, 3.5, 8, 8), "in_channels is 3.5; give a whole number"),
        (lambda: Layer(4, 3, True, 8), "out_rows is True; give a whole number"),
        (lambda: Layer(4, 3, 8, 8, has_weights=2), "has_weights is 2; give 0 or 1"),
        (lambda: Layer(4, 3, 8, 8, groups=2), "in_channels=3 does not divide into groups=2"),
        (lambda: layers.convolution(3, 4, 2, kernel=7, padding=0), "the kernel of 7 is larger than the"),
        (lambda: layers.convolution(3, 4, 9, stride=0), "stride is 0; give a number of at least 1"),
        (lambda: layers.gemm(4096, 4096, 4096), "68,719,476,736 multiplications, more than the 2,147,000"),
        (lambda: layers.addition(2**20, 64), "words of inputs, more than"),
        (lambda: layers.transposed_convolution(3, 4, 8, kernel=0, stride=2), "kernel 0, stride 2; give at"),
        (lambda: networks.get("resnet81"), "unknown network 'resnet81': did you mean 'resnet18'?"),
    ],
)  # fmt: skip
def test_invalid_layers(make, message):
    with refuses(message):
        make()
