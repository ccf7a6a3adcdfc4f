"""Moving arrays from one group of devices to another, however many devices each has, without waiting.

An array split over m devices becomes one split over n by way of lcm(m, n) chunks: each device of the source
cuts its part, each chunk goes to the device that needs it, and that device joins what it got. Copies from
device to device are asynchronous, where `jax.device_put` between unequal splits waits for the values.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fdg import jaxprs
from fdg.lowering.constraints import batch_sharding
from fdg.placing.layout import Layout


class Mover:
    """Moves several arrays from one mesh to another.

    Args:
      layouts: (at the source, at the target) of each array.

    Attributes:
      programs: the compiled "cut" and "join", put here by whoever compiles `functions`.
      bytes: that a call moves: what arrives on all devices together; 0 before the first.
    """

    def __init__(self, source: Mesh, target: Mesh, layouts: Sequence[tuple[Layout, Layout]]):
        self.source, self.target, self.layouts = source, target, list(layouts)
        self._source_devices, self._target_devices = list(source.devices.flat), list(target.devices.flat)
        overlap = set(self._source_devices) & set(self._target_devices)
        # On a shared device the copy must be one: the original may be donated. (JAX heeds `may_alias` for
        # each device apart, not for copies on several.)
        self._may_alias = False if overlap else None
        self._chunks = [math.lcm(a.parts, b.parts) for a, b in self.layouts]
        self.cuts = any(c > a.parts for c, (a, _) in zip(self._chunks, self.layouts, strict=True))
        self.joins = any(c > b.parts for c, (_, b) in zip(self._chunks, self.layouts, strict=True))
        self._targets = [batch_sharding(target, b.axis if b.parts > 1 else None) for _, b in self.layouts]
        self.programs: dict[str, Any] = {}
        self.bytes = 0

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Any, Any]]:
        """The programs needed around the copies: ("cut" or "join", function, its argument).

        Args:
          shapes: of the arrays on the source.
        """
        cut = self._cut_shapes(shapes)
        found: list[tuple[str, Any, Any]] = []
        if self.cuts:
            found.append(("cut", self._cut_function(cut), list(shapes)))
        if self.joins:
            found.append(("join", self._join_function(), self._join_shapes(cut)))
        return found

    def mesh_of(self, program: str) -> Mesh:
        """What one of the programs runs on."""
        return {"cut": self.source, "join": self.target}[program]

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays on the target; returns before they are there."""
        pieces = self.programs["cut"].compiled(list(arrays)) if self.cuts else [[x] for x in arrays]
        buffers: list[jax.Array] = []
        places: list[Any] = []
        for pieces_of_one, chunks, (a, b), sharding in zip(
            pieces, self._chunks, self.layouts, self._targets, strict=True
        ):
            if a.parts == b.parts == 1 and self._may_alias is None:
                buffers.append(pieces_of_one[0].addressable_data(0))
                places.append(sharding)
                continue
            parts = [[piece.addressable_data(i) for piece in pieces_of_one] for i in range(a.parts)]
            each, copies = chunks // b.parts, b.devices // b.parts
            for q in range(each):
                for j in range(b.parts):
                    i, r = divmod(j * each + q, chunks // a.parts)
                    for k in range(copies):
                        buffers.append(parts[i][r])
                        places.append(self._target_devices[j * copies + k])
        options = {} if self._may_alias is None else {"may_alias": self._may_alias}
        arrived = jax.device_put(buffers, places, **options)
        self.bytes = self.bytes or sum(jaxprs.bytes_of(x) * len(x.sharding.device_set) for x in arrived)
        moved = iter(arrived)
        joined = []
        for chunks, (a, b), sharding in zip(self._chunks, self.layouts, self._targets, strict=True):
            if a.parts == b.parts == 1 and self._may_alias is None:
                joined.append([next(moved)])
                continue
            shape = list(b.shape)
            if chunks > b.parts:
                shape[b.axis] = shape[b.axis] // (chunks // b.parts)  # type: ignore[index]
            joined.append(
                [
                    jax.make_array_from_single_device_arrays(
                        tuple(shape), sharding, [next(moved) for _ in range(b.devices)]
                    )
                    for _ in range(chunks // b.parts)
                ]
            )
        return self.programs["join"].compiled(joined) if self.joins else [x for (x,) in joined]

    # --- the programs around the copies ---

    def _cut_function(self, shapes: Any) -> Any:
        def cut(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
            cut_up = []
            for x, chunks, (a, _) in zip(arrays, self._chunks, self.layouts, strict=True):
                count = chunks // a.parts
                if count == 1:
                    cut_up.append([x])
                    continue
                axis, size = a.split_axis, a.shape[a.split_axis] // chunks
                rows = x.reshape(*a.shape[:axis], a.parts, count, size, *a.shape[axis + 1 :])
                flat = (*a.shape[:axis], a.parts * size, *a.shape[axis + 1 :])
                cut_up.append(
                    [
                        jax.lax.index_in_dim(rows, r, axis + 1, keepdims=False).reshape(flat)
                        for r in range(count)
                    ]
                )
            return cut_up

        shardings = [[shape.sharding for shape in row] for row in shapes]
        return jax.jit(cut, out_shardings=shardings)

    def _cut_shapes(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[list[jax.ShapeDtypeStruct]]:
        found = []
        for shape, chunks, (a, _) in zip(shapes, self._chunks, self.layouts, strict=True):
            sizes, sharding = list(a.shape), batch_sharding(self.source, a.axis if a.parts > 1 else None)
            count = chunks // a.parts
            if count > 1:
                sizes[a.axis] = sizes[a.axis] // count  # type: ignore[index]
            found.append([jax.ShapeDtypeStruct(tuple(sizes), shape.dtype, sharding=sharding)] * count)
        return found

    def _join_shapes(self, cut: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> list[list[jax.ShapeDtypeStruct]]:
        found = []
        for row, chunks, (_, b), sharding in zip(cut, self._chunks, self.layouts, self._targets, strict=True):
            sizes, count = list(b.shape), chunks // b.parts
            if count > 1:
                sizes[b.axis] = sizes[b.axis] // count  # type: ignore[index]
            found.append([jax.ShapeDtypeStruct(tuple(sizes), row[0].dtype, sharding=sharding)] * count)
        return found

    def _join_function(self) -> Any:
        def join(pieces: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
            whole = []
            for row, (_, b) in zip(pieces, self.layouts, strict=True):
                if len(row) == 1:
                    whole.append(row[0])
                    continue
                axis, size = b.split_axis, b.shape[b.split_axis] // (b.parts * len(row))
                split = (*b.shape[:axis], b.parts, 1, size, *b.shape[axis + 1 :])
                whole.append(jnp.concatenate([x.reshape(split) for x in row], axis + 1).reshape(b.shape))
            return whole

        return jax.jit(join, out_shardings=self._targets)
