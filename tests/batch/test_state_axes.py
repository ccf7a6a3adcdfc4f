"""The batch axes of the state's leaves, worked out by hand."""

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
        (lambda x: first(x) + second(x), 0),  # the first reader decides
        (lambda x: second(x) + first(x), 1),
        (lambda x: shared(x) + second(x), 1),  # the first reader with an axis
        (lambda x: jax.jit(second)(x), 1),
        (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, second, x), 1),
        (lambda x: jax.lax.scan(lambda c, _: (second(c), None), x, None, 2)[0], 1),
        (lambda x: jax.lax.scan(lambda c, row: (c, first(row)), 0.0, x)[1], 1),  # a row's axis 0
        (lambda x: jax.lax.scan(lambda c, _: (c, first(x)), 0.0, None, 4)[1].sum(0), 0),  # not sliced
    ],
)
def test_first_fragment_that_reads_a_leaf_decides(iterate, axis):
    assert axes(iterate, SQUARE) == (axis,)


def test_unread_leaf_has_the_axis_of_its_next_value():
    assert axes(lambda x, y: (x, first(x)), (4,), (4,)) == (0, 0)
    assert axes(lambda x, y: (x, jnp.sum(first(x), keepdims=True)), (4,), (1,)) == (0, None)


def test_unread_leaves_may_get_each_others_values():
    """A queue: each leaf gets the value of the one before it, so the last was read three iterations ago."""
    assert axes(lambda x, a, b, c: (first(x), x, a, b), (4,), (4,), (4,), (4,)) == (0, 0, 0, 0)
    assert axes(lambda x, c, b, a: (second(x), b, a, x), *[SQUARE] * 4) == (1, 1, 1, 1)
    assert axes(lambda x, a, b: (first(x), b, a), (4,), (4,), (4,)) == (0, None, None)  # only swapped
