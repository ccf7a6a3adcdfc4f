"""Devices, leaves and arrays that are shared: by groups, by groups, and by leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.placing.plans import SteppedPlan
from fdg.placing.policy import Group
from tests.conformance.comparison import assert_same, plain
from tests.placing.schedules import assert_valid
from tests.user_algorithm import Walker


@dataclasses.dataclass(frozen=True)
class Overlapping:
    """Device 1 is in both groups."""

    def place(self, devices):
        return {
            "environment": Group("actors", (0, 1)),
            "actor": Group("actors", (0, 1)),
            "learner": Group("learners", (1, 2)),
        }


def test_groups_may_share_devices(devices):
    """The shared device runs the programs of both groups in turn; moves between groups copy there, too."""
    plan = fdg.place(Walker(), Overlapping(), 3)
    assert_valid(plan.schedule)
    assert [group.devices for group in plan.groups] == [(0, 1), (1, 2)] and not plan.idle
    assert [(p.group, p.fragments[0]) for p in plan.programs] == [("actors", "act"), ("learners", "learn")]
    engine = fdg.compile(Walker(), Overlapping(), devices[:3])
    start = jax.jit(Walker().init)(jax.random.key(0))
    state, metrics = engine.run(engine.init(0), 2)
    state, more = engine.run(state, 1)
    metrics = jax.tree.map(lambda *rows: jnp.concatenate(rows), metrics, more)
    assert_same(plain(Walker(), start, 3), (state, metrics))


class SharedLeaves:
    """A leaf that both groups read, one array as two leaves, two swapped leaves, and an unused leaf."""

    def init(self, key):
        x = jnp.linspace(0.0, 1.0, 4)
        return {"both": x + 0, "one": x + 1, "two": x + 2, "swap": x + 3, "pawn": x + 4, "unused": x + 5}

    def iterate(self, state):
        act = fdg.fragment("actor", name="act")(lambda x, y: jnp.sin(x + y))
        learn = fdg.fragment("learner", name="learn")(lambda x, y: jnp.cos(x - y))
        acted = act(state["both"], state["one"])
        learned = learn(acted, state["both"] + state["two"])
        return {
            "both": learned,
            "one": acted,
            "two": acted,  # one array as two leaves, on two groups
            "swap": state["pawn"],
            "pawn": state["swap"],
            "unused": state["unused"],
        }, {"acted": jnp.sum(acted), "unused": state["unused"][0], "both": learned[0]}


@pytest.mark.parametrize("policy", [policies.SingleLearnerCoarse(1, 1), Overlapping(), policies.GPUOnly()])
def test_shared_leaves_and_arrays(devices, policy):
    plan = fdg.place(SharedLeaves(), policy, 3)
    if isinstance(plan, SteppedPlan):
        assert_valid(plan.schedule)
        ends = {b: a for a, b in plan.schedule.carry}
        kept = [ends.get(value, value) for places in plan.schedule.leaves for value in places]
        assert len(set(kept)) == len(kept), "an array that is shared by two leaves would be freed twice"
        assert len(plan.schedule.leaves[0]) == 2  # "both"
    engine = fdg.compile(SharedLeaves(), policy, devices[:3])
    state, metrics = engine.run(engine.init(0), 2)
    state, more = engine.run(state, 3)
    expected = SharedLeaves().init(None)
    for i in range(5):
        expected, row = SharedLeaves().iterate(expected)
        seen = {name: (metrics if i < 2 else more)[name][i - 2 * (i >= 2)] for name in metrics}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), seen, row)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), dict(state), expected)


class Unmarked:
    """An algorithm without fragments."""

    def init(self, key):
        return {"x": jnp.zeros(4), "n": jnp.int32(0)}

    def iterate(self, state):
        return {"x": jnp.sin(state["x"] + 1), "n": state["n"] + 1}, {"n": state["n"]}


@pytest.mark.parametrize(
    ("policy", "group"),
    [
        (policies.GPUOnly(), "all"),
        (policies.SingleLearnerCoarse(actors=1), "actors"),
        (policies.SingleLearnerCoarse(actors=1, staleness=1), "actors"),
        (policies.Central(workers=1), "workers"),
    ],
)
def test_algorithm_without_fragments_is_one_program(devices, policy, group):
    plan = fdg.place(Unmarked(), policy, 2)
    (program,) = plan.programs
    assert (program.group, program.fragments, type(plan)) == (group, ("iterate",), fdg.Plan)
    assert "nothing moves between devices" in str(plan) and plan.to_mermaid() and plan._repr_svg_()
    if group == "actors":
        engine = fdg.compile(Unmarked(), policy, devices[:2])
        state, metrics = engine.run(engine.init(0), 3)
        assert metrics["n"].tolist() == [0, 1, 2]
        x = np.zeros(4)
        for _ in range(3):
            x = np.sin(x + 1)
        np.testing.assert_allclose(engine.algorithm_state(state)["x"], x, rtol=1e-5)
