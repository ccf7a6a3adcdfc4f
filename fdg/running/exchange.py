"""Moving arrays between groups of devices in different processes, by a collective that both sides run.

A copy from device to device ends at the border of a process. What crosses it goes through a program on the
devices of both groups together, in which each device of the source permutes its chunks to those that need
them; the other devices take part with zeros. Chunks that go the same ways travel as one.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs, keys
from fdg.lowering.mesh import layout_sharding, make_mesh, partition_spec
from fdg.placing.layout import Layout, route
from fdg.running.transfers import cut_up, join_up, part_shape

_ALL = "devices"  # the axis of the mesh of both groups
_Ends = tuple[tuple[int, int], ...]  # from which device to which


class Crossings:
    """What crosses the border of a process is a collective: one at a time, in the same order everywhere."""

    def __init__(self) -> None:
        self._pending: list[jax.Array] = []

    def wait(self) -> None:
        """Until the last one has ended; raises what it raised, once."""
        pending, self._pending = self._pending, []
        jax.block_until_ready(pending)

    def started(self, results: Sequence[jax.Array]) -> None:
        """One has started, whose results these are."""
        self._pending = list(results)


class Exchange:
    """Moves several arrays from one mesh to another, of which each process has a part, or none.

    A `transfers.Transfer`. Every process with a device in either mesh has to call it, and all of them in the
    same order: after the collective of `crossings` before it.
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        layouts: Sequence[tuple[Layout, Layout]],
        crossings: Crossings | None = None,
    ):
        self.source, self.target, self.layouts = source, target, list(layouts)
        devices = list(dict.fromkeys((*source.devices.flat, *target.devices.flat)))
        self.union = make_mesh(devices, _ALL)
        self._position = {device: i for i, device in enumerate(devices)}
        self._routes = [route(a, b) for a, b in self.layouts]
        self._crossings = crossings or Crossings()
        self.programs: dict[str, Any] = {}
        self.bytes = 0
        here = jax.process_index()
        self._local = [d for d in devices if d.process_index == here]
        self._sends = any(d.process_index == here for d in source.devices.flat)
        self._receives = any(d.process_index == here for d in target.devices.flat)
        self._zeros: dict[Any, Any] = {}

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Any, Any]]:
        """The programs: ("cut", "exchange" or "join", function, its argument)."""
        wire = []
        for shape, way, (a, _) in zip(shapes, self._routes, self.layouts, strict=True):
            count = [n * k for n, k in zip(a.parts, way.cuts, strict=True)]
            wire.append(_wire_shape(jax.ShapeDtypeStruct(part_shape(a, count), shape.dtype)))
        self._wire = wire
        counts = [math.prod(way.cuts) for way in self._routes]
        needed = [math.prod(way.joins) for way in self._routes]
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
        return self.exchange(self.cut(arrays))

    def cut(self, arrays: Sequence[Any]) -> Any:
        """What this process sends, in chunks; None if nothing."""
        return self.programs["cut"].compiled(list(arrays)) if self._sends else None

    def exchange(self, sent: Any) -> list[Any]:
        """The arrays on the target, of what `cut` gave: a collective."""
        self._crossings.wait()
        outgoing = []
        for k, (wire, way) in enumerate(zip(self._wire, self._routes, strict=True)):
            row = []
            for r in range(math.prod(way.cuts)):
                blocks = {} if sent is None else {x.device: x.data for x in sent[k][r].addressable_shards}
                local = [blocks[d] if d in blocks else self._zero(wire, d) for d in self._local]
                row.append(_assemble(self.union, wire, local))
            outgoing.append(row)
        incoming = self.programs["exchange"].compiled(outgoing)
        self._crossings.started(jax.tree.leaves(incoming))
        if not self._receives:
            return [None] * len(self.layouts)
        received = []
        for row, wire in zip(incoming, self._wire, strict=True):
            pieces = []
            for x in row:
                blocks = {shard.device: shard.data for shard in x.addressable_shards}
                local = [blocks[d] for d in self.target.devices.flat if d in blocks]
                pieces.append(_assemble(self.target, wire, local))
            received.append(pieces)
        joined = self.programs["join"].compiled(received)
        here = len([d for d in self._local if d in self.target.devices.flat])  # of several that receive
        self.bytes = self.bytes or sum(
            jaxprs.bytes_of(x) * here // b.number for x, (_, b) in zip(joined, self.layouts, strict=True)
        )
        return joined

    # --- shapes ---

    def _stacked(self, wire: Sequence[Any], counts: Sequence[int], mesh: Mesh) -> list[list[Any]]:
        """One block a device of the mesh, `counts` arrays of them for each array that is moved."""
        sharding = NamedSharding(mesh, _a_block_each(mesh))
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
            return [
                [_to_wire(part)[None] for part in cut_up(x, way)]
                for x, way in zip(arrays, self._routes, strict=True)
            ]

        specs = [partition_spec(a.spec) for a, _ in self.layouts]
        out = [[_a_block_each(self.source)] * math.prod(way.cuts) for way in self._routes]
        return jax.jit(
            jax.shard_map(cut_local, mesh=self.source, in_specs=(specs,), out_specs=out, check_vma=False)
        )

    def _exchange_function(self) -> Any:
        sources = [self._position[d] for d in self.source.devices.flat]
        targets = [self._position[d] for d in self.target.devices.flat]

        packets: dict[_Ends, list[tuple[int, int, int]]] = {}  # array, slot, which chunk of its part
        for k, way in enumerate(self._routes):
            for slot, chunk in enumerate(way.chunks):
                for r, pairs in _rounds(chunk):
                    ends = tuple((sources[i], targets[j]) for i, j in pairs)
                    packets.setdefault(ends, []).append((k, slot, r))

        def exchange_local(rows):
            here = jax.lax.axis_index(_ALL)
            received = [
                [jnp.zeros_like(row[0]) for _ in way.chunks]
                for row, way in zip(rows, self._routes, strict=True)
            ]
            for ends, places in packets.items():
                got = _permuted([rows[k][r] for k, _, r in places], ends)
                mine = jnp.isin(here, jnp.array([end for _, end in ends]))
                for (k, slot, _), x in zip(places, got, strict=True):
                    received[k][slot] = jnp.where(mine, x, received[k][slot])
            return received

        spec = PartitionSpec(_ALL)
        return jax.jit(
            jax.shard_map(exchange_local, mesh=self.union, in_specs=(spec,), out_specs=spec, check_vma=False)
        )

    def _join_function(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
        kinds = [keys.implementation(shape.shape, shape.dtype) for shape in shapes]
        dtypes = [shape.dtype for shape in shapes]

        def join_local(rows):
            return [
                join_up([_from_wire(x[0], kind, dtype) for x in row], way)
                for row, kind, dtype, way in zip(rows, kinds, dtypes, self._routes, strict=True)
            ]

        specs = [partition_spec(b.spec) for _, b in self.layouts]
        rows = (_a_block_each(self.target),)
        return jax.jit(
            jax.shard_map(join_local, mesh=self.target, in_specs=rows, out_specs=specs, check_vma=False),
            out_shardings=[layout_sharding(self.target, b) for _, b in self.layouts],
        )


def _rounds(chunk: Sequence[tuple[int, int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """A chunk's ways as permutations, in which a device sends once: (which chunk of its part, (from, to))."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sent: collections.Counter[tuple[int, int]] = collections.Counter()
    for j, (i, r) in enumerate(chunk):
        found.setdefault((r, sent[i, r]), []).append((i, j))
        sent[i, r] += 1
    return [(r, pairs) for (r, _), pairs in found.items()]


def _permuted(arrays: Sequence[jax.Array], ends: _Ends) -> list[jax.Array]:
    """Each array of a device at its partner: all that are as wide in one collective, as a row of bits."""
    found: list[Any] = [None] * len(arrays)
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        alike.setdefault(_bits(x.dtype), []).append(i)
    for bits, some in alike.items():
        row = jnp.concatenate([jax.lax.bitcast_convert_type(arrays[i], bits).reshape(-1) for i in some])
        row = jax.lax.ppermute(row, _ALL, list(ends))
        borders = np.cumsum([arrays[i].size for i in some])[:-1]
        for i, x in zip(some, jnp.split(row, borders), strict=True):
            found[i] = jax.lax.bitcast_convert_type(x.reshape(arrays[i].shape), arrays[i].dtype)
    return found


def _bits(dtype: Any) -> Any:
    """The unsigned integer of as many bits; complex numbers and those below a byte stay themselves."""
    dtype = jnp.dtype(dtype)
    width = str(8 * dtype.itemsize)
    plain = dtype.name.endswith(width) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(f"uint{width}") if plain else dtype


def _a_block_each(mesh: Mesh) -> PartitionSpec:
    """Stacked blocks, one a device, in the mesh's order."""
    return PartitionSpec(mesh.axis_names)


def _assemble(mesh: Mesh, wire: Any, local: Sequence[jax.Array]) -> jax.Array:
    """One array of a block a device, from the blocks of this process."""
    sharding = NamedSharding(mesh, _a_block_each(mesh))
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
