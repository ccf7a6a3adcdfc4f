"""What a fleet makes of its workers' answers, with a Ray that is played: no process starts here.

`test_fleet.py --whole` has the same on a cluster of Ray's own.
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
from tests.envs.test_host import keys, stepped

LIMIT, SEEN, ACTIONS = 5, envs.Box(-1e6, 1e6, (2,)), envs.Discrete(2)


class CountingPool:
    """Observations are a seed and a count of steps; an episode has five."""

    def __init__(self, size):
        self.seeds, self.counts = np.zeros(size), np.zeros(size)

    def reset(self, rows, seeds, timeout):
        self.seeds[rows], self.counts[rows] = seeds % 1000, 0
        return self._seen()[rows]

    def step(self, action, timeout):
        self.counts += 1
        final = self._seen()
        ended = self.counts == LIMIT
        self.counts[ended] = 0
        no = np.zeros(len(ended), bool)
        return Transition(self._seen(), np.ones(len(ended), np.float32), no, ended, final)

    def close(self):
        self.counts = None

    def _seen(self):
        return np.stack([self.seeds, self.counts], axis=1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Counting:
    name: str = "counting"
    observation_space: envs.Box = SEEN
    action_space: envs.Discrete = ACTIONS
    max_episode_steps: int = LIMIT

    def start(self, size):
        return CountingPool(size)


class Actor:
    """A handle of a worker, whose methods answer at once, unless it is dead or told to `hang` or `fail`."""

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


class PlayedRay:
    """What `envs.from_ray` uses of Ray's module, for a cluster of so many CPUs."""

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
    played = PlayedRay(cpus=2)
    monkeypatch.setitem(sys.modules, "ray", played)
    monkeypatch.setattr(ray_cluster, "connect", lambda local_cpus: played)
    monkeypatch.setattr(from_ray, "_ROOM_SECONDS", 0.0)
    monkeypatch.setattr(from_ray, "_fleets", {})
    yield played
    host.close()


def fleet_of(workers, restarts=100):
    return HostEnvironment(from_ray.FleetSource(Counting(), workers), restarts=restarts)


def begun(env):
    """Three instances of it, and of the same without a fleet, after seven steps."""
    alone = HostEnvironment(Counting())
    (state, first), (other, one) = (jax.jit(each.reset)(keys(3)) for each in (env, alone))
    np.testing.assert_array_equal(first, one)
    state, step = stepped(env, state, 7)
    other, without = stepped(alone, other, 7)
    jax.tree.map(np.testing.assert_array_equal, step, without)  # across the ends of episodes
    return state, without


def test_a_worker_that_dies_costs_its_running_episodes_and_no_more(ray):
    env = fleet_of(2)
    state, without = begun(env)
    before = host.losses()
    ray.actors[0].mode = "dead"  # it had two of the three instances
    state, step = stepped(env, state, 4)
    np.testing.assert_array_equal(step.truncated, [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(step.observation[..., 1], [[0, 0, 3], [1, 1, 4], [2, 2, 0], [3, 3, 1]])
    np.testing.assert_array_equal(step.final_observation[0, :2], without.observation[-1, :2])
    np.testing.assert_array_equal(step.reward[0], [0, 0, 1])
    assert host.losses() == (before.failures + 1, before.episodes + 2)
    assert ray.started == 3 and len(ray.actors) == 2
    fleet = from_ray.fleet(env.source)
    assert len(fleet) == 2
    assert fleet.where(0).startswith("worker 0 (host ") and f"process {os.getpid()})" in fleet.where(0)


def test_where_no_host_has_room_another_worker_takes_its_share(ray):
    env = fleet_of(2)
    state, _ = begun(env)
    ray.cpus = 1  # with the worker its host is gone
    ray.actors[0].mode = "dead"
    state, step = stepped(env, state, 2)
    np.testing.assert_array_equal(step.truncated, [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(step.observation[..., 1], [[0, 0, 3], [1, 1, 4]])
    assert ray.started == 2 and len(ray.actors) == 1  # which has both shares now, each under its own key
    assert len(ray.actors[0].worker._pools) == 2


FAULTS = {
    "dead": r"worker 1 \(.*\) died \(all 1 restarts are used up\)",
    "hang": r"worker 1 \(.*\) was not done in 60 s \(all 1 restarts are used up\)",
    "fail": r"worker 1 \(.*\): RuntimeError: it fell over \(all 1 restarts are used up\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_when_no_restart_is_left(fault, ray):
    source = from_ray.FleetSource(Counting(), 2)
    running = running_pools._RunningPool(fleet_of(2, restarts=1), np.arange(3))
    ray.actors[1].mode = fault
    made, lost = running.step(np.arange(3), np.zeros(3, np.int32))
    assert lost.tolist() == [False, False, True] and made.truncated.tolist() == [False, False, True]
    assert ray.started == (2 if fault == "fail" else 3)  # one that raised lives on
    from_ray.fleet(source).worker(1).mode = fault
    with pytest.raises(HostError, match=FAULTS[fault]):
        running.step(np.arange(3), np.zeros(3, np.int32))


def test_one_that_cannot_make_its_instances_is_named(ray):
    from_ray.fleet(from_ray.FleetSource(Counting(), 2)).worker(0).mode = "fail"
    where = r"worker 0 \(host .*, process \d+\)"
    with pytest.raises(
        HostError, match=rf"^environment 'ray:counting': at its start, {where}: RuntimeError: it fell over$"
    ):
        running_pools._RunningPool(fleet_of(2), np.arange(3))


def test_workers_are_as_many_as_there_is_room_for(ray):
    assert len(from_ray.fleet(from_ray.FleetSource(Counting()))) == 2
    ray.cpus = 7
    assert len(from_ray.fleet(from_ray.FleetSource(Counting(), cpus=2.0))) == 2  # two CPUs are taken
    with pytest.raises(HostError, match=r"8 workers of 1 CPUs: the Ray cluster has 7 CPUs, 1 of them free"):
        from_ray.fleet(from_ray.FleetSource(Counting(), 8))


def test_workers_that_do_not_start_are_ended_and_counted(ray, monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs[:1], refs[1:]))
    with pytest.raises(HostError, match=r"1 of 2 workers have not started in 300 s: .* use --env-workers 1"):
        from_ray.fleet(from_ray.FleetSource(Counting(), 2))
    assert ray.actors == []


def test_a_pool_lets_go_of_its_shares_and_leaves_the_workers(ray):
    running = running_pools._RunningPool(fleet_of(2), np.arange(3))
    assert [len(actor.worker._pools) for actor in ray.actors] == [1, 1]
    running.pool.close()
    assert [len(actor.worker._pools) for actor in ray.actors] == [0, 0]
