"""Creates and broadcasts arrays in a run of several processes, each of which has some of the devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdg import keys
from fdg.lowering.mesh import make_mesh
from fdg.processes import distributed


def absent_array(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of which this process has no shard: it has a shape, a dtype and a sharding, but no data."""
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, [], dtype=shape.dtype)


def commit(array: jax.Array, sharding: Any) -> jax.Array:
    """Commits an array to its device, without a copy."""
    if array.committed:
        return array
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [array])


def put(value: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Shards an array that every process has in full; each process copies shards to its own devices."""
    value = jnp.asarray(value)
    sharding: Any = shape.sharding
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(shape.shape, sharding, lambda index: value[index], dtype=shape.dtype)


def make_in_process(
    owner: int, make: Callable[[], Sequence[jax.Array]], shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """Calls `make` in process `owner`, and broadcasts its arrays to all processes. All must call this."""
    data_shapes = [keys.data_shape(shape.shape, shape.dtype) for shape in shapes]
    values: Sequence[Any] = [None] * len(shapes)
    if jax.process_index() == owner:
        values = jax.block_until_ready(list(map(keys.to_data, make())))
    # XLA's collectives on CPUs fail if a process is 30 s late, and environments may take minutes to start.
    distributed.exchange(None)
    copies = jax.block_until_ready(broadcast(values, data_shapes, [owner] * len(shapes)))  # before others run
    return [keys.from_data(x.addressable_data(0), shape) for x, shape in zip(copies, shapes, strict=True)]


def broadcast(
    values: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct], owners: Sequence[int]
) -> list[jax.Array]:
    """Broadcasts each array `values[i]` from process `owners[i]` to all processes. All must call this.

    In other processes than `owners[i]`, `values[i]` is ignored.
    """
    device_by_process: dict[int, jax.Device] = {}
    for device in jax.devices():
        device_by_process.setdefault(device.process_index, device)
    devices = [device_by_process[i] for i in sorted(device_by_process)]
    mesh = make_mesh(devices, "process")
    rows = NamedSharding(mesh, PartitionSpec("process"))
    process = jax.process_index()
    stacked = []
    for value, shape, owner in zip(values, shapes, owners, strict=True):
        data = (
            np.asarray(value.addressable_data(0)) if owner == process else np.zeros(shape.shape, shape.dtype)
        )
        block = jax.device_put(data[None], device_by_process[process])
        stacked.append(jax.make_array_from_single_device_arrays((len(devices), *shape.shape), rows, [block]))
    return _select_rows(tuple(owners), NamedSharding(mesh, PartitionSpec()))(stacked)


@functools.cache
def _select_rows(owners: tuple[int, ...], replicated: NamedSharding) -> Any:
    """A jitted function that selects its owner's row of each stacked array, and replicates this row."""

    def select(stacked):
        return [x[owner] for x, owner in zip(stacked, owners, strict=True)]

    return jax.jit(select, out_shardings=replicated)
