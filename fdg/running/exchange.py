"""Transfers of arrays between groups of devices in different processes, by collectives.

Device-to-device copies cannot leave a process. So a program on the devices of both groups sends each chunk
from its source device to the devices that need it (`ppermute`); devices with nothing to send, send zeros.
Chunks with equal routes are sent as one array.
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
from fdg.placing.layout import Layout, route
from fdg.running.transfers import cut_up, join_up, part_shape, per_device

_ALL = "devices"  # the axis of the mesh of both groups
_Ends = tuple[tuple[int, int], ...]  # (from, to) devices


class Crossings:
    """Serialises collectives between processes: one at a time, in the same order in every process."""

    def __init__(self) -> None:
        self._pending: list[jax.Array] = []

    def wait(self) -> None:
        """Waits until the last collective has ended; raises its error, once."""
        pending, self._pending = self._pending, []
        jax.block_until_ready(pending)

    def started(self, results: Sequence[jax.Array]) -> None:
        """Registers a started collective by its results."""
        self._pending = list(results)


class Exchange:
    """Transfers arrays between two meshes that span processes: a `transfers.Transfer`.

    Every process with a device in either mesh must call it, in the same order (see `Crossings`).
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
        self._local, self._sources, self._targets = (
            [d for d in some if d.process_index == here]
            for some in (devices, source.devices.flat, target.devices.flat)
        )
        self._sharding = {mesh: NamedSharding(mesh, _block_spec(mesh)) for mesh in (self.union, target)}
        self._zeros: dict[Any, Any] = {}

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """The programs: ("cut", "exchange" or "join", mesh, function, its argument)."""
        self._sent: list[jax.ShapeDtypeStruct] = []  # for each array, a device's stacked chunks
        self._taken: list[jax.ShapeDtypeStruct] = []
        for shape, way, (a, _) in zip(shapes, self._routes, self.layouts, strict=True):
            count = [n * k for n, k in zip(a.parts, way.cuts, strict=True)]
            wire = jax.eval_shape(_to_wire, jax.ShapeDtypeStruct(part_shape(a, count), shape.dtype))
            for blocks, number in ((self._sent, math.prod(way.cuts)), (self._taken, len(way.chunks))):
                blocks.append(jax.ShapeDtypeStruct((number, *wire.shape), wire.dtype))
        return [
            ("cut", self.source, self._cut_function(), list(shapes)),
            ("exchange", self.union, self._exchange_function(), self._stacked(self._sent, self.union)),
            ("join", self.target, self._join_function(shapes), self._stacked(self._taken, self.target)),
        ]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays on the target; each is None in a process without target devices."""
        return self.exchange(self.cut(arrays))

    def cut(self, arrays: Sequence[Any]) -> Any:
        """The chunks that this process sends; None if it has no source device."""
        return self.programs["cut"].compiled(list(arrays)) if self._sources else None

    def exchange(self, sent: Any) -> list[Any]:
        """Runs the collective on the result of `cut`; returns the arrays on the target."""
        self._crossings.wait()
        outgoing = []
        for k, block in enumerate(self._sent):
            blocks = {} if sent is None else {x.device: x.data for x in sent[k].addressable_shards}
            local = [blocks[d] if d in blocks else self._zero(block, d) for d in self._local]
            outgoing.append(self._assembled(self.union, block, local))
        incoming = self.programs["exchange"].compiled(outgoing)
        self._crossings.started(incoming)
        if not self._targets:
            return [None] * len(self.layouts)
        received = []
        for x, block in zip(incoming, self._taken, strict=True):
            blocks = {shard.device: shard.data for shard in x.addressable_shards}
            received.append(self._assembled(self.target, block, [blocks[d] for d in self._targets]))
        joined = self.programs["join"].compiled(received)
        self.bytes = self.bytes or sum(
            jaxprs.bytes_of(x) * len(self._targets) // b.number
            for x, (_, b) in zip(joined, self.layouts, strict=True)
        )
        return joined

    # --- shapes: for each array, one block of chunks for each device ---

    def _stacked(self, blocks: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
        sharding = self._sharding[mesh]
        return [jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding) for x in blocks]

    def _assembled(self, mesh: Mesh, block: jax.ShapeDtypeStruct, local: list[jax.Array]) -> jax.Array:
        """An array on the mesh, made of this process's blocks."""
        shape = mesh.size, *block.shape
        return jax.make_array_from_single_device_arrays(shape, self._sharding[mesh], local)

    def _zero(self, block: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
        key = block.shape, block.dtype, device
        if key not in self._zeros:
            self._zeros[key] = jax.device_put(np.zeros((1, *block.shape), block.dtype), device)
        return self._zeros[key]

    # --- programs ---

    def _cut_function(self) -> Any:
        def cut_local(arrays):
            return [
                jnp.stack([_to_wire(part) for part in cut_up(x, way)])[None]
                for x, way in zip(arrays, self._routes, strict=True)
            ]

        specs = [partition_spec(a.spec) for a, _ in self.layouts]
        out = [_block_spec(self.source)] * len(specs)
        return per_device(cut_local, self.source, specs, out)

    def _exchange_function(self) -> Any:
        sources = [self._position[d] for d in self.source.devices.flat]
        targets = [self._position[d] for d in self.target.devices.flat]
        # By round and ends: (array, slot, index of the chunk in its part).
        packets: dict[tuple[int, _Ends], list[tuple[int, int, int]]] = {}
        for k, way in enumerate(self._routes):
            for slot, chunk in enumerate(way.chunks):
                ways = [(sources[i], r, targets[j]) for j, (i, r) in enumerate(chunk)]
                for number, r, ends in rounds(ways, frozenset(sources)):
                    packets.setdefault((number, ends), []).append((k, slot, r))

        def exchange_local(blocks):
            here = jax.lax.axis_index(_ALL)
            received = [
                [jnp.zeros_like(x[0, 0]) for _ in way.chunks]
                for x, way in zip(blocks, self._routes, strict=True)
            ]
            for (_, ends), places in sorted(packets.items(), key=lambda one: one[0][0]):
                sent = [blocks[k][0, r] for k, _, r in places]
                if passing := sorted({sender for sender, _ in ends} - set(sources)):
                    passes = jnp.isin(here, jnp.array(passing))
                    sent = [
                        jnp.where(passes, received[k][slot], x)
                        for x, (k, slot, _) in zip(sent, places, strict=True)
                    ]
                mine = jnp.isin(here, jnp.array([end for _, end in ends]))
                for (k, slot, _), x in zip(places, _permuted(sent, ends), strict=True):
                    received[k][slot] = jnp.where(mine, x, received[k][slot])
            return [jnp.stack(slots)[None] for slots in received]

        spec = PartitionSpec(_ALL)
        return per_device(exchange_local, self.union, spec, spec)

    def _join_function(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
        def join_local(blocks):
            return [
                join_up([_from_wire(chunk, shape) for chunk in x[0]], way)
                for x, shape, way in zip(blocks, shapes, self._routes, strict=True)
            ]

        specs = [partition_spec(b.spec) for _, b in self.layouts]
        ends = [layout_sharding(self.target, b) for _, b in self.layouts]
        return per_device(join_local, self.target, _block_spec(self.target), specs, out_shardings=ends)


def rounds(ways: Sequence[tuple[int, int, int]], sources: frozenset[int]) -> list[tuple[int, int, _Ends]]:
    """Broadcast trees as rounds of permutations, in which each device sends and receives at most once.

    Receivers forward a chunk, so it reaches n devices in log2(n + 1) rounds. Sources do not forward: they
    have their own chunks to send. A way is (source device, index of its chunk, target device) for each
    receiver; `sources` are all devices with chunks of their own. Returns (round, index of the source's chunk,
    (from, to) pairs).

    >>> rounds([(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)], frozenset([0]))
    [(0, 0, ((0, 1),)), (1, 0, ((0, 2), (1, 3))), (2, 0, ((0, 4),))]
    """
    wanted: dict[tuple[int, int], list[int]] = {}
    for source, chunk, target in ways:
        wanted.setdefault((source, chunk), []).append(target)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (source, chunk), targets in wanted.items():
        have, number, reached = [source], 0, 0
        while reached < len(targets):
            pairs = list(zip(have, targets[reached:], strict=False))
            found.setdefault((number, chunk), []).extend(pairs)
            have += [target for _, target in pairs if target not in sources]
            number, reached = number + 1, reached + len(pairs)
    return [(number, chunk, tuple(pairs)) for (number, chunk), pairs in found.items()]


def _permuted(arrays: Sequence[jax.Array], ends: _Ends) -> list[jax.Array]:
    """Permutes arrays between devices, with one collective for each element width (as unsigned integers)."""
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
    """The unsigned integer dtype of equal width; complex dtypes and those below a byte are returned as is."""
    dtype = jnp.dtype(dtype)
    width = str(8 * dtype.itemsize)
    plain = dtype.name.endswith(width) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(f"uint{width}") if plain else dtype


def _block_spec(mesh: Mesh) -> PartitionSpec:
    """The spec of stacked blocks, one for each device in the mesh's order."""
    return PartitionSpec(mesh.axis_names)


def _to_wire(x: jax.Array) -> jax.Array:
    """Converts to a dtype that collectives support: keys to their words, booleans to bytes."""
    return x.astype(jnp.uint8) if x.dtype == bool else keys.words(x)


def _from_wire(x: jax.Array, like: Any) -> jax.Array:
    return keys.from_words(x, like) if keys.is_key(like.dtype) else x.astype(like.dtype)
