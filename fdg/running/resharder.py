"""Resharding: changes the layout of arrays on the same devices, one array at a time."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fdg.lowering.mesh import layout_sharding, mesh_of
from fdg.placing.layout import Layout
from fdg.placing.resharding import Change


class Resharder:
    """Reshards arrays between two meshes of the same devices: a `Transfer`.

    Arrays with the same shape and change share a program. If `lends`, each array is deleted as soon as its
    program is dispatched, so at most one array exists in both layouts.

    Args:
      layouts: for each array, its layouts (at the source, at the target).
      changes: the same changes, on the common device mesh of source and target.
      lends: whether to delete each source array.

    Attributes:
      programs: the compiled programs of `functions`, by name.
      bytes: bytes that all devices receive in total.
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        layouts: Sequence[tuple[Layout, Layout]],
        changes: Sequence[Change],
        lends: bool = False,
    ):
        self._changes, self._lends = list(changes), lends
        self._mesh = mesh_of(list(source.devices.flat), changes[0].mesh.axes)  # in the source's order
        self._ends = [layout_sharding(target, after) for _, after in layouts]
        self._names: list[str] = []
        self.programs: dict[str, Any] = {}
        self.bytes = 0

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Any, Any]]:
        """A program for each kind of array: (name, function, its argument)."""
        known: dict[Any, str] = {}
        found = []
        self._names = []
        for shape, change in zip(shapes, self._changes, strict=True):
            kind = shape.shape, shape.dtype, change.source, change.target
            if kind not in known:
                known[kind] = f"reshard {len(known)}"
                before, _ = shardings(change, self._mesh)
                argument = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=before)
                found.append((known[kind], resharding(change, self._mesh), argument))
            self._names.append(known[kind])
        self.bytes = sum(
            change.arriving(int(np.prod(shape.shape)) * shape.dtype.itemsize)
            for shape, change in zip(shapes, self._changes, strict=True)
        )
        return found

    def mesh_of(self, program: str) -> Mesh:
        """What the programs run on."""
        return self._mesh

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Reshards the arrays to the target's layouts, asynchronously."""
        moved = []
        for array, change, name, end in zip(arrays, self._changes, self._names, self._ends, strict=True):
            before, _ = shardings(change, self._mesh)
            moved.append(_seen_as(self.programs[name].compiled(_seen_as(array, before)), end))
            if self._lends:
                array.delete()
        return moved


def _seen_as(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers with an equivalent sharding, without a copy."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def shardings(change: Change, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Before and afterwards, on the common mesh."""
    return layout_sharding(mesh, change.source), layout_sharding(mesh, change.target)


def resharding(change: Change, mesh: Mesh) -> Any:
    """The program of a change, of one array; its argument is not donated, for its result has another size."""
    _, after = shardings(change, mesh)
    return jax.jit(lambda x: x, out_shardings=after)
