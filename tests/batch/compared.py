"""Compares compiled programs on a split batch with predicted exchanges and the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fdg import jaxprs
from fdg.batch.collective import unexplained
from fdg.batch.exchanges import predict_exchanges
from fdg.batch.follow import follow
from fdg.lowering.constraints import constrain
from fdg.lowering.mesh import batch_sharding, make_mesh
from fdg.running import hlo


def totals(rows):
    """{(kind, calls): bytes} of predicted or of measured exchanges."""
    found = {}
    for row in rows:
        found[row.kind, row.calls] = found.get((row.kind, row.calls), 0) + row.bytes
    return found


def compiled(function, axes, devices, *arguments):
    """The jaxpr, its compiled program on devices, and the placed arguments."""
    mesh = make_mesh(devices)
    jaxpr = jaxprs.lowered(jax.make_jaxpr(function)(*arguments))
    axes = [*axes, *[None] * (len(arguments) - len(axes))]
    into = [batch_sharding(mesh, axis) for axis in axes]
    ends = follow(jaxpr, axes).outputs
    out = [batch_sharding(mesh, axis) for axis in ends]
    run = core.jaxpr_as_fun(constrain(jaxpr, mesh, axes, ends))
    placed = [jax.device_put(x, split) for x, split in zip(arguments, into, strict=True)]
    return jaxpr, jax.jit(run, in_shardings=into, out_shardings=out).lower(*placed).compile(), placed


def assert_as_predicted(function, axes, devices, *arguments):
    """Checks that the program exchanges the predicted bytes, and computes the numbers of one device."""
    jaxpr, program, placed = compiled(function, axes, devices, *arguments)
    predicted, _ = predict_exchanges(jaxpr, axes, len(devices), follow(jaxpr, axes).outputs)
    measured = hlo.read_collectives(program.as_text())
    assert totals(measured) == totals(predicted), f"{totals(measured)} and not {totals(predicted)}"
    assert not unexplained(measured, predicted)
    for result, want in zip(program(*placed), jax.tree.leaves(jax.jit(function)(*arguments)), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            result, want = jax.random.key_data(result), jax.random.key_data(want)
        np.testing.assert_allclose(np.asarray(result), np.asarray(want), rtol=2e-5, atol=2e-5)
    return measured


def numbers(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)
