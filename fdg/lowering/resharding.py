"""Changes of layout on the same devices as programs, from `placing.resharding`: one all-gather, or a cut,
each.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from fdg.lowering.mesh import layout_sharding
from fdg.placing.resharding import Change, CommonMesh


def common_device_mesh(mesh: CommonMesh, source: Mesh) -> Mesh:
    """The common mesh of two groups, of the devices of the first of them."""
    names, sizes = zip(*mesh.axes, strict=True)
    devices: Sequence[Any] = list(source.devices.flat)  # in the source's order, which is the common one's
    grid = np.array(devices, dtype=object).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def shardings(change: Change, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Before and afterwards, on the common mesh."""
    return layout_sharding(mesh, change.source), layout_sharding(mesh, change.target)


def resharding(change: Change, mesh: Mesh) -> Any:
    """The program of a change, of one array; its argument is not donated, for its result has another size."""
    _, after = shardings(change, mesh)
    return jax.jit(lambda x: x, out_shardings=after)
