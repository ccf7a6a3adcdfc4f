"""How a fleet handles the results and failures of its workers.

Ray is mocked: no process starts.
"""

import dataclasses
import os
import sys
import types

import jax
import numpy as np
import pytest

import envs
from envs import from_ray, host, running_pools
from envs.host import HostEnvironment
from envs.pools import Transition
from fdg import ray_cluster
from fdg.errors import HostError
from tests.envs.test_host import keys, run_steps

LIMIT, OBSERVATIONS, ACTIONS = 5, envs.Box(-1e6, 1e6, (2,)), envs.Discrete(2)


class CountingPool:
    """Observes its seed and its step count; episodes have five steps."""

    def __init__(self, size):
        self.seeds, self.counts = np.zeros(size), np.zeros(size)

    def reset(self, rows, seeds, timeout):
        self.seeds[rows], self.counts[rows] = seeds % 1000, 0
        return self._observations()[rows]

    def step(self, action, timeout):
        self.counts += 1
        final = self._observations()
        ended = self.counts == LIMIT
        self.counts[ended] = 0
        no = np.zeros(len(ended), bool)
        return Transition(self._observations(), np.ones(len(ended), np.float32), no, ended, final)

    def close(self):
        self.counts = None

    def _observations(self):
        return np.stack([self.seeds, self.counts], axis=1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Counting:
    name: str = "counting"
    observation_space: envs.Box = OBSERVATIONS
    action_space: envs.Discrete = ACTIONS
    max_episode_steps: int = LIMIT

    def start(self, size):
        return CountingPool(size)


class Actor:
    """A worker handle whose methods return at once, unless its mode is `dead`, `hang` or `fail`."""

    def __init__(self, worker, cpus):
        self.worker, self.cpus, self.mode = worker, cpus, "well"

    def __getattr__(self, method):
        return types.SimpleNamespace(remote=lambda *given: Answer(self, method, given))


class Answer:
    def __init__(self, actor, method, given):
        self.mode, self.cause = actor.mode, RuntimeError("it fell over")
        self.value = getattr(actor.worker, method)(*given) if self.mode == "well" else None
        if self.mode == "fail":
            actor.mode = "well"


class MockRay:
    """What `envs.from_ray` uses of Ray's module, for a cluster with `cpus` CPUs."""

    class exceptions:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError):
            pass

        class RayTaskError(RayError):
            pass

    def __init__(self, cpus):
        self.cpus, self.actors, self.started = cpus, [], 0

    def remote(self, cls):
        def options(num_cpus, **_):
            def start(*given):
                self.started += 1
                self.actors.append(Actor(cls(*given), num_cpus))
                return self.actors[-1]

            return types.SimpleNamespace(remote=start)

        return types.SimpleNamespace(options=options)

    def put(self, value):
        return value

    def wait(self, refs, num_returns, timeout):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref, timeout=None):
        if isinstance(ref, list):
            return [self.get(one) for one in ref]
        if ref.mode == "hang":
            raise self.exceptions.GetTimeoutError
        if ref.mode == "fail":
            error = self.exceptions.RayTaskError("a long text")
            error.cause = ref.cause
            raise error
        if ref.mode == "dead":
            raise self.exceptions.RayError("the actor died")
        return ref.value

    def kill(self, actor):
        actor.mode = "dead"
        self.actors.remove(actor)

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": self.cpus}

    def available_resources(self):
        return {"CPU": self.cpus - sum(actor.cpus for actor in self.actors)}


@pytest.fixture
def ray(monkeypatch):
    mock = MockRay(cpus=2)
    monkeypatch.setitem(sys.modules, "ray", mock)
    monkeypatch.setattr(ray_cluster, "connect", lambda local_cpus: mock)
    monkeypatch.setattr(from_ray, "_ROOM_SECONDS", 0.0)
    monkeypatch.setattr(from_ray, "_fleets", {})
    yield mock
    host.close()


def make_fleet(workers, restarts=100):
    return HostEnvironment(from_ray.FleetSource(Counting(), workers), restarts=restarts)


def step_with_and_without_fleet(env):
    """Seven steps of three instances: state with a fleet, and last steps without, which are equal."""
    alone = HostEnvironment(Counting())
    (state, first), (other, one) = (jax.jit(each.reset)(keys(3)) for each in (env, alone))
    np.testing.assert_array_equal(first, one)
    state, step = run_steps(env, state, 7)
    other, expected = run_steps(alone, other, 7)
    jax.tree.map(np.testing.assert_array_equal, step, expected)  # across the ends of episodes
    return state, expected


