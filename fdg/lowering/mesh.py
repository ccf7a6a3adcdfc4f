"""The mesh of a group of devices, and how arrays lie on it."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdg.placing.layout import BATCH, Layout, Spec
from fdg.placing.policy import Group

SEED = "seed"  # the axis of a mesh of independent agents


def make_mesh(devices: Sequence[jax.Device], axis: str = BATCH) -> Mesh:
    """A mesh of one axis, in the devices' order."""
    return Mesh(np.array(devices, dtype=object), (axis,), axis_types=(AxisType.Auto,))


def group_mesh(group: Group, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a group, of all devices given to the engine: one axis, or two if it shards parameters."""
    names, sizes = zip(*group.mesh, strict=True)
    chosen = np.array([devices[i] for i in group.devices], dtype=object)
    return Mesh(chosen.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def is_of_cpus(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def batch_sharding(mesh: Mesh, axis: int | None) -> NamedSharding:
    """Split along `axis` over the mesh's batch axis; a copy on each device if None."""
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, BATCH))


def partition_spec(spec: Spec) -> PartitionSpec:
    """A layout's axes as JAX has them."""
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec))


def layout_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """A layout on its mesh."""
    return NamedSharding(mesh, partition_spec(layout.spec))
