"""Sums over a large batch in tiles: the same numbers, and no intermediate array of the batch's size."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from fdg import jaxprs
from fdg.lowering import tiles
from fdg.lowering.constraints import constrain
from fdg.lowering.mesh import make_mesh

ROWS = 64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles have a few rows, whatever the sizes."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 4096)
    monkeypatch.setattr(tiles, "TILE_FLOPS", 1)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def squares(w, x, y):
    return jnp.mean(jnp.square(jnp.tanh(x @ w) - y))


def standardized_output(w, x, y):
    """Mean and deviation of the product: only what follows them can be tiled."""
    out = x @ w
    return jnp.mean(jnp.square((out - out.mean()) / out.std() - y))


def in_a_call(w, x, y):
    return jax.jit(squares)(w, x, y) + jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])


def two_products(w, x, y):
    hidden = jax.nn.relu(x @ w)
    return jnp.mean(jnp.square(hidden @ w.T - x)) + jnp.mean(hidden * y)


def rematerialized(w, x, y):
    return jax.checkpoint(squares)(w, x, y)


LOSSES = (standardized_output, in_a_call, two_products, rematerialized)


def traced(function):
    arguments = normal(0, 4, 3), normal(1, ROWS, 4), normal(2, ROWS, 3)
    return jax.make_jaxpr(function)(*arguments), arguments


def counts(jaxpr):
    """The number of tiles of each tiled call."""
    return [int(n) for n in re.findall(r"fdg-tiles:(\d+)", str(jaxpr))]


def assert_close(made, expected):
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_tiled_gradient_matches(loss):
    jaxpr, arguments = traced(lambda *a: jax.tree.leaves(jax.value_and_grad(loss)(*a)))
    tiled = tiles.tile(jaxpr, [None, 0, 0], 1)
    assert counts(tiled) and max(counts(tiled)) > 1
    assert_close(core.jaxpr_as_fun(tiled)(*arguments), core.jaxpr_as_fun(jaxpr)(*arguments))


def test_extremes_and_rows_in_tiles():
    """Maxima, minima, counts and results with a row per sample are computed in tiles, too."""

    def function(w, x, y):
        error = jnp.square(x @ w - y)
        gradient = jax.grad(squares)(w, x, y)
        large = error > 1
        some = jax.lax.reduce_max_p.bind(large, axes=(0, 1), out_sharding=None)  # booleans: not tiled
        ends = error.max(), error.min(), jnp.argmax(error, axis=1), error.sum(1), large.sum(), some
        narrow = error.astype(jnp.float8_e4m3fn)  # which has no infinity
        return gradient, *ends, *(x.astype(jnp.float32) for x in (narrow.max(), narrow.min()))

    jaxpr, arguments = traced(function)
    tiled = tiles.tile(jaxpr, [None, 0, 0], 1)
    assert max(counts(tiled)) > 1
    assert_close(core.jaxpr_as_fun(tiled)(*arguments), core.jaxpr_as_fun(jaxpr)(*arguments))


def test_tiles_of_bfloat16_are_added_in_float32():
    """In bfloat16 the sum of 2,048 tiles of 32 ones would end at 8,192: 8,224 rounds to it."""
    w, x = jnp.zeros((16, 16), jnp.bfloat16), jnp.ones((65536, 16), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum((x @ w).astype(jnp.float32))))(w, x)
    tiled = tiles.tile(jaxpr, [None, 0], 1)
    assert counts(tiled) == [2048]
    (gradient,) = core.jaxpr_as_fun(tiled)(w, x)
    assert gradient.dtype == jnp.bfloat16
    assert set(np.ravel(gradient).tolist()) == {65536.0}


def test_no_intermediate_array_has_the_batch_size():
    jaxpr, _ = traced(jax.grad(two_products))
    tiled = jaxprs.open_jaxpr(tiles.tile(jaxpr, [None, 0, 0], 1))
    large = [eqn.primitive.name for eqn in tiled.eqns if any(ROWS in v.aval.shape for v in eqn.outvars)]
    assert set(large) <= {"broadcast_in_dim"}  # a broadcast scalar, which is never materialized


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda w, x, y: jnp.mean(jnp.tanh(x @ w)), "no product adds up over the batch"),
        (lambda w, x, y: jnp.tanh(x[:3] @ w), "three rows"),
        (lambda w, x, y: w @ w.T, "no batch"),
    ],
    ids=["no gradient", "few rows", "no batch"],
)
def test_not_tiled(function, why):
    jaxpr, _ = traced(function)
    assert tiles.tile(jaxpr, [None, 0, 0], 1) is jaxpr, why


def test_batch_that_fits_is_not_tiled(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 20)
    jaxpr, _ = traced(jax.grad(squares))
    assert tiles.tile(jaxpr, [None, 0, 0], 1) is jaxpr


@pytest.mark.parametrize(("limit", "count"), [(600, [16]), (200, [])])
def test_tiles_do_not_cut_feature_groups(monkeypatch, limit, count):
    """A convolution of 64 features in 16 groups runs in 16 tiles, one per group, and not in 32 or 64."""
    monkeypatch.setattr(tiles, "TILE_BYTES", limit)

    def loss(w, x, kernels):
        made = jax.lax.conv_general_dilated(x, kernels, (1,), "VALID", feature_group_count=16)
        return jnp.mean(jnp.square(made[0] @ w))

    arguments = normal(0, 3, 2), normal(1, 1, 64, 4), normal(2, 64, 4, 2)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(*arguments)
    tiled = tiles.tile(jaxpr, [None, 1, 0], 1)
    assert counts(tiled) == count
    assert_close(core.jaxpr_as_fun(tiled)(*arguments), core.jaxpr_as_fun(jaxpr)(*arguments))


def test_sums_that_rows_read_run_before_the_tiles():
    """Every row reads the mean of all rows: what precedes it runs once, before the tiles."""
    jaxpr, _ = traced(jax.grad(standardized_output))
    tiled = jaxprs.open_jaxpr(tiles.tile(jaxpr, [None, 0, 0], 1))
    before = [eqn.primitive.name for eqn in tiled.eqns]
    assert before.index("dot_general") < before.index("reduce_sum") < len(before) - 1
    assert counts(tiled)


@pytest.mark.parametrize("limit", [1 << 20, 32])
def test_gradients_are_reduced_as_one_array(monkeypatch, limit):
    """Also if a device has enough cores for a single tile; only large arrays are reduced separately."""
    monkeypatch.setattr(tiles, "PACKED_BYTES", limit)

    def function(w, x, y, b):
        return jax.grad(lambda w, b: squares(w, x, y - b[None]), argnums=(0, 1))(w, b)

    arguments = normal(0, 4, 3), normal(1, ROWS, 4), normal(2, ROWS, 3), normal(3, 3)
    jaxpr, axes = jax.make_jaxpr(function)(*arguments), [None, 0, 0, None]
    tiled = tiles.tile(jaxpr, axes, 4, may_split=False)
    assert set(counts(tiled)) == {1}
    mesh = make_mesh(jax.devices()[:4])
    lowered = jax.jit(core.jaxpr_as_fun(constrain(tiled, mesh, axes)))
    made = re.findall(r"= (\(.*?\)|\S+) all-reduce\(", lowered.lower(*arguments).compile().as_text())
    arrays = re.findall(r"f32\[([\d,]*)\]", "".join(made))
    assert sorted(arrays) == (["15"] if limit > 32 else ["12", "3"])  # w has 4 x 3 numbers, 48 bytes
    assert_close(lowered(*arguments), core.jaxpr_as_fun(jaxpr)(*arguments))
