"""Metrics that are no real numbers are refused when an algorithm is traced."""

import jax
import jax.numpy as jnp
import pytest

import fdg


class Tiny:
    def __init__(self, metric, name="odd"):
        self.metric, self.name = metric, name

    def init(self, key):
        return jnp.zeros(2)

    def iterate(self, state):
        return state + 1, {self.name: self.metric()}


@pytest.mark.parametrize(
    "metric",
    [lambda: jax.random.key(0), lambda: jnp.zeros((), jnp.complex64), lambda: 1j, lambda: 2**70],
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


@pytest.mark.parametrize("name", ["iteration", "env_steps", "wall_s", "eval_return"])
def test_a_metric_with_the_name_of_a_column_is_refused(name):
    with pytest.raises(fdg.errors.GraphError, match=f"metric '{name}', a column that metrics.jsonl has"):
        fdg.trace(Tiny(lambda: 1.0, name))


def test_arguments_that_are_taken_by_name_alone_are_named():
    class ByName(Tiny):
        def init(self, *, key):
            return jnp.zeros(2)

    with pytest.raises(
        fdg.FdgError, match=r"init takes \(\*, key\).*\(key\): .* by position, so remove the \*"
    ):
        fdg.trace(ByName(lambda: 1.0))