def test_dead_worker_truncates_only_its_episodes(ray):
    env = make_fleet(2)
    state, expected = step_with_and_without_fleet(env)
    before = host.losses()
    ray.actors[0].mode = "dead"  # it had two of the three instances
    state, step = run_steps(env, state, 4)
    np.testing.assert_array_equal(step.truncated, [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(step.observation[..., 1], [[0, 0, 3], [1, 1, 4], [2, 2, 0], [3, 3, 1]])
    np.testing.assert_array_equal(step.final_observation[0, :2], expected.observation[-1, :2])
    np.testing.assert_array_equal(step.reward[0], [0, 0, 1])
    assert host.losses() == (before.failures + 1, before.episodes + 2)
    assert ray.started == 3 and len(ray.actors) == 2
    fleet = from_ray.fleet(env.source)
    assert len(fleet) == 2
    assert fleet.where(0).startswith("worker 0 (host ") and f"process {os.getpid()})" in fleet.where(0)


def test_another_worker_takes_over_without_free_cpus(ray):
    env = make_fleet(2)
    state, _ = step_with_and_without_fleet(env)
    ray.cpus = 1  # the host is lost with its worker
    ray.actors[0].mode = "dead"
    state, step = run_steps(env, state, 2)
    np.testing.assert_array_equal(step.truncated, [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(step.observation[..., 1], [[0, 0, 3], [1, 1, 4]])
    assert ray.started == 2 and len(ray.actors) == 1  # which now holds the pools of both workers
    assert len(ray.actors[0].worker._pools) == 2


FAULTS = {
    "dead": r"worker 1 \(.*\) died \(all 1 restarts are used up\)",
    "hang": r"worker 1 \(.*\) was not done in 60 s \(all 1 restarts are used up\)",
    "fail": r"worker 1 \(.*\): RuntimeError: it fell over \(all 1 restarts are used up\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_when_no_restart_is_left(fault, ray):
    source = from_ray.FleetSource(Counting(), 2)
    running = running_pools._RunningPool(make_fleet(2, restarts=1), np.arange(3))
    ray.actors[1].mode = fault
    made, lost = running.step(np.arange(3), np.zeros(3, np.int32))
    assert lost.tolist() == [False, False, True] and made.truncated.tolist() == [False, False, True]
    assert ray.started == (2 if fault == "fail" else 3)  # a worker that raised is not replaced
    from_ray.fleet(source).worker(1).mode = fault
    with pytest.raises(HostError, match=FAULTS[fault]):
        running.step(np.arange(3), np.zeros(3, np.int32))


def test_failing_start_is_named(ray):
    from_ray.fleet(from_ray.FleetSource(Counting(), 2)).worker(0).mode = "fail"
    where = r"worker 0 \(host .*, process \d+\)"
    with pytest.raises(
        HostError, match=rf"^environment 'ray:counting': at its start, {where}: RuntimeError: it fell over$"
    ):
        running_pools._RunningPool(make_fleet(2), np.arange(3))


def test_number_of_workers_fits_the_cluster(ray):
    assert len(from_ray.fleet(from_ray.FleetSource(Counting()))) == 2
    ray.cpus = 7
    assert len(from_ray.fleet(from_ray.FleetSource(Counting(), cpus=2.0))) == 2  # two CPUs are taken
    busy = "the Ray cluster has 7 CPUs, 1 of them free: use"
    with pytest.raises(HostError, match=rf"8 workers of 1 CPUs: {busy} --env-workers 1, or \?cpus=0.875"):
        from_ray.fleet(from_ray.FleetSource(Counting(), 8))
    with pytest.raises(HostError, match=rf"3 workers of 4 CPUs: {busy} \?cpus=2.333"):  # rounded down
        from_ray.fleet(from_ray.FleetSource(Counting(), 3, cpus=4.0))


def test_workers_that_do_not_start(ray, monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs[:1], refs[1:]))
    with pytest.raises(HostError, match=r"1 of 2 workers have not started in 300 s: .* use --env-workers 1"):
        from_ray.fleet(from_ray.FleetSource(Counting(), 2))
    assert ray.actors == []


def test_closed_pool_leaves_workers_running(ray):
    running = running_pools._RunningPool(make_fleet(2), np.arange(3))
    assert [len(actor.worker._pools) for actor in ray.actors] == [1, 1]
    running.pool.close()
    assert [len(actor.worker._pools) for actor in ray.actors] == [0, 0]
