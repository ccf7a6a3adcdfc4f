"""Meshes of groups, and shardings of arrays on them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdg.placing.layout import BATCH, Layout, Spec
from fdg.placing.policy import Group

AGENT_AXIS = "seed"  # the name of the mesh axis over which independent agents are split


def mesh_of(devices: Sequence[Any], axes: Sequence[tuple[str, int]]) -> Mesh:
    """A mesh whose `axes` are pairs of a name and a size; devices fill it in row-major order."""
    names, sizes = zip(*axes, strict=True)
    grid = np.array(devices, dtype=object).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def make_mesh(devices: Sequence[jax.Device], axis: str = BATCH) -> Mesh:
    """A mesh with one axis."""
    return mesh_of(devices, [(axis, len(devices))])


def group_mesh(group: Group, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a group (`Group.mesh`); the group's devices are positions in `devices`."""
    return mesh_of([devices[i] for i in group.devices], group.mesh)


def is_of_cpus(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def batch_sharding(mesh: Mesh, axis: int | None) -> NamedSharding:
    """The sharding that splits `axis` over the mesh's batch axis; replicated if None."""
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, BATCH))


def partition_spec(spec: Spec) -> PartitionSpec:
    """A layout's spec as a `PartitionSpec`."""
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec))


def layout_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """The `NamedSharding` of a layout on its mesh."""
    return NamedSharding(mesh, partition_spec(layout.spec))
