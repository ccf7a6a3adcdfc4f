"""Metrics that are no real numbers are refused when an algorithm is traced."""

import jax
import jax.numpy as jnp
import pytest

import fdg


class Tiny:
    def __init__(self, metric):
        self.metric = metric

    def init(self, key):
        return jnp.zeros(2)

    def iterate(self, state):
        return state + 1, {"odd": self.metric()}


@pytest.mark.parametrize(
    "metric", [lambda: jax.random.key(0), lambda: jnp.zeros((), jnp.complex64), lambda: 1j]
)
def test_a_metric_that_is_no_real_number_is_refused(metric):
    with pytest.raises(fdg.errors.GraphError, match=r"'odd'.*real numbers"):
        fdg.trace(Tiny(metric))


@pytest.mark.parametrize(
    "metric",
    [lambda: True, lambda: 3, lambda: 0.5, lambda: jnp.zeros((), jnp.bfloat16), lambda: jnp.bool_(True)],
)
def test_a_metric_that_is_a_real_number_is_traced(metric):
    fdg.trace(Tiny(metric))
