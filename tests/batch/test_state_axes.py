"""Which axis of a leaf is the batch's, worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

import fdg
from fdg.batch.state_axes import state_axes

first = fdg.fragment("actor", name="first")(lambda x: x + 1)
second = fdg.fragment("actor", in_axes=1, out_axes=1, name="second")(lambda x: x + 1)
shared = fdg.fragment("learner", in_axes=None, out_axes=None, name="shared")(lambda x: x + 1)


def axes(iterate, *shapes):
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return state_axes(jax.make_jaxpr(iterate)(*leaves), len(leaves))


SQUARE = (4, 4)


@pytest.mark.parametrize(
    ("iterate", "axis"),
    [
        (first, 0),
        (second, 1),
        (shared, None),
        (jnp.sin, None),  # no fragment
        (lambda x: first(x) + second(x), 0),  # the first to read it
        (lambda x: second(x) + first(x), 1),
        (lambda x: shared(x) + second(x), 1),  # that says something
        (lambda x: jax.jit(second)(x), 1),
        (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, second, x), 1),
        (lambda x: jax.lax.scan(lambda c, _: (second(c), None), x, None, 2)[0], 1),
        (lambda x: jax.lax.scan(lambda c, row: (c, first(row)), 0.0, x)[1], 1),  # a row's axis 0
        (lambda x: jax.lax.scan(lambda c, _: (c, first(x)), 0.0, None, 4)[1].sum(0), 0),  # not cut
    ],
)
def test_the_first_fragment_that_reads_it_says(iterate, axis):
    assert axes(iterate, SQUARE) == (axis,)


def test_what_no_fragment_reads_has_the_axis_that_it_comes_back_with():
    assert axes(lambda x, y: (x, first(x)), (4,), (4,)) == (0, 0)
    assert axes(lambda x, y: (x, jnp.sum(first(x), keepdims=True)), (4,), (1,)) == (0, None)


def test_which_may_be_that_of_another_such_leaf():
    """A queue: each takes the place of the one before it, so that the last has been read three times ago."""
    assert axes(lambda x, a, b, c: (first(x), x, a, b), (4,), (4,), (4,), (4,)) == (0, 0, 0, 0)
    assert axes(lambda x, c, b, a: (second(x), b, a, x), *[SQUARE] * 4) == (1, 1, 1, 1)
    assert axes(lambda x, a, b: (first(x), b, a), (4,), (4,), (4,)) == (0, None, None)  # only each other's
