"""The layout of an array on the mesh of a group: which mesh axes split which dimension.

    [B, T] split along B over 4 x 2 devices     spec (("batch",),)            parts (4, 1), 2 copies of each
    [d, f] split along d and f, one axis each   spec (("batch",), ("model",)) parts (4, 2), 1 copy
    [d, f] split along d over both axes         spec (("batch", "model"),)    parts (8, 1), 1 copy

Between two layouts, an array is transferred in chunks: the largest blocks that lie within one part of each
layout.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

BATCH, MODEL = "batch", "model"  # the axes of a group's mesh

Spec = tuple[tuple[str, ...], ...]  # the mesh axes that split each dimension; later dimensions are not split


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of an array on a mesh."""

    shape: tuple[int, ...]  # the global shape
    spec: Spec  # the mesh axes that split each dimension, major to minor; replicated along all others
    mesh: tuple[tuple[str, int], ...]  # name and size of each mesh axis, major to minor

    @classmethod
    def of_batch(
        cls, shape: Sequence[int], axis: int | None, mesh: Sequence[tuple[str, int]] | int
    ) -> "Layout":
        """The layout of an array that is split along its batch axis, `axis`.

        If the axis is None or not divisible, the array is replicated. `mesh` may be a number of devices.

        >>> Layout.of_batch((6, 4), 0, 3).parts, Layout.of_batch((6, 4), 1, 3).parts
        ((3, 1), (1, 1))
        """
        mesh = ((BATCH, mesh),) if isinstance(mesh, int) else tuple(mesh)
        is_split = axis is not None and shape[axis] % dict(mesh)[BATCH] == 0
        return cls(tuple(shape), (*[()] * (axis or 0), (BATCH,)) if is_split else (), mesh)

    @functools.cached_property
    def parts(self) -> tuple[int, ...]:
        """The number of parts along each dimension."""
        sizes = dict(self.mesh)
        split = [math.prod(sizes[name] for name in axes) for axes in self.spec]
        return (*split, *[1] * (len(self.shape) - len(split)))

    @property
    def num_parts(self) -> int:
        """The number of distinct parts."""
        return math.prod(self.parts)

    @property
    def num_devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(size for _, size in self.mesh)

    @functools.cached_property
    def part_of_device(self) -> tuple[tuple[int, ...], ...]:
        """For each device in the mesh's order, the index of its part along each dimension."""
        sizes = dict(self.mesh)
        parts_of_devices = []
        for coordinates in itertools.product(*(range(size) for size in sizes.values())):
            coordinate_of = dict(zip(sizes, coordinates, strict=True))
            part = [0] * len(self.shape)
            for dimension, axes in enumerate(self.spec):
                for name in axes:
                    part[dimension] = part[dimension] * sizes[name] + coordinate_of[name]
            parts_of_devices.append(tuple(part))
        return tuple(parts_of_devices)


def model_axis(layout: Layout | None) -> int | None:
    """The dimension that is split over the mesh axis `model`; None if there is none."""
    spec = () if layout is None else layout.spec
    return next((i for i, axes in enumerate(spec) if MODEL in axes), None)


def spec_text(spec: Spec) -> str:
    """The mesh axes of each dimension, as a plan prints them; "whole" for an empty spec.

    >>> spec_text(((), ("batch", "model")))
    '-, batch+model'
    """
    return ", ".join("+".join(axes) or "-" for axes in spec) or "whole"


def moved_bytes(size: int, target: Layout) -> int:
    """The bytes that all target devices receive, if each gets its part of an array of `size` bytes."""
    return size * target.num_devices // target.num_parts


@dataclasses.dataclass(frozen=True)
class Route:
    """The chunks of a transfer from one layout to another."""

    cuts: tuple[int, ...]  # the number of chunks of a source part along each dimension
    joins: tuple[int, ...]  # the number of chunks of a target part along each dimension
    # [chunk of a target part, in row-major order][target device] -> (source device, row-major index of the
    # chunk in that device's part)
    chunks: tuple[tuple[tuple[int, int], ...], ...]


@functools.cache
def find_route(source: Layout, target: Layout) -> Route:
    """The route from one layout to another: each target device receives each of its chunks once.

    If several source devices hold the same part, target devices read from them in turn.

    >>> find_route(Layout.of_batch((6,), 0, 3), Layout.of_batch((6,), 0, 2))
    Route(cuts=(2,), joins=(3,), chunks=(((0, 0), (1, 1)), ((0, 1), (2, 0)), ((1, 0), (2, 1))))
    """
    num_chunks = [math.lcm(a, b) for a, b in zip(source.parts, target.parts, strict=True)]  # by dimension
    cuts = tuple(n // a for n, a in zip(num_chunks, source.parts, strict=True))
    joins = tuple(n // b for n, b in zip(num_chunks, target.parts, strict=True))
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, part in enumerate(source.part_of_device):
        holders.setdefault(part, []).append(device)
    chunks = []
    for chunk_index in itertools.product(*map(range, joins)):
        chunk_by_device = []
        for target_device, part in enumerate(target.part_of_device):
            global_index = [p * n + k for p, n, k in zip(part, joins, chunk_index, strict=True)]
            sources = holders[tuple(c // n for c, n in zip(global_index, cuts, strict=True))]
            index_in_part = 0
            for c, n in zip(global_index, cuts, strict=True):
                index_in_part = index_in_part * n + c % n
            chunk_by_device.append((sources[target_device % len(sources)], index_in_part))
        chunks.append(tuple(chunk_by_device))
    return Route(cuts, joins, tuple(chunks))
