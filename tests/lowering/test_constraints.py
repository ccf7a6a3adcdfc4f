"""What devices exchange is what the batch's flow says, where XLA would choose otherwise."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from fdg.batch.exchanges import predict_collectives
from fdg.lowering.constraints import BATCH, constrain, make_mesh
from fdg.running.hlo import read_collectives


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.mean(
            0.5 * jax.lax.erf(x) + 0.3
        ),  # XLA has no rule to split `erf` by, and gathers its operand
        lambda x: (jnp.mean(jax.lax.erf(x)), jnp.flip(x)),
        lambda x: jnp.max(jnp.tanh(x)),
    ],
    ids=["erf", "beside a gather", "max"],
)
def test_a_sum_is_added_up_and_its_operand_is_not_gathered(function):
    mesh = make_mesh(jax.devices()[:4])
    traced = jax.make_jaxpr(function)(jnp.ones(12))
    outputs = [None] * len(traced.out_avals)
    lowered = core.jaxpr_as_fun(constrain(traced, mesh, [0], outputs))
    shape = jax.ShapeDtypeStruct((12,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(BATCH)))
    read = read_collectives(jax.jit(lowered).lower(shape).compile().as_text())
    predicted = predict_collectives(traced, [0], 4, outputs)
    assert {(c.kind, c.bytes) for c in read} == {(c.kind, c.bytes) for c in predicted}
