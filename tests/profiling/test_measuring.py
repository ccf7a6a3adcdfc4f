"""Measurements of a profile: iterations of known duration, and hand-computed numbers."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.profiling import measuring
from fdg.profiling.fragments import place_fragments
from fdg.profiling.measuring import Iterations, make_profile
from tests.tiny import Pupil


class FakeEngine:
    """An engine whose iteration takes 4 s, with actors busy for 3 s and learners for 1 s."""

    def __init__(self):
        self.seconds, self.counts = 0.0, []

    def perf_counter(self):
        return self.seconds

    def run(self, state, iterations):
        self.seconds += 4.0 * iterations
        self.counts.append(iterations)
        state += iterations  # in place, like a donated state
        return state, {"loss": jnp.zeros(iterations)}

    def busy_seconds(self):
        return {"actors": 3.0 * sum(self.counts), "learners": 1.0 * sum(self.counts)}


@pytest.mark.parametrize(("least", "count"), [(0.1, 1), (4.0, 1), (4.1, 2), (20.0, 5)])
def test_times_per_iteration(least, count, monkeypatch):
    engine, state = FakeEngine(), np.zeros(())
    monkeypatch.setattr(measuring, "time", engine)
    found = Iterations(engine, state, least)
    for _ in range(2):
        found.measure()
    assert engine.counts == [1, 1, count, count] and state == 0
    assert found.samples == [4.0, 4.0] and found.busy_samples == [{"actors": 3.0, "learners": 1.0}] * 2
    assert (
        found.busy_seconds("actors") == 3.0
        and found.busy_seconds("learners") == 1.0
        and found.busy_seconds("all") is None
    )


def test_make_profile():
    """Two groups; this process has a device of the first group only."""
    plan = fdg.place(fdg.trace(Pupil()), policies.SingleLearnerCoarse(), 2)
    fragments = place_fragments(plan)
    calls = {one.site.fragment.name: one.site.fragment.calls_per_iteration for one in fragments}
    acting, learning = plan.groups
    runs = SimpleNamespace(samples=[5.0, 3.0, 4.0], busy_seconds={acting.name: 2.0, learning.name: 1.0}.get)
    alone = {name: SimpleNamespace(seconds=0.25) for name in ("act", "step")}
    products = {product: (0.5, "x @ w") for one in fragments for product in one.work.products}
    known = SimpleNamespace(
        products=products, memory_rate=7.0, seconds=lambda products: 0.125, memory_seconds=lambda size: 0.0625
    )
    found = make_profile(plan, fragments, runs, alone, {acting.name: known, learning.name: None})
    assert (found.iteration_s, found.usual_s, found.rounds, found.num_devices) == (3.0, 4.0, 3, 2)
    assert found.memory_rate == 7.0
    assert [(g.name, g.busy_s) for g in found.groups] == [(acting.name, 2.0), (learning.name, 1.0)]
    assert [g.fragments_s for g in found.groups] == [0.25 * (calls["act"] + calls["step"]), 0.0]
    act, learn = found.fragment("act"), found.fragment("learn")
    assert (act.seconds, act.products_s, act.memory_s, act.limit_s) == (0.25, 0.125, 0.0625, 0.125)
    assert (learn.seconds, learn.products_s, learn.memory_s) == (None, 0.0, 0.0)
    assert all((p.seconds == 0.5) == (p.group == acting.name) for p in found.products)
    assert any("not timed alone" in note and "learn" in note for note in found.notes)


def test_process_without_devices():
    plan = fdg.place(fdg.trace(Pupil()), policies.GPUOnly(), 1)
    runs = SimpleNamespace(samples=[1.0], busy_seconds=lambda group: None)
    found = make_profile(plan, place_fragments(plan), runs, {}, {"all": None, plan.groups[0].name: None})
    assert found.memory_rate == 0.0 and {p.seconds for p in found.products} == {None}
    assert "memory: 0 B/s" in str(found)
