"""User networks, from ONNX files and from JAX functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import nnx
from onnx import TensorProto, helper

from envs.codesign import given, networks
from envs.codesign.layers import (
    Layer,
    addition,
    convolution,
    depthwise,
    gemm,
    pooling,
    transposed_convolution,
)
from tests.codesign import resnet
from tests.refusing import refuses


def image(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_resnet18_from_onnx_and_flax(tmp_path):
    onnx.save(resnet.onnx_model(), tmp_path / "resnet18.onnx")
    of_onnx = given.from_onnx(tmp_path / "resnet18.onnx")
    of_flax = given.from_function(resnet.ResNet18(), image(1, 224, 224, 3))
    assert of_onnx == of_flax and len(of_onnx.layers) == 31
    macs = sum(layer.macs for layer in of_onnx.layers)
    assert abs(macs / 1.81e9 - 1) < 0.01
    # The hand-written list has another order and other padding in pooling: compare layers with weights.
    hand_written = [one for one in networks.get("resnet18") if one.has_weights]
    assert sorted(map(str, hand_written)) == sorted(str(one) for one in of_onnx.layers if one.has_weights)
    # Stem, pooling, a block of two convolutions, addition; later a block with a convolution as shortcut.
    assert [pair for pair in of_onnx.branches if pair[1] <= 4] == [(0, 1), (1, 2), (1, 4), (2, 3), (3, 4)]
    assert {(7, 8), (8, 9), (7, 10), (9, 11), (10, 11)} <= set(of_onnx.branches)


def all_layer_kinds(x):
    """Grouped, depthwise and transposed convolutions, pooling, attention, a gate, a loop."""
    kernel = jnp.zeros((3, 3, 2, 8))
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolve(x, kernel, stride, **settings):
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", **settings)

    x = jax.nn.swish(convolve(x, kernel, 2, dimension_numbers=numbers, feature_group_count=2))  # [1, 4, 4, 8]
    x = convolve(x, jnp.zeros((3, 3, 1, 8)), 1, dimension_numbers=numbers, feature_group_count=8)
    x = nn.max_pool(x, (2, 2), (2, 2))  # [1, 2, 2, 8]
    x = jax.lax.conv_transpose(x, jnp.zeros((2, 2, 8, 4)), (2, 2), "SAME")  # [1, 4, 4, 4]
    gate = jax.nn.sigmoid(jnp.mean(x, (1, 2)) @ jnp.zeros((4, 4)))
    x = (x * gate[:, None, None]).reshape(16, 2, 2)
    scores = jnp.einsum("thd,shd->hts", x, x)  # two heads
    y = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), x).reshape(16, 4)
    y = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, jnp.zeros((3, 4, 4)))[0]
    return y + x.reshape(16, 4)


def test_layers_and_branches_of_a_jaxpr():
    found = given.from_function(all_layer_kinds, image(1, 8, 8, 4))
    attention = Layer(32, 4, 16, 1, groups=2), Layer(4, 32, 16, 1, groups=2)
    assert found.layers[:4] == (
        convolution(4, 8, 8, stride=2, groups=2),
        depthwise(8, 4),
        pooling(8, 4, kernel=2, stride=2),
        transposed_convolution(8, 4, 2, kernel=2, stride=2),
    )
    assert found.layers[4:6] == (pooling(4, 4, kernel=4, stride=1), gemm(1, 4, 4))
    assert found.layers[6:] == (*attention, *[gemm(16, 4, 4)] * 3, addition(4, 1, 16))
    inputs_of = [sorted(i for i, j in found.branches if j == at) for at in range(len(found.layers))]
    assert inputs_of == [[], [0], [1], [2], [3], [4], [3, 5], [3, 5, 6], [7], [8], [9], [3, 5, 10]]


class Small(nnx.Module):
    def __init__(self, rngs):
        self.convolution = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(nnx.relu(self.norm(self.convolution(x))).mean((1, 2)))


def test_from_module(tmp_path, monkeypatch):
    expected = (convolution(3, 4, 8), pooling(4, 8, kernel=8, stride=1), gemm(1, 2, 4))
    assert given.from_function(Small(nnx.Rngs(0)), image(1, 8, 8, 3)) == (expected, None)
    (tmp_path / "nets_of_mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def dense(x): return x @ jnp.zeros((8, 4))\n"
        "def made(): return dense, jnp.zeros((1, 8))\n"
        "def fails(): raise ValueError('no\\nweights')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert given.from_module("nets_of_mine:dense", (1, 8)).layers == (gemm(1, 4, 8),)
    assert given.from_module("nets_of_mine:made") == given.from_module("nets_of_mine:dense", (1, 8))
    for name, shape, message in (
        ("nets_of_mine:dense", (), "the shape of its input is missing: input = [1, 224, 224, 3]"),
        ("nets_of_mine:dense", (1, 9), "tracing the network with inputs [1, 9] fails"),
        ("nets_of_mine:dence", (1, 8), "did you mean 'dense'?"),
        ("nets_of_mine:number", (1, 8), "3 is not a network: give a function of arrays, or a module"),
        ("nets_of_mine:fails", (1, 8), "calling it fails: ValueError: no weights"),
        ("nets_of_yours:dense", (1, 8), "there is no module 'nets_of_yours'"),
    ):
        with refuses(message):
            given.from_module(name, shape)


def three_axes(x):
    return jax.lax.conv_general_dilated(x, jnp.zeros((1, 1, 3, 3, 3)), (1, 1, 1), "SAME")


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        (lambda x: jnp.fft.fft(x), (1, 8), "operation fft of [1, 8]: this operation is not supported"),
        (lambda x: jnp.tanh(x), (1, 8), "it has no convolution or matrix product"),
        (three_axes, (1, 1, 8, 8, 8), "windows along 3 axes; one or two are supported"),
        (nn.Conv(4, (3, 3)), (8, 8, 8, 3), "a batch of 8; give an input of one example"),
        (nn.Conv(4, (3, 3), (1, 2)), (1, 8, 8, 3), "strides (1, 2) differ"),
        (nn.ConvTranspose(4, (3, 3), (1, 2)), (1, 8, 8, 3), "square ones of one group are supported"),
        (lambda x: jax.lax.cond(x.sum() > 0, lambda: x @ x.T, lambda: x @ x.T), (8, 8), "run in a branch"),
        (lambda x: jax.lax.fori_loop(0, 3000, lambda _, y: y @ y, x), (8, 8), "more than 2,000 layers"),
        (lambda x: x @ np.zeros((3, 2)), (1, 8), "tracing the network with inputs [1, 8] fails: TypeError"),
    ],
)  # fmt: skip
def test_unsupported_functions_are_refused(network, shape, message):
    with refuses(message):
        given.from_function(network, image(*shape))


def test_inputs_that_are_no_arrays_are_refused():
    with refuses("with inputs (1, 8, 8, 3) fails"):
        given.from_function(nn.Conv(4, (3, 3)), (1, 8, 8, 3))
    with refuses("with inputs None fails"):
        given.from_function(nn.Conv(4, (3, 3)), None)


def model(*nodes, sizes=(1, 3, 8, 8), weights=()):
    kind = TensorProto.FLOAT
    tensors = [helper.make_tensor(name, kind, dims, np.zeros(dims)) for name, dims in dict(weights).items()]
    x, y = helper.make_tensor_value_info("x", kind, sizes), helper.make_tensor_value_info("y", kind, None)
    return helper.make_model(helper.make_graph(list(nodes), "net", [x], [y], tensors))


KERNEL = {"w": (4, 3, 3, 3)}
CONV = helper.make_node("Conv", ["x", "w"], ["y"], name="first")


def loop():
    body = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "body", [], [])
    return helper.make_node("Loop", ["", "", "x"], ["y"], name="again", body=body)


def test_onnx_operators(tmp_path):
    nodes = [
        helper.make_node("ConvTranspose", ["x", "t"], ["a"], strides=[2, 2], kernel_shape=[2, 2]),
        helper.make_node("ReduceMean", ["a"], ["b"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["b", "w"], ["c"]),
        helper.make_node("Sigmoid", ["c"], ["d"]),
        helper.make_node("Mul", ["c", "d"], ["e"]),
        helper.make_node("Gemm", ["e", "v"], ["f"]),
        helper.make_node("Add", ["e", "f"], ["y"]),
    ]
    path = tmp_path / "net.onnx"
    network = model(*nodes, weights={"t": (3, 4, 2, 2), "w": (4, 5), "v": (5, 5)})
    network.opset_import[0].version = 13
    onnx.save(network, path)
    found = given.from_onnx(path)
    up = transposed_convolution(3, 4, 8, kernel=2, stride=2)
    assert found.layers == (
        up,
        pooling(4, 16, kernel=16, stride=1),
        gemm(1, 5, 4),
        gemm(1, 5, 5),
        addition(5, 1),
    )
    assert found.branches == ((0, 1), (1, 2), (2, 3), (2, 4), (3, 4))


@pytest.mark.parametrize("axes", [{"value_ints": [2, -1]}, {"value": helper.make_tensor("", 7, [2], [2, 3])}])
def test_mean_over_the_axes_of_a_constant_node(axes, tmp_path):
    nodes = [CONV, helper.make_node("Constant", [], ["axes"], **axes)]
    nodes += [helper.make_node("ReduceMean", ["y", "axes"], ["mean"])]
    onnx.save(model(*nodes, weights=KERNEL), tmp_path / "net.onnx")
    assert given.from_onnx(tmp_path / "net.onnx").layers[1:] == (pooling(4, 6, kernel=6, stride=1),)


def test_computed_axes_of_a_mean_are_refused(tmp_path):
    nodes = [CONV, helper.make_node("Abs", ["two"], ["axes"])]
    nodes += [helper.make_node("ReduceMean", ["y", "axes"], ["mean"])]
    onnx.save(model(*nodes, weights={**KERNEL, "two": (2,)}), tmp_path / "net.onnx")
    with refuses("(ReduceMean): its axes 'axes' are computed; export it with constant axes"):
        given.from_onnx(tmp_path / "net.onnx")


def test_axes_that_an_identity_passes_on(tmp_path):
    nodes = [CONV, helper.make_node("Constant", [], ["two"], value_ints=[2, 3])]
    nodes += [helper.make_node("Identity", ["two"], ["axes"])]
    nodes += [helper.make_node("ReduceMean", ["y", "axes"], ["mean"])]
    onnx.save(model(*nodes, weights=KERNEL), tmp_path / "net.onnx")
    assert given.from_onnx(tmp_path / "net.onnx").layers[1:] == (pooling(4, 6, kernel=6, stride=1),)


def test_means_of_other_than_images_are_free_whatever_their_axes(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Abs", ["one"], ["axes"])]
    nodes += [helper.make_node("ReduceMean", ["a", "axes"], ["y"])]
    onnx.save(model(*nodes, sizes=(1, 6, 4), weights={"w": (4, 2), "one": (1,)}), tmp_path / "net.onnx")
    assert len(given.from_onnx(tmp_path / "net.onnx").layers) == 1


def test_onnx_products_whose_sides_broadcast_each_other(tmp_path):
    product = model(
        helper.make_node("MatMul", ["x", "w"], ["y"]), weights={"w": (5, 4, 2)}, sizes=(1, 3, 1, 6, 4)
    )
    onnx.save(product, tmp_path / "net.onnx")
    (layer,) = given.from_onnx(tmp_path / "net.onnx").layers
    assert layer.macs == 3 * 5 * 6 * 4 * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no model", "cannot be read as ONNX"),
        (b"", "cannot be read as ONNX: it has no nodes"),
        (None, "net.onnx: there is no such file: give the path of a file"),
        (lambda: model(CONV, weights=KERNEL, sizes=(8, 3, 8, 8)), "input 'x' has a batch of 8; export it"),
        (lambda: model(CONV, weights=KERNEL, sizes=("n", 3, "h", 8)), "of axis 2 is not fixed ('h')"),
        (lambda: model(helper.make_node("Einsum", ["x"], ["y"], name="e")), "node 'e' (Einsum): this"),
        (lambda: model(helper.make_node("Conv", ["x"], ["y"], domain="mine")), "(mine.Conv): this operator"),
        (lambda: model(loop()), "node 'again' (Loop): this operator is not supported"),
        (lambda: model(helper.make_node("Relu", ["x"], ["y"])), "it has no convolution or matrix product"),
        (lambda: model(CONV, weights={"w": (4, 3, 9, 9)}), "net.onnx: "),
        (lambda: model(CONV, weights={"w": (4, 6, 3, 3)}), "(Conv): its input has 3 channels"),
        (lambda: model(helper.make_node("MatMul", ["x", "w"], ["y"]), weights={"w": (9, 4)}), "are for 9"),
        (lambda: model(helper.make_node("Gemm", ["x", "w"], ["y"]), weights={"w": (9, 4)}, sizes=(1, 3)),
         "are for 9"),
        (lambda: model(helper.make_node("Gemm", ["x", "w"], ["y"]), weights={"w": (9, 4)}),
         "(Gemm): its inputs or attributes cannot be read"),
        (lambda: model(helper.make_node("MaxPool", ["x"], ["y"])), "be read (KeyError: 'kernel_shape')"),
    ],
)  # fmt: skip
def test_invalid_onnx_files_are_refused(content, message, tmp_path):
    path = tmp_path / "net.onnx"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content().SerializeToString())
    with refuses(message):
        given.from_onnx(path)
