"""The cost of tracing is linear in the number of state leaves."""

import cProfile

import jax
import jax.numpy as jnp
import pytest

import fdg


@fdg.fragment("actor", in_axes=(None, 0))
def act(weights, x):
    return jnp.sin(x + sum(weights))


@fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
def learn(weights, x):
    return [w + jnp.mean(x) for w in weights]


def rotated(weights, x):
    """A loop that rotates the weights."""

    def trip(carry, _):
        weights, x = carry
        x = act(weights, x)
        return (weights[1:] + weights[:1], x), None

    (weights, x), _ = jax.lax.scan(trip, (weights, x), length=2)
    return learn(weights, x), x


def clipped(weights, x):
    """Between two fragments, each array is divided by a norm over all."""
    x = act(weights, x)
    new = learn(weights, x)
    norm = 1 + sum(w * w for w in new)
    return learn([w / norm for w in new], x), x


def shifted(rows, x):
    """A history: each row moves to the next place."""
    return [x, *rows[:-1]], act([jnp.float32(0)], x)


@pytest.mark.parametrize(("iterate", "shape"), [(rotated, ()), (clipped, ()), (shifted, (8,))])
def test_tracing_cost_is_linear_in_leaves(iterate, shape):
    class ManyLeaves:
        def __init__(self, count):
            self.count = count

        def init(self, key):
            return [jnp.zeros(shape, jnp.float32)] * self.count, jnp.zeros(8)

        def iterate(self, state):
            return iterate(*state), {}

    def calls(count):
        with cProfile.Profile() as profile:
            graph = fdg.trace(ManyLeaves(count))
        assert len(graph.state_axes) == count + 1
        if shape:
            assert set(graph.state_axes) == {0}
        return sum(entry.callcount for entry in profile.getstats())

    calls(4)
    assert calls(160) < 5 * calls(40)
