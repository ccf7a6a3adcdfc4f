"""Lanes: groups whose programs call the host work at the same time, and end together."""

import dataclasses
import signal
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import fdg
import policies
from fdg.lowering.mesh import group_mesh
from fdg.running import lanes
from tests.running.lanes import KINDS, switching, try_one
from tests.running.sleeps import digests


@pytest.fixture(autouse=True)
def _ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_a_random_schedule_ends_as_it_should(seed):
    """More of them: `python -m tests.running.lanes`."""
    with switching(1e-6 if seed % 2 else None):
        try_one(seed, KINDS[seed])


def test_time_does_not_matter(devices):
    """More runs, and two processes: `python -m tests.running.sleeps`."""
    found = digests(1, 0.01, devices[:4], iterations=2, lags=(1,))
    assert len({*found["1"]}) == 1 and len(found["1"]) == 2


@dataclasses.dataclass(frozen=True)
class Calls:
    """Acting and learning that call functions on the host."""

    act: object
    learn: object = None
    call: object = jax.pure_callback
    trips: int = 0

    def init(self, key):
        return {"weight": jnp.ones(4), "walks": jnp.zeros((2, 4))}

    def iterate(self, state):
        def called(function, x):
            return x if function is None else self.call(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, walks):
            return called(self.act, jnp.sin(walks + weight[None]))

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, walks):
            return called(self.learn, weight + jnp.mean(walks))

        weight, walks = state["weight"], state["walks"]
        if not self.trips:
            walks = act(weight, walks)
            return {"weight": learn(weight, walks), "walks": walks}, {"mean": jnp.mean(walks)}

        def micro(carry, _):
            walks, total = carry
            walks = act(weight, walks)
            return (walks, total + learn(weight, walks)), None

        (walks, total), _ = jax.lax.scan(micro, (walks, jnp.zeros(4)), None, length=self.trips)
        return {"weight": jnp.tanh(total), "walks": walks}, {"mean": jnp.mean(walks)}


def as_given(x):
    return np.asarray(x)


def test_two_groups_are_on_the_host_at_the_same_time(devices):
    """With parameters of one iteration ago: acting of the next iteration meets learning of this one."""
    iterations, meeting, acted, learned = 5, threading.Barrier(2), [], []

    def act(x):
        if acted:  # the first meets no learning
            meeting.wait(30)
        acted.append(threading.current_thread().name)
        return np.asarray(x)

    def learn(x):
        if len(learned) < iterations - 1:  # nor the last any acting
            meeting.wait(30)
        learned.append(threading.current_thread().name)
        return np.asarray(x)

    engine = fdg.compile(Calls(act, learn), policies.SingleLearnerCoarse(staleness=1), devices[:2])
    _, metrics = engine.run(engine.init(0), iterations)
    assert len(acted) == len(learned) == iterations
    plain = fdg.compile(
        Calls(as_given, as_given), policies.SingleLearnerCoarse(actors=1, staleness=1), devices[:1]
    )
    np.testing.assert_array_equal(metrics["mean"], plain.run(plain.init(0), iterations)[1]["mean"])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]


COARSE = policies.SingleLearnerCoarse


@pytest.mark.parametrize(
    ("algorithm", "policy", "wanted"),
    [
        (Calls(as_given, as_given), COARSE(staleness=1), True),
        # Micro-batches: the next is acted while this one is learned.
        (Calls(None, as_given, trips=3), COARSE(), True),
        (Calls(as_given, None, trips=3), COARSE(), False),  # which begins by itself once it is acted
        # Everything waits for the host anyway.
        (Calls(as_given, as_given), COARSE(), False),
        (Calls(as_given), COARSE(staleness=1), False),
        (Calls(None), COARSE(staleness=1), False),
        # Effects of two groups are in order.
        (Calls(as_given, as_given, io_callback), COARSE(staleness=1), False),
    ],
)
def test_lanes_are_where_one_thread_keeps_a_group_waiting(algorithm, policy, wanted, devices):
    plan = fdg.place(algorithm, policy, 2)
    meshes = {group.name: group_mesh(group, devices) for group in plan.groups}
    assert (lanes.lanes_of(plan.schedule, meshes) is not None) == wanted


def test_what_is_promised_keeps_nothing_else():
    """An array goes when its last reader has it, be others of the same program there for long."""

    class Array:
        pass

    made = [Array(), Array()]
    gone = weakref.ref(made[0])
    with lanes.Lanes(["actors"]) as here:
        first, second = here.defer("actors", lambda arrays: [made.pop(0), made.pop(0)], 2)([])
        assert first.array() is gone()
        del first
        second.array()
        (third,) = here.defer("actors", lambda arrays: [None], 1)([])
        third.array()  # the lane has let go of what it did before
        assert gone() is None and second.array() is not None


@pytest.mark.parametrize("given", ["soon", "0", "-3", "nan"])
def test_a_time_limit_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv(lanes.LIMIT, given)
    with pytest.raises(fdg.FdgError, match=f"FDG_HOST_TIMEOUT='{given}': give seconds above 0"):
        lanes.host_limit()
