"""Timelines of the programs that each group ran."""

import itertools
import json
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import fdg
import policies
from fdg.running.timeline import Bar
from fdg.showing.bars import busy_seconds, timeline_svg, timeline_trace
from tests.refusing import refuses
from tests.running.test_lanes import Calls

BARS = [
    Bar("actors", "act", 0, 0, 10.0, 10.4),
    Bar("actors", "act", 0, 1, 10.4, 10.8),
    Bar("learners", "learn <&>", 0, 0, 10.4, 11.0),
]


def test_bar_width_is_duration():
    root = ElementTree.fromstring(timeline_svg(BARS))
    shown = [box for box in root.iter() if box.tag.endswith("rect") and len(box)]
    widths = [float(box.get("width")) for box in shown]
    assert widths == pytest.approx([440, 440, 660], abs=0.1)  # 1,100 per second
    assert float(shown[2].get("x")) == float(shown[1].get("x"))
    titles = [box[0].text for box in shown]
    assert titles[1:] == ["act, iteration 0, part 1: 0.4 s", "learn <&>, iteration 0, part 0: 0.6 s"]
    rows = [text.text for text in root.iter() if text.tag.endswith("text")]
    assert "actors 80%" in rows and "learners 60%" in rows
    assert busy_seconds(BARS, "actors") == pytest.approx(0.8)


def test_empty_timeline():
    assert timeline_trace([]) == {"traceEvents": []}
    ElementTree.fromstring(timeline_svg([]))


def test_engine_timeline(devices):
    engine = fdg.compile(Calls(None, trips=3), policies.SingleLearnerCoarse(staleness=1), devices[:2])
    state = engine.init(0)
    bars = engine.timeline(state, 5)
    on_host = jax.tree.map(np.asarray, state)
    engine.run(state, 1)  # `timeline` has copied the state: it is not donated
    assert len(engine.timeline(on_host, 1)) > 1
    jax.tree.map(lambda x: x.delete(), state)
    with refuses("this state was donated to an earlier run"):
        engine.timeline(state, 1)
    assert {bar.group for bar in bars} == {"actors", "learners"}
    assert {bar.iteration for bar in bars} == set(range(5))
    acted = [bar for bar in bars if bar.name == "act"]
    assert [bar.part for bar in acted if bar.iteration == 3] == [0, 1, 2]
    assert all(bar.begin <= bar.end for bar in bars)
    for group in ("actors", "learners"):  # programs of a group do not overlap
        row = [bar for bar in bars if bar.group == group]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(row))
    json.dumps(timeline_trace(bars))
    alone = fdg.compile(Calls(None), policies.GPUOnly(), devices[:1])
    assert alone.timeline(alone.init(0)) == []
