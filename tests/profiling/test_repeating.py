"""Repeated calls in one program: every call runs, and the time of one call is measured."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdg.profiling import repeating
from fdg.profiling.repeating import Repeated, compile_all


def test_every_call_runs():
    """XLA does not hoist a call out of the loop, even if it depends only on a constant argument."""
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


def test_state_on_host_advances():
    """With `continues=True` each run starts from the last run's results, as the state on the host does."""
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


def test_keys_and_weak_types_are_carried():
    def function(key, x):
        return [jax.random.split(key)[0], x * 2.0]

    arguments = [jax.random.key(0), jnp.asarray(1.0)]
    moving, _ = Repeated(function, arguments, {0: 0, 1: 1}).lower().compile()(np.int32(3), arguments)
    assert float(moving[1]) == 8 and moving[0].dtype == arguments[0].dtype


def test_time_per_call(monkeypatch):
    """Each call advances a fake clock by 1,000 seconds, so that the machine's load does not matter."""

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


@pytest.mark.parametrize(("together", "copies"), [(1.6, 2), (2.2, 1)])
def test_copies_are_used_if_faster(together, copies, monkeypatch):
    """Two concurrent copies take 0.8 or 1.1 times as long as two sequential ones."""
    one = Repeated(lambda x: [x + 1], [jnp.float32(1)], {0: 0})
    monkeypatch.setattr(one, "_time_run", lambda calls: 0.5 + calls * {1: 1.0, 2: together}[one.num_copies])
    one.choose_copies(2)
    assert one.num_copies == copies
    one.measure()
    assert one.seconds == pytest.approx(min(1.0, together / 2))


class FakeArray:
    """A fake array that may span processes."""

    def __init__(self, is_fully_addressable):
        self.is_fully_addressable = is_fully_addressable


@pytest.mark.parametrize(
    ("here", "calls"), [((True, True), 16), ((), 16), ((True, False), 4), ((False, False), 4)]
)
def test_number_of_calls_across_processes(here, calls, monkeypatch):
    """With arrays that span processes, all use the first process's number of calls; others do not ask it."""
    made = []

    def seconds(calls):  # each call takes a sixteenth of a round
        made.append(calls)
        return calls * repeating.ROUND_S / 16

    monkeypatch.setattr(repeating.distributed, "exchange", lambda found: [4 * found, found])
    one = Repeated(lambda *xs: [], [FakeArray(each) for each in here])
    monkeypatch.setattr(one, "_time_run", seconds)
    one.set_compiled(None)
    made.clear()
    one.measure()
    assert made == [calls, 0]


def test_minimum_over_rounds():
    """A call takes 3 and a run without calls 1: a slow run without calls does not shorten the call."""
    one = Repeated(lambda x: [x + 1], [jnp.float32(1)])
    one.samples = [(9.0, 1.5), (4.0, 3.5), (5.0, 1.0)]
    assert one.seconds == 3.0
    one.samples = [(2.0, 2.5)]  # below the noise: the time is never negative
    assert one.seconds == 2.0
