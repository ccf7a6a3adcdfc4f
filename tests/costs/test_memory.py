"""Predicted peaks, by hand and beside XLA's own."""

import jax
import jax.numpy as jnp
import pytest

import fdg
import policies
from fdg.costs.memory import plan_memory, program_need
from tests.tiny import Pupil

M = 1000 * 1000  # elements


def need(function, *shapes, axes=(), devices=1, donated=frozenset()):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_need(jax.make_jaxpr(function)(*arrays), axes, devices, donated)


def test_joined_operations_need_no_array():
    found = need(lambda x: jnp.tanh(x * 2 + 1).sum(), (M,))
    assert (found.arguments, found.results, found.temporaries) == (4 * M, 4, 0)


def test_what_a_product_reads_is_an_array():
    """x + 1 [1000, 1000] is written, for a product reads it; the product is, for another one does."""
    found = need(lambda x: ((x + 1) @ x) @ x, (1000, 1000))
    assert found.temporaries == 8 * M and found.results == 4 * M


def test_donated_arguments_hold_results():
    assert need(lambda x: x + 1, (M,), donated=frozenset({0})).results == 0


def test_a_batch_is_split():
    found = need(lambda x: ((x + 1) @ jnp.ones((8, 8))).sum(), (M, 8), axes=(0,), devices=4)
    assert found.arguments == 8 * M


def test_loops_write_over_what_they_carry():
    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=8)[0]

    assert need(loop, (1000, 1000)).temporaries <= 8 * M


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plan_has_a_peak_for_each_group(devices):
    plan = fdg.place(Pupil(64), policies.SingleLearnerCoarse(), devices)
    found = plan_memory(plan)
    assert found.keys() == {group.name for group in plan.groups}
    least = dict(plan.memory)
    assert all(found[name] > 0 for name in least)
