"""`precision="bfloat16"`: networks multiply matrices in it; the state keeps its dtypes."""

import jax
import pytest

import fdg
from tests.conformance.test_algorithms import SMALL
from tests.test_bfloat16 import products


def in_bfloat16(name):
    return SMALL[name]().changed(precision="bfloat16")


@pytest.mark.parametrize("name", SMALL)
def test_networks_use_bfloat16_and_state_stays_float32(name):
    exact, algorithm = fdg.trace(SMALL[name]().changed(precision="float32")), in_bfloat16(name)
    graph = fdg.trace(algorithm)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), graph.state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), exact.state
    )
    before, now = products(exact.jaxpr), products(graph.jaxpr)
    assert ("bfloat16", "bfloat16") not in before
    changed = now.count(("bfloat16", "bfloat16"))
    # In float32 are networks that measure novelty, means over atoms, and mixtures of agents' values.
    others = algorithm.rnd or getattr(algorithm, "atoms", None) or hasattr(algorithm, "mixer_size")
    assert changed >= len(now) / 3 if others else 0 < changed == len(now), now
    assert len(now) <= len(before) + 2


@pytest.mark.parametrize("name", SMALL)
def test_dtypes_with_x64(name):
    """`iterate` returns a state with the same shapes and dtypes as `init`."""
    with jax.enable_x64(True):
        algorithm = SMALL[name]()
        state = jax.eval_shape(algorithm.init, jax.eval_shape(lambda: jax.random.key(0)))
        after, _ = jax.eval_shape(algorithm.iterate, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), after
    )


def test_equality_in_bfloat16():
    """Equal algorithms share compiled programs."""
    assert in_bfloat16("sac") == in_bfloat16("sac")
    assert in_bfloat16("sac")._actor == in_bfloat16("sac")._actor
    assert hash(in_bfloat16("sac")._critics) == hash(in_bfloat16("sac")._critics)
    assert in_bfloat16("sac")._actor != SMALL["sac"]()._actor
