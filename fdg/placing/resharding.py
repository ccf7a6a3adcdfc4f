"""Resharding on the same devices, for example of parameters between training and generation.

    training    batch 2, model 4       kernel [64, 32] is split over model: each device has a quarter
    generation  batch 4, model 2       the same devices, reordered; kernel is split over model: a half each
    common mesh m0 2, m1 2, m2 2       training: batch is (m0,), model is (m1, m2)
                                       generation: batch is (m0, m2), model is (m1,)
    change      all-gather along m2 in groups of 2; back by slicing, without communication

The new axes of each dimension may be a prefix of its old axes, as (m1,) is of (m1, m2). Then each device's
new part contains its old part, parts are all-gathered in small groups, and nothing else moves. This is the
zero-redundancy resharding of Sheng et al. (arXiv 2409.19256, section 5.3). `scheduling.unsharding` then
gathers parameters just before their use, leaf by leaf, and frees the old parts; after the last use, it slices
the leaves back.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from fdg.placing.layout import Layout, Spec
from fdg.placing.policy import Group

STAYS, GATHER, SLICE, EXCHANGE = "stays", "all-gather", "slice", "exchange"  # kinds of `Change`


@dataclasses.dataclass(frozen=True)
class CommonMesh:
    """A mesh in which the meshes of two groups on the same devices can be expressed."""

    axes: tuple[tuple[str, int], ...]  # name and size of each axis, major to minor
    devices: tuple[int, ...]  # positions of the devices, in the order of the source's mesh
    # for each axis of the source's mesh: its name, and the axes in `axes` that it consists of, major to minor
    source: tuple[tuple[str, tuple[str, ...]], ...]
    target: tuple[tuple[str, tuple[str, ...]], ...]  # the same for the axes of the target's mesh


def common_mesh(source: Group, target: Group) -> CommonMesh | None:
    """The common mesh of two groups; None if their devices differ, or if no mesh fits both device orders.

    >>> from fdg.placing.policy import Group
    >>> common_mesh(
    ...     Group("a", (0, 1, 2, 3), model=4, parameters="fsdp"),
    ...     Group("b", (0, 2, 1, 3), model=2, parameters="fsdp"),
    ... ).target
    (('batch', ('m1',)), ('model', ('m0',)))
    """
    if set(source.devices) != set(target.devices) or len(source) < 2:
        return None
    position_of = {device: i for i, device in enumerate(source.devices)}
    positions = [position_of[device] for device in target.devices]
    loops_of: dict[str, list[tuple[int, int]]] = {}  # by target axis: (size, stride), outermost first
    sizes = [size for _, size in target.mesh]
    for k, (name, size) in enumerate(target.mesh):
        stride_of_axis = math.prod(sizes[k + 1 :])
        loops = _nested_loops([positions[i * stride_of_axis] for i in range(size)])
        if loops is None:
            return None
        loops_of[name] = loops
    # The strides at which an axis of either mesh begins or ends. Between two of them lies a common axis.
    strides = [math.prod(size for _, size in source.mesh[k:]) for k in range(len(source.mesh) + 1)]
    boundaries = {edge for loops in loops_of.values() for n, stride in loops for edge in (stride, n * stride)}
    edges = sorted(boundaries.union(strides))
    if any(b % a for a, b in itertools.pairwise(edges)):
        return None
    stride_ranges = list(itertools.pairwise(edges))[::-1]  # major first
    names = {stride_range: f"m{i}" for i, stride_range in enumerate(stride_ranges)}

    def axes_between(low: int, high: int) -> tuple[str, ...]:
        return tuple(names[a, b] for a, b in stride_ranges if low <= a and b <= high)

    source_axes = tuple(
        (name, axes_between(strides[k + 1], strides[k])) for k, (name, _) in enumerate(source.mesh)
    )
    target_axes = tuple(
        (name, tuple(axis for n, stride in loops_of[name] for axis in axes_between(stride, n * stride)))
        for name, _ in target.mesh
    )
    axes = tuple((names[a, b], b // a) for a, b in stride_ranges)
    mesh = CommonMesh(axes, source.devices, source_axes, target_axes)
    return mesh if _target_order(mesh) == list(target.devices) else None


def _nested_loops(positions: Sequence[int]) -> list[tuple[int, int]] | None:
    """The (size, stride) of nested loops that yield these positions, outermost first; None if none do.

    >>> _nested_loops([0, 4, 1, 5]), _nested_loops([0, 1, 3])
    ([(2, 1), (2, 4)], None)
    """
    loops: list[tuple[int, int]] = []
    covered = 1
    while covered < len(positions):
        stride, size = positions[covered] - positions[0], 1
        while size * covered < len(positions) and positions[size * covered] - positions[0] == size * stride:
            size += 1
        if stride < 1 or len(positions) % (size * covered):
            return None
        loops.insert(0, (size, stride))
        covered *= size
    return loops


def _target_order(mesh: CommonMesh) -> list[int]:
    """The devices in the order of the target's mesh; empty unless that mesh uses each axis once."""
    sizes = dict(mesh.axes)
    names = [axis for _, axes in mesh.target for axis in axes]
    if sorted(names) != sorted(sizes):
        return []
    grid = np.reshape(mesh.devices, list(sizes.values()))
    return grid.transpose([list(sizes).index(name) for name in names]).ravel().tolist()


