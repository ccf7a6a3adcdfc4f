"""Each pass by itself, on one small iteration: what it makes of the one before, as it prints."""

import dataclasses

import jax.numpy as jnp
import pytest

import fdg
from fdg.placing.regions.opening import open_iteration
from fdg.placing.scheduling.drafts import in_order
from fdg.placing.scheduling.merging import merge
from fdg.placing.scheduling.partition import passes

GROUPS = {"count": "actors", "judge": "actors", "learn": "learners"}


class Small:
    """`judge` waits for `learn`; `count` waits for nobody, and only `judge` for `count`."""

    def init(self, key):
        return {"w": jnp.float32(0.5), "x": jnp.arange(4.0)}

    def iterate(self, state):
        count = fdg.fragment("actor", name="count")(lambda x: x + 1)
        learn = fdg.fragment("learner", (None, 0), None, name="learn")(lambda w, a: w + jnp.mean(a))
        judge = fdg.fragment("actor", (0, None), name="judge")(lambda x, w: x * w)
        w = learn(state["w"], jnp.exp(state["x"]))
        return {"w": w, "x": judge(count(state["x"]), w)}, {}


@pytest.fixture(scope="module")
def small():
    graph = fdg.trace(Small())
    opened = open_iteration(graph.jaxpr, GROUPS, "a policy")
    return passes(opened, graph.state_axes, {"actors": 2, "learners": 1})


def test_opened(small):
    assert str(small.opened) == OPENED


OPENED = """\
region a, b:
  c = exp(b)
  d = learn(a, c)  # learners
  e = count(b)  # actors
  f = judge(e, d)  # actors
  return d, f"""


def test_placed(small):
    """The exponential goes to the learners, who use it."""
    assert str(small.placed) == PLACED


PLACED = """\
region a, b:
  c = exp(b)  # learners
  d = learn(a, c)  # learners
  e = count(b)  # actors
  f = judge(e, d)  # actors
  return d, f"""


def test_levelled(small):
    assert str(small.levelled) == LEVELLED


LEVELLED = """\
level 0  learners: exp learn
level 0  actors: count
level 1  actors: judge
level 0  learners -> actors: a
level 1  actors -> learners: b, for the next trip"""


def test_merged(small):
    """`count` waits for `judge`."""
    assert str(small.merged) == MERGED
    assert str(merge(small.merged, ["actors", "learners"])) == MERGED  # nothing is left to merge


MERGED = """\
level 0  learners: exp learn
level 1  actors: count judge
level 0  learners -> actors: a
level 1  actors -> learners: b, for the next trip"""


def test_ordered(small):
    assert str(small.ordered) == ORDERED
    assert str(in_order(small.ordered, ["actors", "learners"])) == ORDERED


ORDERED = """\
level 0  learners: exp learn
level 0  learners -> actors: a
level 1  actors: count judge
level 1  actors -> learners: b, for the next trip"""


def test_scheduled(small):
    assert str(small.schedule) == SCHEDULE


SCHEDULE = """\
learners: learn(a, [b]) -> c
learners -> actors: c
actors: count+judge([a], c) -> d
actors -> learners: d, for the next iteration
carry c to b on learners, d to a on actors, d to a on learners"""


def test_passes_change_nothing_that_they_are_given(small):
    before = [str(getattr(small, field.name)) for field in dataclasses.fields(small)]
    merge(small.levelled.draft, ["actors", "learners"])
    in_order(small.merged, ["actors", "learners"])
    assert before == [str(getattr(small, field.name)) for field in dataclasses.fields(small)]
