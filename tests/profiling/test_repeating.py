"""Repeated calls: each of them happens, and their time is that of a call."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdg.profiling import repeating
from fdg.profiling.repeating import Repeated, Sample, compile_all


def test_every_call_happens_and_hands_on():
    """The second argument does not change; a call whose work depends on it alone is not moved away."""
    calls = []

    def note(x):
        calls.append(float(x))
        return x

    def function(count, same):
        seen = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), same)
        return [count + 1, seen * 2]

    arguments = [jnp.float32(0), jnp.float32(4)]
    run = Repeated(function, arguments, {0: 0}).lower().compile()
    for number in (0, 1, 5):
        calls.clear()
        moving, results = run(np.int32(number), arguments)
        jax.block_until_ready(results)
        assert float(moving[0]) == number and calls == [4.0] * number
        assert [float(x) for x in results] == [8.0 if number else 0.0]


def test_what_is_on_the_host_goes_on():
    """Each run begins where the last one ended: what it stands for on the host has moved on too."""
    begun = []

    def step(x):
        begun.append(float(x))
        return x + 1

    def function(x):
        return [jax.pure_callback(step, jax.ShapeDtypeStruct((), jnp.float32), x)]

    one = Repeated(function, [jnp.float32(0)], {0: 0}, continues=True)
    compile_all([one])
    one.measure()
    assert begun == [float(i) for i in range(len(begun))] and len(begun) > 2


def test_keys_and_weak_types_are_handed_on():
    def function(key, x):
        return [jax.random.split(key)[0], x * 2.0]

    arguments = [jax.random.key(0), jnp.asarray(1.0)]
    moving, _ = Repeated(function, arguments, {0: 0, 1: 1}).lower().compile()(np.int32(3), arguments)
    assert float(moving[1]) == 8 and moving[0].dtype == arguments[0].dtype


def test_the_time_is_that_of_a_call(monkeypatch):
    """By a clock that each call puts forward by 1,000 seconds, however busy the machine is."""

    class Clock:
        calls = 0

        def perf_counter(self):
            return time.perf_counter() + 1000 * self.calls

    clock = Clock()
    monkeypatch.setattr(repeating, "time", clock)

    def function(x):
        def wait(x):
            clock.calls += 1
            return x

        return [jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)]

    one = Repeated(function, [jnp.float32(1)], {0: 0})
    compile_all([one])
    for _ in range(3):
        one.measure()
    assert one.seconds == pytest.approx(1000, rel=0.1)
    one.choose_copies(1)
    assert one.num_copies == 1


@pytest.mark.parametrize(("together", "lanes"), [(1.6, 2), (2.2, 1)])
def test_more_lanes_only_where_they_do_more(together, lanes, monkeypatch):
    """Two copies at once take 0.8 or 1.1 of the time that they take one after another."""
    one = Repeated(lambda x: [x + 1], [jnp.float32(1)], {0: 0})
    monkeypatch.setattr(one, "_time_run", lambda calls: 0.5 + calls * {1: 1.0, 2: together}[one.num_copies])
    one.choose_copies(2)
    assert one.num_copies == lanes
    one.measure()
    assert one.seconds == pytest.approx(min(1.0, together / 2))


class Spread:
    """Stands for an array, of which other processes may have a part."""

    def __init__(self, is_fully_addressable):
        self.is_fully_addressable = is_fully_addressable


@pytest.mark.parametrize(
    ("here", "calls"), [((True, True), 16), ((), 16), ((True, False), 4), ((False, False), 4)]
)
def test_what_spans_processes_is_called_as_often_by_each(here, calls, monkeypatch):
    """As the first process finds right, which is asked only then: who has no part in it never answers."""
    made = []

    def seconds(calls):  # a sixteenth of a round each
        made.append(calls)
        return calls * repeating.ROUND_S / 16

    monkeypatch.setattr(repeating.distributed, "exchange", lambda found: [4 * found, found])
    one = Repeated(lambda *xs: [], [Spread(each) for each in here])
    monkeypatch.setattr(one, "_time_run", seconds)
    one.set_compiled(None)
    made.clear()
    one.measure()
    assert made == [calls, 0]


def test_the_shortest_of_the_rounds_counts(monkeypatch):
    """Calls take 3, the rest of a run 1: a long run of none makes no call shorter."""
    one = Repeated(lambda x: [x + 1], [jnp.float32(1)])
    one.samples = [Sample(9.0, 1.5), Sample(4.0, 3.5), Sample(5.0, 1.0)]
    assert one.seconds == 3.0
    one.samples = [Sample(2.0, 2.5)]  # lost in the noise: no less than nothing
    assert one.seconds == 2.0
