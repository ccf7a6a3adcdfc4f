"""Bytes at a program's border, counted by hand."""

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


def test_what_is_updated_in_place_counts_as_much_as_it_changes():
    """The row is read and written; its place is a number."""

    def add(buffer, row, place):
        return jax.jit(lambda b: jax.lax.dynamic_update_slice(b, row[None], (place, 0)))(buffer)

    kinds = (jnp.float32, jnp.float32, jnp.int32)
    assert border(add, BUFFER, (8,), (), dtypes=kinds) == ROW + ROW + 4


def test_what_is_looked_up_counts_as_much_as_that():
    def sample(buffer, places):
        return jax.lax.gather(
            buffer,
            places[:, None],
            jax.lax.GatherDimensionNumbers((1,), (0,), (0,)),
            (1, 8),
            mode="promise_in_bounds",
        )

    assert border(sample, BUFFER, (64,), dtypes=(jnp.float32, jnp.int32)) == 2 * 64 * ROW + 64 * 4


def test_what_a_loop_updates_in_each_trip():
    """Ten rows written, ten read; and what is then read as a whole counts whole, once."""

    def fill(buffer, rows):
        def one(carry, row):
            buffer, i = carry
            return (jax.lax.dynamic_update_slice(buffer, row[None], (i, 0)), i + 1), None

        return jax.lax.scan(one, (buffer, 0), rows)[0][0]

    assert border(fill, BUFFER, (10, 8)) == pytest.approx(20 * ROW, abs=8)
    assert border(lambda b, r: jnp.sum(fill(b, r)), BUFFER, (10, 8)) == pytest.approx(1010 * ROW, abs=16)


def test_what_is_handed_through_costs_nothing():
    assert border(lambda x, y: (x, y + 1), BUFFER, (2,)) == 16


def test_one_device_of_several_has_its_parts():
    assert border(lambda x, w: x @ w, (8, 16), (16, 8), parts=[4, 1, 4]) == 4 * (32 + 128 + 16)
