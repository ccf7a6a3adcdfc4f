"""Transfers arrays asynchronously between groups of devices with different layouts.

Arrays are transferred in chunks (`placing.layout.find_route`): each source device splits its part, each chunk
is copied to the devices that need it, and these devices concatenate their chunks. Device-to-device copies are
asynchronous, whereas `jax.device_put` between unequal shardings waits for the values.

`Mover` transfers within a process, `exchange.Exchange` between processes; both are subclasses of `Transfer`.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fdg import jaxprs
from fdg.lowering.mesh import layout_sharding, partition_spec
from fdg.placing.layout import Layout, Route, find_route


class Transfer(abc.ABC):
    """Moves several arrays from one mesh to another.

    Attributes:
      layouts: the layouts of each array (at the source, at the target).
      programs: the compiled `functions` by name, set by the caller that compiles them.
      bytes: bytes that a call copies to the devices of this process; 0 until they are known.
    """

    def __init__(self, source: Mesh, target: Mesh, layouts: Sequence[tuple[Layout, Layout]]):
        self.source, self.target, self.layouts = source, target, list(layouts)
        self.programs: dict[str, Any] = {}
        self.bytes = 0

    @abc.abstractmethod
    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """The functions to compile for the transfer: (name, mesh, function, argument)."""

    @abc.abstractmethod
    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Transfers arrays asynchronously; each result is None in a process without target devices."""


