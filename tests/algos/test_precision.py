"""`precision="bfloat16"`: what of an algorithm computes in it, and what does not."""

import dataclasses

import jax
import pytest

import fdg
from tests.conformance.test_algorithms import SMALL
from tests.test_bfloat16 import products


def half(name):
    return dataclasses.replace(SMALL[name](), precision="bfloat16")


@pytest.mark.parametrize("name", SMALL)
def test_networks_compute_in_bfloat16_and_all_that_is_kept_stays_float32(name):
    exact = fdg.trace(dataclasses.replace(SMALL[name](), precision="float32"))
    graph = fdg.trace(half(name))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), graph.state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), exact.state
    )
    before, now = products(exact.jaxpr), products(graph.jaxpr)
    assert ("bfloat16", "bfloat16") not in before
    changed = now.count(("bfloat16", "bfloat16"))
    # What is left are sums written as products: mixtures of agents' values, distillation, dot products.
    assert changed >= len(now) / 3, now
    assert len(now) <= len(before) + 2


@pytest.mark.parametrize("name", SMALL)
def test_an_iteration_keeps_all_types_with_64_bits_enabled(name):
    """What an algorithm begins with is of the types that its networks and environments give."""
    with jax.enable_x64(True):
        algorithm = SMALL[name]()
        state = jax.eval_shape(algorithm.init, jax.eval_shape(lambda: jax.random.key(0)))
        after, _ = jax.eval_shape(algorithm.iterate, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), after
    )


def test_equal_algorithms_are_equal_in_bfloat16_too():
    """So that what was compiled for one serves the other."""
    assert half("sac") == half("sac")
    assert half("sac")._actor == half("sac")._actor
    assert hash(half("sac")._critics) == hash(half("sac")._critics)
    assert half("sac")._actor != SMALL["sac"]()._actor
