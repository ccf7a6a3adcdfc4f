"""Transfers arrays between groups of devices in different processes, by collectives.

Device-to-device copies work only within a process. So a program on the devices of both groups sends each
chunk of an array from its source device to the devices that need it (`ppermute`). A device that has no chunk
to send sends zeros. Chunks with the same senders and receivers are sent as one array.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs, keys
from fdg.lowering.mesh import layout_sharding, make_mesh, partition_spec
from fdg.placing.layout import Layout, find_route
from fdg.running.transfers import Transfer, cut_up, join_up, part_shape, per_device

_DEVICE_AXIS = "devices"  # the axis name of the mesh with the devices of both groups
_Pairs = tuple[tuple[int, int], ...]  # (from, to) devices


class ProcessCollectives:
    """Serialises collectives between processes: one at a time, in the same order in every process."""

    def __init__(self) -> None:
        self._pending: list[jax.Array] = []

    def wait(self) -> None:
        """Waits until the last collective has ended; raises its error at the first call only."""
        pending, self._pending = self._pending, []
        jax.block_until_ready(pending)

    def register(self, results: Sequence[jax.Array]) -> None:
        """Registers the results of the collective that was started last."""
        self._pending = list(results)


class Exchange(Transfer):
    """Transfers arrays between two meshes that span processes, by the programs "cut", "exchange" and "join".

    Every process with a device in either mesh must call it, in the same order (see `ProcessCollectives`).
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        layouts: Sequence[tuple[Layout, Layout]],
        collectives: ProcessCollectives | None = None,
    ):
        super().__init__(source, target, layouts)
        devices = list(dict.fromkeys((*source.devices.flat, *target.devices.flat)))
        self.union = make_mesh(devices, _DEVICE_AXIS)
        self._device_index = {device: i for i, device in enumerate(devices)}
        self._routes = [find_route(a, b) for a, b in self.layouts]
        self._collectives = collectives or ProcessCollectives()
        process = jax.process_index()
        self._local_devices, self._local_sources, self._local_targets = (
            [d for d in mesh_devices if d.process_index == process]
            for mesh_devices in (devices, source.devices.flat, target.devices.flat)
        )
        self._sharding = {mesh: NamedSharding(mesh, _block_spec(mesh)) for mesh in (self.union, target)}
        self._zero_blocks: dict[Any, Any] = {}

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """The functions of the programs "cut", "exchange" and "join"."""
        # For each array: the shape of the stacked chunks that a device sends, and of those that it receives.
        self._sent_blocks: list[jax.ShapeDtypeStruct] = []
        self._received_blocks: list[jax.ShapeDtypeStruct] = []
        for shape, route, (a, _) in zip(shapes, self._routes, self.layouts, strict=True):
            num_chunks = [parts * cuts for parts, cuts in zip(a.parts, route.cuts, strict=True)]
            wire = jax.eval_shape(_to_wire, jax.ShapeDtypeStruct(part_shape(a, num_chunks), shape.dtype))
            for blocks, count in (
                (self._sent_blocks, math.prod(route.cuts)),
                (self._received_blocks, len(route.chunks)),
            ):
                blocks.append(jax.ShapeDtypeStruct((count, *wire.shape), wire.dtype))
        sent, received = self._sent_blocks, self._received_blocks
        return [
            ("cut", self.source, self._cut_function(), list(shapes)),
            ("exchange", self.union, self._exchange_function(), self._array_shapes(sent, self.union)),
            ("join", self.target, self._join_function(shapes), self._array_shapes(received, self.target)),
        ]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays on the target; each is None in a process without target devices."""
        return self.exchange(self.cut(arrays))

    def cut(self, arrays: Sequence[Any]) -> Any:
        """The chunks that this process sends; None if it has no source device."""
        return self.programs["cut"].compiled(list(arrays)) if self._local_sources else None

    def connect(self) -> None:
        """Runs the collective once, with zeros, and frees them: later, sources need none."""
        self.exchange(None)
        self._zero_blocks.clear()

    def exchange(self, sent: Any) -> list[Any]:
        """Runs the collective on the result of `cut`; returns the arrays on the target."""
        self._collectives.wait()
        outgoing = []
        for k, shape in enumerate(self._sent_blocks):
            blocks = {} if sent is None else {x.device: x.data for x in sent[k].addressable_shards}
            local = [blocks[d] if d in blocks else self._zero_block(shape, d) for d in self._local_devices]
            outgoing.append(self._assemble(self.union, shape, local))
        incoming = self.programs["exchange"].compiled(outgoing)
        self._collectives.register(incoming)
        if not self._local_targets:
            return [None] * len(self.layouts)
        received = []
        for x, shape in zip(incoming, self._received_blocks, strict=True):
            blocks = {shard.device: shard.data for shard in x.addressable_shards}
            received.append(self._assemble(self.target, shape, [blocks[d] for d in self._local_targets]))
        joined = self.programs["join"].compiled(received)
        self.bytes = self.bytes or sum(
            jaxprs.bytes_of(x) * len(self._local_targets) // layout.num_parts
            for x, (_, layout) in zip(joined, self.layouts, strict=True)  # a device gets one part
        )
        return joined

    # --- blocks: each device holds one block of chunks per array ---

    def _array_shapes(self, blocks: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
        sharding = self._sharding[mesh]
        return [jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding) for x in blocks]

    def _assemble(self, mesh: Mesh, shape: jax.ShapeDtypeStruct, local_blocks: list[jax.Array]) -> jax.Array:
        """An array on the mesh, assembled from this process's blocks, each of this shape."""
        global_shape = mesh.size, *shape.shape
        return jax.make_array_from_single_device_arrays(global_shape, self._sharding[mesh], local_blocks)

    def _zero_block(self, shape: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
        """The zeros that a device sends if it has no chunk to send."""
        key = shape.shape, shape.dtype, device
        if key not in self._zero_blocks:
            self._zero_blocks[key] = jax.device_put(np.zeros((1, *shape.shape), shape.dtype), device)
        return self._zero_blocks[key]

    # --- programs ---

    def _cut_function(self) -> Any:
        def cut_local(arrays):
            return [
                jnp.stack([_to_wire(part) for part in cut_up(x, route)])[None]
                for x, route in zip(arrays, self._routes, strict=True)
            ]

        specs = [partition_spec(a.spec) for a, _ in self.layouts]
        out = [_block_spec(self.source)] * len(specs)
        return per_device(cut_local, self.source, specs, out)

    def _exchange_function(self) -> Any:
        """The function of "exchange": each round of broadcasts is a few calls of `_permute`."""
        sources = [self._device_index[d] for d in self.source.devices.flat]
        targets = [self._device_index[d] for d in self.target.devices.flat]
        # (round, device pairs) -> for each chunk: the index of its array, the slot that receives it, and its
        # index among the source's chunks.
        packets: dict[tuple[int, _Pairs], list[tuple[int, int, int]]] = {}
        for k, route in enumerate(self._routes):
            for slot, senders in enumerate(route.chunks):  # for each target device: (source, index of chunk)
                requests = [(sources[i], index, targets[j]) for j, (i, index) in enumerate(senders)]
                for round_index, index, pairs in broadcast_rounds(requests, frozenset(sources)):
                    packets.setdefault((round_index, pairs), []).append((k, slot, index))

        def exchange_local(blocks):
            device = jax.lax.axis_index(_DEVICE_AXIS)
            received = [
                [jnp.zeros_like(x[0, 0]) for _ in route.chunks]
                for x, route in zip(blocks, self._routes, strict=True)
            ]
            for (_, pairs), packet in sorted(packets.items(), key=lambda item: item[0][0]):
                sent = [blocks[k][0, index] for k, _, index in packet]
                # A sender that is not a source forwards what it received in an earlier round.
                if forwarders := sorted({sender for sender, _ in pairs} - set(sources)):
                    is_forwarder = jnp.isin(device, jnp.array(forwarders))
                    sent = [
                        jnp.where(is_forwarder, received[k][slot], x)
                        for x, (k, slot, _) in zip(sent, packet, strict=True)
                    ]
                is_receiver = jnp.isin(device, jnp.array([receiver for _, receiver in pairs]))
                for (k, slot, _), x in zip(packet, _permute(sent, pairs), strict=True):
                    received[k][slot] = jnp.where(is_receiver, x, received[k][slot])
            return [jnp.stack(slots)[None] for slots in received]

        spec = PartitionSpec(_DEVICE_AXIS)
        return per_device(exchange_local, self.union, spec, spec)

    def _join_function(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
        def join_local(blocks):
            return [
                join_up([_from_wire(chunk, shape) for chunk in x[0]], route)
                for x, shape, route in zip(blocks, shapes, self._routes, strict=True)
            ]

        specs = [partition_spec(b.spec) for _, b in self.layouts]
        shardings = [layout_sharding(self.target, b) for _, b in self.layouts]
        in_spec = _block_spec(self.target)
        return per_device(join_local, self.target, in_spec, specs, out_shardings=shardings)


def broadcast_rounds(
    requests: Sequence[tuple[int, int, int]], sources: frozenset[int]
) -> list[tuple[int, int, _Pairs]]:
    """Splits broadcasts into rounds; in a round, a device sends and receives each chunk at most once.

    Receivers forward a chunk in later rounds: the number of devices that have the chunk doubles each round.
    Sources forward no chunks of other sources, because they send their own. Each request is (source device,
    index of the source's chunk, target device); `sources` are all source devices. Returns (round, index of
    the source's chunk, (from, to) pairs).

    >>> broadcast_rounds([(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)], frozenset([0]))
    [(0, 0, ((0, 1),)), (1, 0, ((0, 2), (1, 3))), (2, 0, ((0, 4),))]
    """
    receivers: dict[tuple[int, int], list[int]] = {}
    for source, index, target in requests:
        receivers.setdefault((source, index), []).append(target)
    pairs_by_round: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (source, index), targets in receivers.items():
        holders, round_index, num_reached = [source], 0, 0
        while num_reached < len(targets):
            pairs = list(zip(holders, targets[num_reached:], strict=False))
            pairs_by_round.setdefault((round_index, index), []).extend(pairs)
            holders += [target for _, target in pairs if target not in sources]
            round_index, num_reached = round_index + 1, num_reached + len(pairs)
    return [(*round_and_index, tuple(pairs)) for round_and_index, pairs in pairs_by_round.items()]


def _permute(arrays: Sequence[jax.Array], pairs: _Pairs) -> list[jax.Array]:
    """Sends arrays along the pairs (from, to), as unsigned integers: one `ppermute` per element width."""
    results: list[Any] = [None] * len(arrays)
    by_dtype: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        by_dtype.setdefault(_integer_dtype(x.dtype), []).append(i)
    for dtype, indices in by_dtype.items():
        packed = jnp.concatenate(
            [jax.lax.bitcast_convert_type(arrays[i], dtype).reshape(-1) for i in indices]
        )
        packed = jax.lax.ppermute(packed, _DEVICE_AXIS, list(pairs))
        boundaries = np.cumsum([arrays[i].size for i in indices])[:-1]
        for i, x in zip(indices, jnp.split(packed, boundaries), strict=True):
            results[i] = jax.lax.bitcast_convert_type(x.reshape(arrays[i].shape), arrays[i].dtype)
    return results


def _integer_dtype(dtype: Any) -> Any:
    """The unsigned integer dtype of equal width; complex dtypes and those below 8 bits are unchanged."""
    dtype = jnp.dtype(dtype)
    width = str(8 * dtype.itemsize)
    has_integer_dtype = dtype.name.endswith(width) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(f"uint{width}") if has_integer_dtype else dtype


def _block_spec(mesh: Mesh) -> PartitionSpec:
    """The spec of stacked blocks, one per device in the mesh's order."""
    return PartitionSpec(mesh.axis_names)


def _to_wire(x: jax.Array) -> jax.Array:
    """Converts an array to a dtype that collectives support: keys to their key data, booleans to bytes."""
    return x.astype(jnp.uint8) if x.dtype == bool else keys.to_data(x)


def _from_wire(x: jax.Array, like: Any) -> jax.Array:
    """The inverse of `_to_wire`."""
    return keys.from_data(x, like) if keys.is_key(like.dtype) else x.astype(like.dtype)
