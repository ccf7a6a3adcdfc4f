"""Plans of one graph share intermediate results, since the choice of a policy makes hundreds of plans."""

import jax
import jax.numpy as jnp
import pytest

import fdg
import policies
from fdg import jaxprs
from fdg.batch.follow import follow
from fdg.batch.lengths import lengths_of, smallest_equivalent
from fdg.fragment import FragmentMark
from fdg.placing.place import place
from tests.tiny import Pupil


@pytest.fixture(scope="module")
def graph():
    return fdg.trace(Pupil(96))


def jaxprs_of(plan):
    return [call.jaxpr for call, _ in plan.schedule.calls()]


def test_equivalent_sizes_have_the_same_programs(graph):
    """Of all lengths in the graph, 8 and 16 learners divide only the 96 environments."""
    few, many = (place(graph, policies.SingleLearnerCoarse(actors=8, learners=n), 24) for n in (8, 16))
    assert all(a is b for a, b in zip(jaxprs_of(few), jaxprs_of(many), strict=True))
    assert [len(group) for group in few.groups] != [len(group) for group in many.groups]


def test_staleness_does_not_copy_the_body_of_the_learner(graph):
    """Learners read the newest values, so the body of `learn` is that of the synchronous plan."""

    def body(staleness):
        plan = place(graph, policies.SingleLearnerCoarse(staleness=staleness), 2)
        (call,) = [call for call, _ in plan.schedule.calls() if "learn" in call.fragments]
        (eqn,) = [eqn for eqn in call.equations if FragmentMark.of(eqn) is not None]
        return jaxprs.bodies(eqn)[0].jaxpr

    assert body(1) is body(0) and body(2) is body(0)


@pytest.mark.parametrize("rows", [12, 16])
def test_equivalent_numbers_of_devices_share_their_analysis(rows):
    """x [rows, 4] @ [4, 3]: 8 and 16 devices divide 16 rows and not 12; 4 devices divide both."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x) @ jnp.ones((4, 3)))(jnp.ones((rows, 4)))
    lengths = lengths_of(jaxprs.open_jaxpr(jaxpr))
    assert lengths == {rows, 4, 3}
    assert smallest_equivalent(8, lengths) == smallest_equivalent(16, lengths) == 8
    assert follow(jaxpr, [0], 8) is follow(jaxpr, [0], 16)
    assert [follow(jaxpr, [0], n).outputs for n in (4, 16)] == [(0,), (0,) if rows == 16 else (None,)]
