"""Moving arrays between groups of devices in different processes, by a collective that both sides run.

A copy from device to device ends at the border of a process. What crosses it goes through a program on the
devices of both groups together, in which each device of the source permutes its chunks to those that need
them; the other devices take part with zeros.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs, keys
from fdg.lowering.constraints import BATCH, batch_sharding
from fdg.placing.layout import Layout

_ALL = "devices"  # the axis of the mesh of both groups


class Exchange:
    """Moves several arrays from one mesh to another, of which each process has a part, or none.

    Has the interface of `transfers.Mover`. Every process with a device in either mesh has to call it, and
    all of them in the same order.
    """

    def __init__(self, source: Mesh, target: Mesh, layouts: Sequence[tuple[Layout, Layout]]):
        self.source, self.target, self.layouts = source, target, list(layouts)
        devices = list(dict.fromkeys((*source.devices.flat, *target.devices.flat)))
        self.union = Mesh(np.array(devices, dtype=object), (_ALL,), axis_types=(AxisType.Auto,))
        self._position = {device: i for i, device in enumerate(devices)}
        self._chunks = [math.lcm(a.parts, b.parts) for a, b in self.layouts]
        self.programs: dict[str, Any] = {}
        self.bytes = 0
        self.pending: list[jax.Array] = []  # of the last call: there when it has ended
        here = jax.process_index()
        self._local = [d for d in devices if d.process_index == here]
        self._sends = any(d.process_index == here for d in source.devices.flat)
        self._receives = any(d.process_index == here for d in target.devices.flat)
        self._zeros: dict[Any, Any] = {}

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Any, Any]]:
        """The programs: ("cut", "exchange" or "join", function, its argument)."""
        wire = [_wire_shape(shape) for shape in self._chunk_shapes(shapes)]
        self._wire = wire
        counts = [chunks // a.parts for chunks, (a, _) in zip(self._chunks, self.layouts, strict=True)]
        needed = [chunks // b.parts for chunks, (_, b) in zip(self._chunks, self.layouts, strict=True)]
        return [
            ("cut", self._cut_function(), list(shapes)),
            ("exchange", self._exchange_function(), self._stacked(wire, counts, self.union)),
            ("join", self._join_function(shapes), self._stacked(wire, needed, self.target)),
        ]

    def mesh_of(self, program: str) -> Mesh:
        """What one of the programs runs on."""
        return {"cut": self.source, "exchange": self.union, "join": self.target}[program]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays on the target; None each in a process that has no device there."""
        sent = self.programs["cut"].compiled(list(arrays)) if self._sends else None
        outgoing = []
        for k, (wire, chunks, (a, _)) in enumerate(zip(self._wire, self._chunks, self.layouts, strict=True)):
            row = []
            for r in range(chunks // a.parts):
                blocks = {} if sent is None else {x.device: x.data for x in sent[k][r].addressable_shards}
                local = [blocks[d] if d in blocks else self._zero(wire, d) for d in self._local]
                row.append(_assemble(self.union, _ALL, wire, local))
            outgoing.append(row)
        incoming = self.programs["exchange"].compiled(outgoing)
        self.pending = jax.tree.leaves(incoming)
        if not self._receives:
            return [None] * len(self.layouts)
        received = []
        for row, wire in zip(incoming, self._wire, strict=True):
            pieces = []
            for x in row:
                blocks = {shard.device: shard.data for shard in x.addressable_shards}
                local = [blocks[d] for d in self.target.devices.flat if d in blocks]
                pieces.append(_assemble(self.target, BATCH, wire, local))
            received.append(pieces)
        joined = self.programs["join"].compiled(received)
        here = len([d for d in self._local if d in self.target.devices.flat])  # of several that receive
        self.bytes = self.bytes or sum(
            jaxprs.bytes_of(x) * here // b.parts for x, (_, b) in zip(joined, self.layouts, strict=True)
        )
        return joined

    # --- shapes ---

    def _chunk_shapes(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        found = []
        for shape, chunks, (a, _) in zip(shapes, self._chunks, self.layouts, strict=True):
            sizes = list(shape.shape)
            if chunks > 1:
                sizes[a.axis] //= chunks  # type: ignore[index]
            found.append(jax.ShapeDtypeStruct(tuple(sizes), shape.dtype))
        return found

    def _stacked(self, wire: Sequence[Any], counts: Sequence[int], mesh: Mesh) -> list[list[Any]]:
        """One block a device of the mesh, `counts` arrays of them for each array that is moved."""
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        return [
            [jax.ShapeDtypeStruct((mesh.size, *w.shape), w.dtype, sharding=sharding)] * count
            for w, count in zip(wire, counts, strict=True)
        ]

    def _zero(self, wire: Any, device: jax.Device) -> jax.Array:
        key = wire.shape, wire.dtype, device
        if key not in self._zeros:
            self._zeros[key] = jax.device_put(np.zeros((1, *wire.shape), wire.dtype), device)
        return self._zeros[key]

    # --- programs ---

    def _cut_function(self) -> Any:
        def cut_local(arrays):
            rows = []
            for x, chunks, (a, _) in zip(arrays, self._chunks, self.layouts, strict=True):
                count = chunks // a.parts
                parts = [x] if count == 1 else jnp.split(x, count, a.split_axis)
                rows.append([_to_wire(part)[None] for part in parts])
            return rows

        specs = [_spec(a) for a, _ in self.layouts]
        out = [
            [PartitionSpec(BATCH)] * (c // a.parts)
            for c, (a, _) in zip(self._chunks, self.layouts, strict=True)
        ]
        return jax.jit(
            jax.shard_map(cut_local, mesh=self.source, in_specs=(specs,), out_specs=out, check_vma=False)
        )

    def _exchange_function(self) -> Any:
        sources = [self._position[d] for d in self.source.devices.flat]
        targets = [self._position[d] for d in self.target.devices.flat]

        def exchange_local(rows):
            here = jax.lax.axis_index(_ALL)
            received = []
            for row, chunks, (_, b) in zip(rows, self._chunks, self.layouts, strict=True):
                each, copies = chunks // b.parts, b.devices // b.parts
                slots = []
                for q in range(each):
                    slot = jnp.zeros_like(row[0])
                    for r, sent in enumerate(row):
                        found = [
                            (i, j)
                            for j in range(b.parts)
                            for i in [(j * each + q) // len(row)]
                            if j * each + q == i * len(row) + r
                        ]
                        for k in range(copies):
                            pairs = [(sources[i], targets[j * copies + k]) for i, j in found]
                            if pairs:
                                got = jax.lax.ppermute(sent, _ALL, pairs)
                                mine = jnp.isin(here, jnp.array([end for _, end in pairs]))
                                slot = jnp.where(mine, got, slot)
                    slots.append(slot)
                received.append(slots)
            return received

        spec = PartitionSpec(_ALL)
        return jax.jit(
            jax.shard_map(exchange_local, mesh=self.union, in_specs=(spec,), out_specs=spec, check_vma=False)
        )

    def _join_function(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
        kinds = [keys.implementation(shape.shape, shape.dtype) for shape in shapes]
        dtypes = [shape.dtype for shape in shapes]

        def join_local(rows):
            whole = []
            for row, kind, dtype, (_, b) in zip(rows, kinds, dtypes, self.layouts, strict=True):
                parts = [_from_wire(x[0], kind, dtype) for x in row]
                whole.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, b.axis))
            return whole

        specs = [_spec(b) for _, b in self.layouts]
        jitted = jax.shard_map(
            join_local, mesh=self.target, in_specs=(PartitionSpec(BATCH),), out_specs=specs, check_vma=False
        )
        return jax.jit(
            jitted,
            out_shardings=[
                batch_sharding(self.target, b.axis if b.parts > 1 else None) for _, b in self.layouts
            ],
        )


def _spec(layout: Layout) -> PartitionSpec:
    if layout.parts == 1:
        return PartitionSpec()
    return PartitionSpec(*[None] * (layout.axis or 0), BATCH)


def _assemble(mesh: Mesh, axis: str, wire: Any, local: Sequence[jax.Array]) -> jax.Array:
    """One array of a block a device, from the blocks of this process."""
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    return jax.make_array_from_single_device_arrays((mesh.size, *wire.shape), sharding, list(local))


def _to_wire(x: jax.Array) -> jax.Array:
    """Numbers that a collective takes: keys as their words, booleans as bytes."""
    if keys.is_key(x.dtype):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == bool else x


def _from_wire(x: jax.Array, kind: Any, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=kind[0]) if kind is not None else x.astype(dtype)


def _wire_shape(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_to_wire, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
