"""Arrays of several processes, tested within one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from fdg.processes import arrays, distributed
from fdg.processes.arrays import broadcast, commit, make_in_process, put


def shape_of(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_make_in_process(kind):
    made = [jnp.arange(6.0).reshape(2, 3), jax.random.split(jax.random.key(3, impl=kind), 2), jnp.int32(7)]
    calls = []

    def make():
        calls.append(1)
        return made

    found = make_in_process(0, make, [shape_of(array) for array in made])
    assert calls == [1] and [x.dtype for x in found] == [x.dtype for x in made]
    for got, want in zip(found, made, strict=True):
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want)


def test_collectives_wait_until_arrays_are_made(monkeypatch):
    """XLA's collectives on CPUs fail after 30 s, and environments may take minutes to start."""
    events = []
    exchange, select = distributed.exchange, arrays._select_rows
    monkeypatch.setattr(distributed, "exchange", lambda value: events.append("exchange") or exchange(value))
    monkeypatch.setattr(arrays, "_select_rows", lambda *x: events.append("collective") or select(*x))

    def make():
        events.append("make")
        return [jnp.int32(7)]

    make_in_process(0, make, [jax.ShapeDtypeStruct((), jnp.int32)])
    assert events == ["make", "exchange", "collective"]


def test_broadcast(devices):
    value = jax.device_put(jnp.arange(3.0), devices[2])
    (found,) = broadcast([value], [shape_of(value)], [0])
    np.testing.assert_array_equal(found, value)
    assert found.is_fully_replicated and found.sharding.device_set == {devices[0]}


def test_put_and_commit(devices):
    there = SingleDeviceSharding(devices[1])
    shape = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=there)
    laid_out = put([1.0, 2.0], shape)
    assert laid_out.sharding == there and laid_out.tolist() == [1.0, 2.0]
    assert commit(laid_out, there) is laid_out
    uncommitted = jnp.ones(2)
    committed = commit(uncommitted, SingleDeviceSharding(devices[0]))
    assert committed.committed and committed.unsafe_buffer_pointer() == uncommitted.unsafe_buffer_pointer()
