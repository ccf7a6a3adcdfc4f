"""Lanes: groups whose programs call the host run at the same time, and end together."""

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
from tests.running.sleeps import Case, digests


@pytest.fixture(autouse=True)
def _ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_random_schedules(seed):
    """More schedules: `python -m tests.running.lanes`."""
    with switching(1e-6 if seed % 2 else None):
        try_one(seed, KINDS[seed])


def test_timing_does_not_change_results(devices):
    """More runs, and two processes: `python -m tests.running.sleeps`."""
    found = digests(1, 0.01, devices[:4], iterations=2, case=Case(only=(1,)))
    assert len({*found["1"]}) == 1 and len(found["1"]) == 2


@dataclasses.dataclass(frozen=True)
class Calls:
    """An actor and a learner that call host functions."""

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


def identity(x):
    return np.asarray(x)


def test_two_groups_call_the_host_at_the_same_time(devices):
    """With a staleness of 1, acting of the next iteration overlaps with learning of this one."""
    iterations, barrier, acted, learned = 5, threading.Barrier(2), [], []

    def act(x):
        if acted:  # the first overlaps with no learning
            barrier.wait(30)
        acted.append(threading.current_thread().name)
        return np.asarray(x)

    def learn(x):
        if len(learned) < iterations - 1:  # the last overlaps with no acting
            barrier.wait(30)
        learned.append(threading.current_thread().name)
        return np.asarray(x)

    engine = fdg.compile(Calls(act, learn), policies.SingleLearnerCoarse(staleness=1), devices[:2])
    _, metrics = engine.run(engine.init(0), iterations)
    assert len(acted) == len(learned) == iterations
    reference = fdg.compile(
        Calls(identity, identity), policies.SingleLearnerCoarse(actors=1, staleness=1), devices[:1]
    )
    np.testing.assert_array_equal(metrics["mean"], reference.run(reference.init(0), iterations)[1]["mean"])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]


COARSE = policies.SingleLearnerCoarse


@pytest.mark.parametrize(
    ("algorithm", "policy", "wanted"),
    [
        (Calls(identity, identity), COARSE(staleness=1), True),
        # The actor runs a micro-batch while the learner runs the previous one.
        (Calls(None, identity, trips=3), COARSE(), True),
        (Calls(identity, None, trips=3), COARSE(), False),  # learning starts without the host
        # All groups wait for the host anyway.
        (Calls(identity, identity), COARSE(), False),
        (Calls(identity), COARSE(staleness=1), False),
        (Calls(None), COARSE(staleness=1), False),
        # Effects of two groups are ordered.
        (Calls(identity, identity, io_callback), COARSE(staleness=1), False),
    ],
)
def test_lanes_are_used_if_one_thread_delays_a_group(algorithm, policy, wanted, devices):
    plan = fdg.place(algorithm, policy, 2)
    meshes = {group.name: group_mesh(group, devices) for group in plan.groups}
    assert (lanes.lanes_of(plan.schedule, meshes) is not None) == wanted


def test_deferred_arrays_are_freed_separately():
    """An array is freed after its last reader, even while others of the same program are alive."""

    class Array:
        pass

    made = [Array(), Array()]
    gone = weakref.ref(made[0])
    with lanes.Lanes(["actors"]) as running:
        first, second = running.defer("actors", lambda arrays: [made.pop(0), made.pop(0)], 2)([])
        assert first.array() is gone()
        del first
        second.array()
        (third,) = running.defer("actors", lambda arrays: [None], 1)([])
        third.array()  # the lane no longer holds its previous results
        assert gone() is None and second.array() is not None


@pytest.mark.parametrize("given", ["soon", "0", "-3", "nan"])
def test_invalid_time_limit(given, monkeypatch):
    monkeypatch.setenv(lanes.LIMIT, given)
    with pytest.raises(fdg.FdgError, match=f"FDG_HOST_TIMEOUT='{given}': give seconds above 0"):
        lanes.host_limit()
