"""Arrays in a run of several processes, each of which owns some of the devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdg import keys


def absent(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without a part in this process: shape, dtype and sharding, and no data."""
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, [], dtype=shape.dtype)


def committed(array: jax.Array, sharding: Any) -> jax.Array:
    """The same array in the same memory, committed to its device."""
    if array.committed:
        return array
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [array])


def put(value: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Shards an array that every process has in full; each process puts only its own devices' parts."""
    value = jnp.asarray(value)
    sharding: Any = shape.sharding
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    parts = sharding.addressable_devices_indices_map(shape.shape)
    if not parts:
        return absent(shape)
    local = [jax.device_put(value[index] if value.ndim else value, device) for device, index in parts.items()]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, local, dtype=shape.dtype)


def made_by(
    owner: int, make: Callable[[], Sequence[jax.Array]], shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """Broadcast: copies arrays of process `owner` to every process. All processes call it."""
    plain = [keys.words_shape(shape.shape, shape.dtype) for shape in shapes]
    values: Sequence[Any] = [None] * len(shapes)
    if jax.process_index() == owner:
        values = list(map(keys.words, make()))
    copies = [copy.addressable_data(0) for copy in share(values, plain, [owner] * len(shapes))]
    return [keys.from_words(copy, shape) for copy, shape in zip(copies, shapes, strict=True)]


def share(
    values: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct], owners: Sequence[int]
) -> list[jax.Array]:
    """Copies each array, which process `owners[i]` has, to every process. All processes call it.

    In other processes than its owner, a value may be anything.
    """
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = [first[i] for i in sorted(first)]
    mesh = Mesh(np.array(devices, dtype=object), ("process",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("process"))
    here = jax.process_index()
    stacked = []
    for value, shape, owner in zip(values, shapes, owners, strict=True):
        data = np.asarray(value.addressable_data(0)) if owner == here else np.zeros(shape.shape, shape.dtype)
        block = jax.device_put(data[None], first[here])
        stacked.append(jax.make_array_from_single_device_arrays((len(devices), *shape.shape), rows, [block]))
    return _pick(tuple(owners), NamedSharding(mesh, PartitionSpec()))(stacked)


@functools.cache
def _pick(owners: tuple[int, ...], everywhere: NamedSharding) -> Any:
    def pick(stacked):
        return [x[owner] for x, owner in zip(stacked, owners, strict=True)]

    return jax.jit(pick, out_shardings=everywhere)
