"""Asynchronous transfers of arrays between groups of devices with different layouts.

An array travels in chunks (`placing.layout.route`): each source device splits its part, each chunk is copied
to the devices that need it, and these concatenate their chunks. Device-to-device copies are asynchronous,
whereas `jax.device_put` between unequal shardings waits for the values.

`Mover` transfers within a process, `exchange.Exchange` between processes; both are a `Transfer`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fdg import jaxprs
from fdg.lowering.mesh import layout_sharding, partition_spec
from fdg.placing.layout import Layout, Route, route


class Transfer(Protocol):
    """Moves several arrays from one mesh to another."""

    programs: dict[str, Any]  # the compiled `functions`, set by the caller that compiles them
    bytes: int  # bytes that a call copies to the devices of this process; 0 before the first call

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """The functions to compile for it: (name, mesh, function, argument)."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Transfers arrays asynchronously; each result is None in a process without target devices."""


class Mover:
    """Transfers arrays from one mesh to another by device-to-device copies.

    `layouts` are those of each array (at the source, at the target).
    """

    def __init__(self, source: Mesh, target: Mesh, layouts: Sequence[tuple[Layout, Layout]]):
        self.source, self.target, self.layouts = source, target, list(layouts)
        source_devices, self._target_devices = list(source.devices.flat), list(target.devices.flat)
        overlap = set(source_devices) & set(self._target_devices)
        # On a shared device this must be a copy, since the original may be donated. (JAX respects `may_alias`
        # for each device separately, but not for copies on several.)
        self._may_alias = False if overlap else None
        self._routes = [route(a, b) for a, b in self.layouts]
        self._copied = [a.number == b.number == 1 and not overlap for a, b in self.layouts]
        self.cuts = any(math.prod(r.cuts) > 1 for r in self._routes)
        self.joins = any(math.prod(r.joins) > 1 for r in self._routes)
        self._targets = [layout_sharding(target, b) for _, b in self.layouts]
        self._pieces = [part_shape(b, r.joins) for r, (_, b) in zip(self._routes, self.layouts, strict=True)]
        # the compiled "cut", "join" and "fetch", set by the caller that compiles `functions`
        self.programs: dict[str, Any] = {}
        self.bytes = 0  # bytes that a call copies to all devices; 0 before the first call
        one, other = source_devices[0], self._target_devices[0]
        self.fetches = (
            all(self._copied) and source.size == target.size == 1 and one.platform == other.platform
        )

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """The programs needed around the copies: ("cut", "join" or "fetch", mesh, function, its argument)."""
        found: list[tuple[str, Mesh, Any, Any]] = []
        if self.fetches:
            fetch = jax.jit(lambda arrays: list(arrays), donate_argnums=0, keep_unused=True)
            found.append(("fetch", self.target, fetch, list(shapes)))
        if self.cuts:
            found.append(("cut", self.source, self._cut_function(), list(shapes)))
        if self.joins:
            rows = [
                [jax.ShapeDtypeStruct(piece, shape.dtype, sharding=sharding)] * math.prod(r.joins)
                for shape, piece, r, sharding in zip(
                    shapes, self._pieces, self._routes, self._targets, strict=True
                )
            ]
            found.append(("join", self.target, self._join_function(), rows))
        return found

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays on the target, possibly not computed yet."""
        if self.fetches and not any(x.committed for x in arrays):
            # An identity program on the target device: its call copies all arguments at once.
            self.bytes = self.bytes or sum(map(jaxprs.bytes_of, arrays))
            return self.programs["fetch"].compiled(list(arrays))
        pieces = self.programs["cut"].compiled(list(arrays)) if self.cuts else [[x] for x in arrays]
        buffers: list[list[Any]] = []
        places: list[list[Any]] = []
        for row, way, copied, sharding in zip(pieces, self._routes, self._copied, self._targets, strict=True):
            if copied:
                buffers.append([row[0].addressable_data(0)])
                places.append([sharding])
            else:
                buffers.append([[row[rank].addressable_data(i) for i, rank in chunk] for chunk in way.chunks])
                places.append([self._target_devices] * len(way.chunks))
        options = {} if self._may_alias is None else {"may_alias": self._may_alias}
        arrived = jax.device_put(buffers, places, **options)
        self.bytes = self.bytes or sum(
            jaxprs.bytes_of(x) * len(x.sharding.device_set) for x in jax.tree.leaves(arrived)
        )
        joined = [
            some
            if copied
            else [jax.make_array_from_single_device_arrays(shape, sharding, chunk) for chunk in some]
            for some, copied, shape, sharding in zip(
                arrived, self._copied, self._pieces, self._targets, strict=True
            )
        ]
        return self.programs["join"].compiled(joined) if self.joins else [x for (x,) in joined]

    # --- the programs around the copies, without collectives ---

    def _cut_function(self) -> Any:
        specs = [partition_spec(a.spec) for a, _ in self.layouts]
        out = [[spec] * math.prod(r.cuts) for spec, r in zip(specs, self._routes, strict=True)]

        def cut(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
            return [cut_up(x, r) for x, r in zip(arrays, self._routes, strict=True)]

        return per_device(cut, self.source, specs, out)

    def _join_function(self) -> Any:
        specs = [partition_spec(b.spec) for _, b in self.layouts]

        def join(rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
            return [join_up(row, r) for row, r in zip(rows, self._routes, strict=True)]

        rows = [[spec] * math.prod(r.joins) for spec, r in zip(specs, self._routes, strict=True)]
        return per_device(join, self.target, rows, specs, out_shardings=self._targets)


def per_device(
    function: Callable[[Any], Any], mesh: Mesh, in_specs: Any, out_specs: Any, **options: Any
) -> Any:
    """A jitted function that each device of a mesh runs on its parts of one argument."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


def part_shape(layout: Layout, count: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array of which each device holds one of the `count` chunks of its part."""
    return tuple(n // k for n, k in zip(layout.shape, count, strict=True))


def cut_up(part: jax.Array, way: Route) -> list[jax.Array]:
    """The chunks of a device's part, row by row."""
    pieces = [part]
    for axis, count in enumerate(way.cuts):
        if count > 1:
            pieces = [chunk for piece in pieces for chunk in jnp.split(piece, count, axis)]
    return pieces


def join_up(pieces: Sequence[jax.Array], way: Route) -> jax.Array:
    """Joins the chunks of a device's part, row by row."""
    pieces = list(pieces)
    for axis in reversed(range(len(way.joins))):
        count = way.joins[axis]
        if count > 1:
            pieces = [jnp.concatenate(pieces[i : i + count], axis) for i in range(0, len(pieces), count)]
    (whole,) = pieces
    return whole