@dataclasses.dataclass(frozen=True)
class Change:
    """The resharding of one value on the same devices."""

    mesh: CommonMesh
    source: Layout  # the layout before
    target: Layout  # the layout afterwards
    kind: str  # `STAYS`, `GATHER` (parts grow), `SLICE` (parts shrink), or `EXCHANGE` (anything else)

    @property
    def gather_size(self) -> int:
        """The number of devices in each all-gather; 1 if there is no all-gather."""
        return self.source.num_parts // self.target.num_parts if self.kind == GATHER else 1

    def arriving(self, size: int) -> int:
        """The bytes that arrive, summed over all devices, for an array of `size` bytes."""
        part = size // self.target.num_parts
        local = {STAYS: part, SLICE: part, GATHER: size // self.source.num_parts, EXCHANGE: 0}[self.kind]
        return (part - local) * self.target.num_devices

    def temporary_bytes(self, size: int) -> int:
        """The maximum bytes that a device needs temporarily, besides its old and its new part.

        Slicing needs none. Gathering along the first dimension needs none, because the parts are contiguous.
        Gathering along another dimension needs a second buffer, for the result before its transposition.
        Gathering along several dimensions needs the intermediate results. For an exchange, XLA may
        materialise the whole array.
        """
        if self.kind == EXCHANGE:
            return size
        pairs = zip(self.source.parts, self.target.parts, strict=True)
        gathered = [i for i, (a, b) in enumerate(pairs) if a > b]
        if self.kind != GATHER:
            return 0
        part = size // self.target.num_parts
        if len(gathered) > 1:
            return part // max(self.source.parts[i] // self.target.parts[i] for i in gathered)
        outer_size = math.prod(self.target.shape[: gathered[0]]) // math.prod(
            self.target.parts[: gathered[0]]
        )
        return part if outer_size > 1 else 0


def change(mesh: CommonMesh, source: Layout, target: Layout) -> Change:
    """The resharding from a layout on the source's mesh to a layout on the target's mesh."""
    before, after = _on_common_mesh(source, mesh, mesh.source), _on_common_mesh(target, mesh, mesh.target)
    rank = len(source.shape)
    old, new = (
        [tuple(axes) for axes in (*layout.spec, *[()] * (rank - len(layout.spec)))]
        for layout in (before, after)
    )
    pairs = list(zip(old, new, strict=True))
    if all(a == b for a, b in pairs):
        kind = STAYS
    elif all(a[: len(b)] == b for a, b in pairs):
        kind = GATHER
    elif all(b[: len(a)] == a for a, b in pairs):
        kind = SLICE
    else:
        kind = EXCHANGE
    return Change(mesh, before, after, kind)


def _on_common_mesh(layout: Layout, mesh: CommonMesh, axes: Sequence[tuple[str, tuple[str, ...]]]) -> Layout:
    """Expresses a layout on the common mesh; `axes` are the common axes of each axis of the layout's mesh."""
    common_axes: Mapping[str, tuple[str, ...]] = dict(axes)
    sizes = dict(mesh.axes)
    spec: Spec = tuple(
        tuple(axis for name in names for axis in common_axes[name] if sizes[axis] > 1)
        for names in layout.spec
    )
    return Layout(layout.shape, spec, mesh.axes)
