"""Branches between fragments that one group would take by older parameters than another: refused."""

import pytest

import fdg
from tests.placing.versions import Looped, assert_equal, delayed_graph, python, rewritten

START = (("w", 1.0), ("v", 2.0), ("x", 0.5))
GROUPS = {"actor": "actors", "learner": "learners"}


def made(p, role, name, w, x):
    return p.fragment(role, name, lambda w, x: (0.5 * w + x,), w, x)[0]


def decided_between(within, reader):
    """A fragment in a branch that the actor's weight decides; who reads what comes out?"""

    def program(p, s):
        deep = lambda w, x: (made(p, within, "deep", w, x),)  # noqa: E731
        (y,) = p.choose(s["w"], deep, lambda w, x: (x,), s["w"], s["x"])
        x = made(p, "actor", "act", s["w"], y if reader == "actor" else s["x"])
        return {"w": made(p, "learner", "learn", s["w"], y), "v": s["v"], "x": x}, {}

    return program


@pytest.mark.parametrize(
    ("within", "reader", "named"), [("actor", "learner", "'deep'"), ("learner", "actor", "'act'")]
)
def test_a_branch_that_would_go_two_ways(within, reader, named):
    """Because the actor is in it, or reads what came of it."""
    with pytest.raises(fdg.PlanError) as error:
        delayed_graph(decided_between(within, reader), START, GROUPS, 1, Looped())
    said = ("staleness=1", "branch (cond)", "state['w']", f"{named} (actors)", "decide it in a fragment")
    assert all(word in str(error.value) for word in said) and "\n" not in str(error.value), str(error.value)


def test_a_branch_is_fine_where_only_the_newest_is_read():
    program, arguments = decided_between("learner", "learner"), (START, GROUPS, 1, 4)
    assert_equal(python(program, *arguments), rewritten(program, *arguments, Looped()))
