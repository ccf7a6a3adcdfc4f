"""Operations, bytes and products of jaxprs, against hand-computed numbers."""

import jax
import jax.numpy as jnp
import pytest

import fdg
from fdg import jaxprs
from fdg.jaxprs.count import Product
from fdg.profiling.work import SizedOperation, Work, sum_of_work, work_of
from tests.tiny import Pupil


def work(function, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return work_of(jax.make_jaxpr(function)(*arguments), **options)


def test_dense_layer():
    """x [4, 16] @ w [16, 8]: 2 * 4 * 16 * 8 operations; tanh: one per result, 32."""
    found = work(lambda x, w: jnp.tanh(x @ w), (4, 16), (16, 8))
    assert found.flops == {"product": 1024, "transcendental": 32}
    assert found.bytes == {"product": 4 * (64 + 128 + 32), "transcendental": 2 * 4 * 32}
    assert found.products == {Product(1, 4, 16, 8, "float32"): 1}
    assert found.exact and found.total_flops == 1056


def test_loop_and_call():
    def run(x, w):
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.tanh)(x @ w), None), x, length=8)[0]

    found = work(run, (4, 16), (16, 16))
    assert found.products == {Product(1, 4, 16, 16, "float32"): 8}
    assert found.flops == {"product": 8 * 2048, "transcendental": 8 * 64} and found.exact


def test_branches_and_while_loop():
    def run(x):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, x)
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jnp.exp(x), x)

    found = work(run, (4, 4))
    assert found.products == {Product(1, 4, 4, 4, "float32"): 1}
    assert found.flops["transcendental"] == 16 and not found.exact
    assert work(lambda x: x + 1, (4, 4)).exact


def test_batched_and_transposed_products():
    """A batch of three products [4, 5] @ [5, 6]; and x.T @ y, as in the gradient of a layer's weights."""
    assert work(jnp.matmul, (3, 4, 5), (3, 5, 6)).products == {Product(3, 4, 5, 6, "float32"): 1}
    assert work(lambda x, y: x.T @ y, (7, 4), (7, 6)).products == {Product(1, 4, 7, 6, "float32"): 1}


def test_convolution_counts_as_product_of_patches():
    """8 images of 10 x 10 x 4, kernels of 3 x 3 to 16 channels: 8 * 8 * 8 patches of 36 numbers."""

    def run(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    found = work(run, (8, 10, 10, 4), (3, 3, 4, 16))
    assert found.products == {Product(1, 512, 36, 16, "float32", convolution=True): 1}
    assert found.flops == {"convolution": 2 * 512 * 36 * 16}


def test_gather_and_in_place_update():
    rows = jnp.arange(3)
    found = work(lambda x: x[rows].reshape(-1), (1000, 8))
    assert found.bytes.get("movement") == 2 * 3 * 8 * 4 + 3 * 4
    placed = work(lambda x, y: jax.lax.dynamic_update_slice(x, y, (0, 0)), (1000, 8), (2, 8))
    assert placed.bytes["copy"] == 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("axes", "product", "summed"),
    [
        ((0, None), Product(1, 2, 16, 8, "float32"), 16),  # rows are split, and so are the results
        ((1, 0), Product(1, 8, 4, 8, "float32"), 64),  # the contracted axis is split: partial sums of all
        ((None, 1), Product(1, 8, 16, 2, "float32"), 16),
    ],
)
def test_one_device_of_four(axes, product, summed):
    found = work(lambda x, w: jnp.exp(x @ w), (8, 16), (16, 8), axes=axes, devices=4)
    assert found.products == {product: 1} and found.flops["product"] == product.flops == 512
    assert found.flops["transcendental"] == summed


def test_total_matches_graph():
    graph = fdg.trace(Pupil())
    assert work_of(graph.jaxpr).total_flops == jaxprs.flops_of(jaxprs.open_jaxpr(graph.jaxpr))


def test_sum_of_work():
    product = Product(1, 2, 2, 2, "float32")
    one = Work({"product": 16}, {"product": 48}, {product: 1})
    both = sum_of_work([(one, 3), (Work({"sort": 5}, exact=False), 1)])
    assert both == Work({"product": 48, "sort": 5}, {"product": 144}, {product: 3}, False)
    assert sum_of_work([(one, 2)]).products == {product: 2}
    assert str(product) == "2 x 2 x 2" and str(product._replace(batch=4)) == "4 x 2 x 2 x 2"


def test_operations_by_size_and_loop_trips():
    """8 trips of a tanh that reads and writes 4 x 16 numbers; products are counted separately."""

    def run(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=8)[0]

    found = work(run, (4, 16), (16, 16))
    assert found.trips == 8
    assert found.operations == {SizedOperation("transcendental", 2 * 4 * 16 * 4): 8}
    assert next(iter(found.products)).bytes == 4 * (4 * 16 + 16 * 16 + 4 * 16)
