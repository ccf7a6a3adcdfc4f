"""Names of mesh axes, and how arrays lie on a mesh."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs
from fdg.fragment import boundary_p

BATCH, SEED = "batch", "seed"  # names of the mesh axes


def make_mesh(devices: Sequence[jax.Device], axis: str = BATCH) -> Mesh:
    """A mesh of one axis, in the devices' order."""
    return Mesh(np.array(devices, dtype=object), (axis,), axis_types=(AxisType.Auto,))


def batch_sharding(mesh: Mesh, axis: int | None) -> NamedSharding:
    """Split along `axis` over the mesh; a copy on each device if None."""
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, BATCH))


def constrain(jaxpr: core.ClosedJaxpr, mesh: Mesh, axes: Sequence[int | None] = ()) -> core.ClosedJaxpr:
    """Replaces each fragment border by the sharding that the mesh gives its batch axis."""

    @functools.cache
    def constraint(shape, dtype, axis):
        if axis is not None and shape[axis] % mesh.size:
            return None  # left to the partitioner; the plan lets no fragment's own batch get here
        sharding = batch_sharding(mesh, axis)
        traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
            jax.ShapeDtypeStruct(shape, dtype)
        )
        return traced.eqns[0]

    def change(eqn):
        if eqn.primitive is not boundary_p:
            return eqn
        aval = eqn.invars[0].aval
        model = constraint(aval.shape, aval.dtype, eqn.params["axis"])
        return eqn if model is None else eqn.replace(primitive=model.primitive, params=model.params)

    lowered = jaxprs.map_equations(jaxprs.open_jaxpr(jaxpr), change)
    core.check_jaxpr(lowered)
    return jaxprs.with_jaxpr(jaxpr, lowered)
