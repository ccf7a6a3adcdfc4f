"""Rewrites of programs before compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdg import jaxprs
from fdg.cores import min_cores_per_process, processes_sharing_cores, set_core_sharing, usable_cores
from fdg.lowering.rewriting import Setting, rewrite_all
from fdg.lowering.tiles import tiles_of, uses_all_cores


def names_of(jaxpr):
    """Names of all operations, nested ones included."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {eqn.primitive.name}.union(*(names_of(body.jaxpr) for body in jaxprs.bodies(eqn)))
    return found


def halved(x, unread):
    """A loop with an operand that only dead code reads."""

    def trip(carry):
        _ = jnp.cos(unread).sum()
        return carry / 2

    return jax.lax.while_loop(lambda carry: carry.sum() > 1, trip, x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda x: jax.lax.map(f, x[None])[0]])
def test_unused_loop_operands_are_not_computed(wrap):
    x = jnp.arange(4.0)
    jaxpr = jax.make_jaxpr(wrap(lambda x: halved(x, jnp.sin(x))))(x)
    assert {"sin", "cos"} <= names_of(jaxprs.open_jaxpr(jaxpr))
    live = jaxprs.without_dead_code(jaxpr)
    assert not {"sin", "cos"} & names_of(jaxprs.open_jaxpr(live))
    (found,) = jax.extend.core.jaxpr_as_fun(live)(x)
    np.testing.assert_array_equal(found, x / 8)


def test_loop_without_dead_code_is_unchanged():
    def doubled(x, by):
        return jax.lax.while_loop(lambda carry: carry.sum() < 100, lambda carry: carry * by, x)

    jaxpr = jax.make_jaxpr(doubled)(jnp.ones(4), jnp.float32(2))
    live = jaxprs.open_jaxpr(jaxprs.without_dead_code(jaxpr))
    assert live.eqns[-1] is jaxprs.open_jaxpr(jaxpr).eqns[-1]


def test_processes_that_share_cores(devices):
    """Two processes with one device each, on two cores: a mesh of both devices uses all cores."""
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("batch",))
    one = jax.sharding.Mesh(np.array(devices[:1]), ("batch",))
    assert processes_sharing_cores() == 1 and min_cores_per_process() == usable_cores()
    try:
        set_core_sharing(2, cores=4)
        assert not uses_all_cores(mesh)  # four cores and two devices
        set_core_sharing(2, cores=2)  # the other process has fewer cores; both compile for that number
        assert uses_all_cores(mesh) and not uses_all_cores(one)
    finally:
        set_core_sharing(1)


def test_gpu_programs_are_not_tiled():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((256, 256)), jnp.ones((4096, 256)))
    counts = {
        on_cpu: sum(
            tiles_of(eqn) is not None
            for eqn in jaxprs.open_jaxpr(
                rewrite_all(jaxpr, Setting((None, 0), 2, None, on_cpu=on_cpu, uses_all_cores=on_cpu))
            ).eqns
        )
        for on_cpu in (False, True)
    }
    assert counts[False] == 0 < counts[True]
