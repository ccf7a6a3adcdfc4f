"""Unusual and invalid sources of streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdg import jaxprs
from fdg.stream import Stream, counts
from tests.refusing import refuses
from tests.stream.clock import Source

WIDTH = 4


class Short:
    """`begin` returns a state and a cache that are smaller than those of the slots; both have random keys.

    Response r takes 1 + r % 3 ticks; its row is `[r, r + 10, r + 20, ...]`, padded with -1.
    """

    def idle(self, slots):
        zeros = jnp.zeros(slots, jnp.int8)
        return {"row": jnp.full((slots, WIDTH), -1), "n": zeros, "left": zeros, "key": self.keys(zeros)}

    def keys(self, index):
        return jax.vmap(jax.random.key)(index.astype(jnp.uint32))

    def begin(self, parameters, key, index, now):
        small = index.astype(jnp.int8)
        kept = {"row": index[:, None], "n": small * 0 + 1, "left": 1 + small % 3, "key": self.keys(index)}
        return kept, {"key": kept["key"], "wide": jnp.ones((len(index), 1))}

    def tick(self, parameters, kept, cache, now):
        same = jax.random.key_data(cache["key"]) == jax.random.key_data(kept["key"])
        active = (kept["left"] > 1) & jnp.all(same, axis=1)
        here = (jnp.arange(WIDTH)[None] == kept["n"][:, None]) & active[:, None]
        row = jnp.where(here, kept["row"][:, :1] + 10 * kept["n"][:, None], kept["row"])
        step = active.astype(jnp.int8)
        return {**kept, "row": row, "n": kept["n"] + step, "left": kept["left"] - 1}, cache

    def done(self, kept):
        return kept["left"] <= 0

    def refresh(self, parameters, kept):
        return {"key": kept["key"], "wide": jnp.zeros((len(kept["n"]), 3))}

    def row(self, kept):
        return kept["row"]


@pytest.mark.parametrize(
    "sizes", [{"slots": 4}, {"slots": 4, "prefills": 1}, {"slots": 2, "ahead": 1, "order": "prompt"}]
)
def test_short_states_are_padded_with_idle(sizes):
    stream = Stream(Short(), batch=4, **sizes)
    state, take = stream.init(jax.random.key(0)), jax.jit(stream.take)
    for i in range(3):
        rows, state = take((), i, state)
        expected = [[r + 10 * n if n <= r % 3 else -1 for n in range(WIDTH)] for r in range(4 * i, 4 * i + 4)]
        np.testing.assert_array_equal(rows, expected)
    assert counts(stream, state)["trained"] == 12


class Wrong(Short):
    """A source with one method that returns something invalid."""

    def __init__(self, method, change):
        def changed(*args):
            return change(getattr(Short, method)(self, *args))

        setattr(self, method, changed)


@pytest.mark.parametrize("sizes", [{"slots": 2}, {"slots": 3, "ahead": 1}])
@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        (
            "done",
            lambda done: done.astype(jnp.int32),
            r"int32\[.\]: return what the slots hold, bool\[.\]",
        ),
        ("done", lambda done: done[:, None], r"bool\[., 1\]: return"),
        ("tick", lambda x: ({**x[0], "n": x[0]["n"] + jnp.int32(1)}, x[1]), r".*'n': int32\[.\].*: return"),
        ("tick", lambda x: x[0], r"\{.*\}: return what the slots hold, \(\{"),
        ("begin", lambda x: (x[0], ()), r"\(\{.*\}, \(\)\): return what the slots hold, "),
        (
            "begin",
            lambda x: ({**x[0], "row": x[0]["row"][:, 0]}, x[1]),
            r".*'row': int32\[.\].* may be shorter",
        ),
        ("begin", lambda x: ({**x[0], "row": jnp.ones((len(x[0]["n"]), 9))}, x[1]), r".*'row': float32"),
        (
            "begin",
            lambda x: ({**x[0], "row": x[0]["row"] + 0.5}, x[1]),
            r".*'row': float32\[., 1\].* may be shorter",
        ),
        ("begin", lambda x: ({**x[0], "n": jnp.int8(1)}, x[1]), r".*'n': int8\[\].*: return"),
        (
            "idle",
            lambda x: {**x, "n": jnp.int8(0)},
            r".*'n': int8\[\].*: axis 0 of each array must have the . slots",
        ),
        ("row", lambda x: x.sum(), r"int32\[\]: axis 0"),
    ],
)
def test_invalid_result_of_a_method_is_refused(method, change, message, sizes):
    with refuses(match=rf"^Wrong\.{method} returns {message}"):
        stream = Stream(Wrong(method, change), batch=2, **sizes)
        jax.eval_shape(stream.take, (), 0, stream.init(jax.random.key(0)))


def test_state_of_a_stream_of_other_sizes_is_refused():
    state = Stream(Short(), slots=2, batch=2, ahead=1).init(jax.random.key(0))
    for slots, ahead, message in ((3, 1, "3 and 4"), (2, 2, "2 and 6")):
        with refuses(match=f"^take: the state has 2 slots and 4 live units, and this stream {message}: give"):
            Stream(Short(), slots=slots, batch=2, ahead=ahead).take((), 0, state)


@pytest.mark.parametrize(
    ("slots", "batch", "sizes"),
    [
        (8, 8, {}),  # all at once
        (8, 32, {}),  # four waves
        (8, 32, {"prefills": 2}),
        (16, 16, {"micro_batches": 4, "ahead": 1}),
        (32, 16, {"micro_batches": 2, "ahead": 1, "group": 2}),
        (24, 8, {"ahead": 3, "prefills": 6}),
    ],
)
def test_expected_trips_are_those_of_responses_of_equal_length(slots, batch, sizes):
    """Responses of 12 ticks: the mean trips of the jaxpr's loops are those counted after a warm-up."""
    source = Source([12])
    source.most_ticks = 12
    stream = Stream(source, slots, batch, **sizes)
    take, state, takes = jax.jit(stream.take), stream.init(jax.random.key(0)), 16 * stream.micro_batches
    for i in range(2 * takes):
        if i == takes:
            before = counts(stream, state)["ticks"]
        _, state = take(jnp.float32(0), i, state)
    mean = (counts(stream, state)["ticks"] - before) / takes

    def loops(jaxpr):
        return [jaxprs.bodies(eqn)[1] for eqn in jaxpr.eqns if eqn.primitive.name == "while"]

    (outer,) = loops(jax.make_jaxpr(stream.take)(jnp.float32(0), 0, state))
    inner = [body.trips for body in loops(outer.jaxpr)]
    expected = outer.trips if not inner else outer.trips * inner[-1]
    assert mean == pytest.approx(expected, rel=0.15)
