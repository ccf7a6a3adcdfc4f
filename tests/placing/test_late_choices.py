"""Branches between fragments that one group would take by older parameters than another: refused."""

import pytest

import fdg
from tests.placing.versions import CENTRAL, COARSE, Looped, delayed_graph

START = (("w", 1.0), ("v", 2.0), ("x", 0.5))


def fragment(p, role, name, w, x):
    return p.fragment(role, name, lambda w, x: (0.5 * w + x,), w, x)[0]


def what_follows_is_late(p, s):
    """The learner works in the branch, and the actor, which has the old `w`, reads what came of it."""
    branches = (lambda w, x: (fragment(p, "learner", "deep", w, x),), lambda w, x: (x,))
    (y,) = p.choose(s["w"], *branches, s["w"], s["x"])
    return {
        "w": fragment(p, "learner", "learn", s["w"], fragment(p, "actor", "act", s["v"], y)),
        "v": s["v"],
        "x": y,
    }, {}


def test_a_branch_whose_results_the_late_group_reads():
    with pytest.raises(fdg.PlanError, match=r"a branch \(cond\) .* depends on state\['w'\], of which 'act'"):
        delayed_graph(what_follows_is_late, START, COARSE, 1, Looped())


def test_it_is_fine_where_both_have_one_version():
    delayed_graph(what_follows_is_late, START, CENTRAL, 1, Looped())