class Mover(Transfer):
    """Transfers arrays by device-to-device copies; its programs are "cut", "join" and "fetch".

    A CPU device runs its programs in the order of their dispatch, so "fetch" delays the programs behind it
    until its arrays are computed. `may_fetch` says that the target's next program needs them anyway.
    """

    def __init__(
        self, source: Mesh, target: Mesh, layouts: Sequence[tuple[Layout, Layout]], may_fetch: bool = True
    ):
        super().__init__(source, target, layouts)
        source_devices, self._target_devices = list(source.devices.flat), list(target.devices.flat)
        overlap = set(source_devices) & set(self._target_devices)
        # On a device of both groups, `device_put` must copy, since the original may be donated. (JAX respects
        # `may_alias` for a destination of one device, but not of several.)
        self._may_alias = False if overlap else None
        self._routes = [find_route(a, b) for a, b in self.layouts]
        # For each array: whether it is one part on one device at both ends, so that it is copied unchanged.
        self._is_plain = [a.num_parts == b.num_parts == 1 and not overlap for a, b in self.layouts]
        self.cuts = any(math.prod(route.cuts) > 1 for route in self._routes)
        self.joins = any(math.prod(route.joins) > 1 for route in self._routes)
        self._shardings = [layout_sharding(target, layout) for _, layout in self.layouts]
        self._chunk_shapes = [
            part_shape(layout, route.joins)
            for route, (_, layout) in zip(self._routes, self.layouts, strict=True)
        ]
        is_one_platform = source_devices[0].platform == self._target_devices[0].platform
        self.can_fetch = (
            may_fetch and all(self._is_plain) and source.size == target.size == 1 and is_one_platform
        )

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """The programs that run before and after the copies."""
        programs: list[tuple[str, Mesh, Any, Any]] = []
        if self.can_fetch:
            fetch = jax.jit(lambda arrays: list(arrays), donate_argnums=0, keep_unused=True)
            programs.append(("fetch", self.target, fetch, list(shapes)))
        if self.cuts:
            programs.append(("cut", self.source, self._cut_function(), list(shapes)))
        if self.joins:
            chunk_rows = [
                [jax.ShapeDtypeStruct(chunk_shape, shape.dtype, sharding=sharding)] * math.prod(route.joins)
                for shape, chunk_shape, route, sharding in zip(
                    shapes, self._chunk_shapes, self._routes, self._shardings, strict=True
                )
            ]
            programs.append(("join", self.target, self._join_function(), chunk_rows))
        return programs

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays on the target, possibly not computed yet."""
        if self.can_fetch and not any(x.committed for x in arrays):
            # "fetch" is an identity program on the target device: its call copies all arguments at once.
            self.bytes = self.bytes or sum(map(jaxprs.bytes_of, arrays))
            return self.programs["fetch"].compiled(list(arrays))
        chunk_rows = self.programs["cut"].compiled(list(arrays)) if self.cuts else [[x] for x in arrays]
        buffers: list[list[Any]] = []
        destinations: list[list[Any]] = []
        for chunks, route, is_plain, sharding in zip(
            chunk_rows, self._routes, self._is_plain, self._shardings, strict=True
        ):
            if is_plain:
                buffers.append([chunks[0].addressable_data(0)])
                destinations.append([sharding])
            else:
                buffers.append(
                    [[chunks[rank].addressable_data(i) for i, rank in chunk] for chunk in route.chunks]
                )
                destinations.append([self._target_devices] * len(route.chunks))
        options = {} if self._may_alias is None else {"may_alias": self._may_alias}
        copied = jax.device_put(buffers, destinations, **options)
        self.bytes = self.bytes or sum(
            jaxprs.bytes_of(x) * len(x.sharding.device_set) for x in jax.tree.leaves(copied)
        )
        target_chunks = [
            chunks
            if is_plain
            else [jax.make_array_from_single_device_arrays(shape, sharding, chunk) for chunk in chunks]
            for chunks, is_plain, shape, sharding in zip(
                copied, self._is_plain, self._chunk_shapes, self._shardings, strict=True
            )
        ]
        return self.programs["join"].compiled(target_chunks) if self.joins else [x for (x,) in target_chunks]

    # --- the programs before and after the copies, which have no collectives ---

    def _cut_function(self) -> Any:
        specs = [partition_spec(layout.spec) for layout, _ in self.layouts]
        out_specs = [[spec] * math.prod(route.cuts) for spec, route in zip(specs, self._routes, strict=True)]

        def cut(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
            return [cut_up(x, route) for x, route in zip(arrays, self._routes, strict=True)]

        return per_device(cut, self.source, specs, out_specs)

    def _join_function(self) -> Any:
        specs = [partition_spec(layout.spec) for _, layout in self.layouts]

        def join(chunk_rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
            return [join_up(chunks, route) for chunks, route in zip(chunk_rows, self._routes, strict=True)]

        in_specs = [[spec] * math.prod(route.joins) for spec, route in zip(specs, self._routes, strict=True)]
        return per_device(join, self.target, in_specs, specs, out_shardings=self._shardings)


def per_device(
    function: Callable[[Any], Any], mesh: Mesh, in_specs: Any, out_specs: Any, **options: Any
) -> Any:
    """Jits `function` of one argument so that each device of a mesh runs it on its part of the argument."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


def part_shape(layout: Layout, num_chunks: Sequence[int]) -> tuple[int, ...]:
    """The shape of a layout's array with each axis divided by its number of chunks."""
    return tuple(n // k for n, k in zip(layout.shape, num_chunks, strict=True))


def cut_up(part: jax.Array, route: Route) -> list[jax.Array]:
    """Splits a device's part into its chunks, in row-major order."""
    chunks = [part]
    for axis, count in enumerate(route.cuts):
        if count > 1:
            chunks = [piece for chunk in chunks for piece in jnp.split(chunk, count, axis)]
    return chunks


def join_up(chunks: Sequence[jax.Array], route: Route) -> jax.Array:
    """Joins the chunks of a device's part, which are in row-major order."""
    chunks = list(chunks)
    for axis in reversed(range(len(route.joins))):
        count = route.joins[axis]
        if count > 1:
            chunks = [jnp.concatenate(chunks[i : i + count], axis) for i in range(0, len(chunks), count)]
    (whole,) = chunks
    return whole
