"""Bytes of a program's inputs and outputs, against hand-computed numbers."""

import jax
import jax.numpy as jnp
import pytest

from fdg.profiling.border import border_bytes

BUFFER, ROW = (1000, 8), 8 * 4


def border(function, *shapes, dtypes=(), **options):
    kinds = [*dtypes, *[jnp.float32] * (len(shapes) - len(dtypes))]
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    return border_bytes(jax.make_jaxpr(function)(*arguments), **options)


def test_all_inputs_and_outputs():
    assert border(lambda x, w: jnp.tanh(x @ w) @ w.T, (4, 16), (16, 8)) == 4 * (64 + 128 + 64)


def test_in_place_update_counts_changed_rows():
    """Counts the row read, the row written, and its index."""

    def add(buffer, row, index):
        return jax.jit(lambda b: jax.lax.dynamic_update_slice(b, row[None], (index, 0)))(buffer)

    kinds = (jnp.float32, jnp.float32, jnp.int32)
    assert border(add, BUFFER, (8,), (), dtypes=kinds) == ROW + ROW + 4


def test_gather_counts_gathered_rows():
    def sample(buffer, indices):
        return jax.lax.gather(
            buffer,
            indices[:, None],
            jax.lax.GatherDimensionNumbers((1,), (0,), (0,)),
            (1, 8),
            mode="promise_in_bounds",
        )

    assert border(sample, BUFFER, (64,), dtypes=(jnp.float32, jnp.int32)) == 2 * 64 * ROW + 64 * 4


def test_in_place_update_in_a_loop():
    """Counts ten rows written and ten read; a later read of the complete buffer counts it once."""

    def fill(buffer, rows):
        def one(carry, row):
            buffer, i = carry
            return (jax.lax.dynamic_update_slice(buffer, row[None], (i, 0)), i + 1), None

        return jax.lax.scan(one, (buffer, 0), rows)[0][0]

    assert border(fill, BUFFER, (10, 8)) == pytest.approx(20 * ROW, abs=8)
    assert border(lambda b, r: jnp.sum(fill(b, r)), BUFFER, (10, 8)) == pytest.approx(1010 * ROW, abs=16)


def test_unchanged_arrays_count_nothing():
    assert border(lambda x, y: (x, y + 1), BUFFER, (2,)) == 16


def test_one_device_of_several():
    assert border(lambda x, w: x @ w, (8, 16), (16, 8), parts=[4, 1, 4]) == 4 * (32 + 128 + 16)
