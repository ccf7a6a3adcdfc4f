"""Processes on the nodes of a fake Ray cluster: requests to Ray, and how processes end."""

import concurrent.futures
import importlib
import os
import signal
import types

import pytest

from fdg import ray_cluster
from fdg.errors import FdgError
from fdg.launching import on_ray
from fdg.launching.restarting import REFUSED
from fdg.processes import lines


class LostError(Exception):
    """The fake's `RayError`."""


class Method:
    def __init__(self, cluster, function):
        self.cluster, self.function = cluster, function

    def remote(self, *words):
        return self.cluster.pool.submit(self.function, *words)


class Actor:
    """A host whose process returns the outputs that the test has set."""

    def __init__(self, cluster, i):
        self._host, self._cluster = Host(cluster, i), cluster

    def __getattr__(self, name):
        return Method(self._cluster, getattr(self._host, name))


class Host:
    def __init__(self, cluster, i):
        self.cluster, self.i, self.outputs = cluster, i, iter(cluster.outputs[i])

    def describe(self):
        return {"host": f"h{self.i}", "ip": "10.0.0.1", "node": f"n{self.i}", "port": 7, "address": "here:1"}

    def start(self, command, environment, folder):
        self.cluster.commands.append((self.i, command, environment, folder))
        refusal = self.cluster.refusals.get(self.i, "")
        return (0, refusal) if refusal else (100 + self.i, "")

    def follow(self, seconds):
        answer = next(self.outputs)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def signal(self, number):
        self.cluster.events.append(("signal", self.i, number))

    def stop(self):
        self.cluster.events.append(("stop", self.i))


class Cluster:
    """A fake of the used part of module `ray`, with nodes that have these numbers of CPUs."""

    exceptions = types.SimpleNamespace(RayError=LostError)
    cloudpickle = types.SimpleNamespace(register_pickle_by_value=lambda module: None)

    def __init__(self, cpus=(4, 4), accelerators=()):
        self.alive = [
            {"NodeID": f"n{i}", "Alive": True, "Resources": {"CPU": count, **dict(accelerators)}}
            for i, count in enumerate(cpus)
        ]
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.commands, self.events, self.options, self.refusals = [], [], [], {}
        self.outputs = [[([("out", f"I am {i}")], None), ([], 0)] for i in range(len(cpus))]

    def nodes(self):
        return self.alive

    def get_runtime_context(self):
        return types.SimpleNamespace(gcs_address="here:1")

    def remote(self, kind):
        def options(**words):
            self.options.append(words)
            number = len(self.options) - 1
            return types.SimpleNamespace(remote=lambda: Actor(self, number))

        return types.SimpleNamespace(options=options)

    def get(self, pending):
        return [one.result() for one in pending] if isinstance(pending, list) else pending.result()

    def wait(self, pending, num_returns=1, timeout=None):
        when = concurrent.futures.ALL_COMPLETED if num_returns > 1 else concurrent.futures.FIRST_COMPLETED
        done, rest = concurrent.futures.wait(pending, timeout, when)
        return list(done), list(rest)

    def kill(self, actor):
        self.events.append(("kill", actor._host.i))

    def shutdown(self):
        self.pool.shutdown()


@pytest.fixture
def run(monkeypatch):
    """Creates an engine on a fake cluster, which records reserved and released resources."""

    def engine(cluster, **settings):
        monkeypatch.setattr(ray_cluster, "connect", lambda address: cluster)
        util = importlib.import_module("ray.util.placement_group")
        group = types.SimpleNamespace(wait=lambda seconds: True)
        reserve = lambda bundles, strategy: cluster.events.append(("reserve", bundles, strategy)) or group  # noqa: E731
        monkeypatch.setattr(util, "placement_group", reserve)
        monkeypatch.setattr(util, "remove_placement_group", lambda one: cluster.events.append("release"))
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        monkeypatch.setattr(strategies, "PlacementGroupSchedulingStrategy", lambda of, i: i)
        return on_ray.OnRay(**settings)

    pytest.importorskip("ray")
    return engine


def test_process_on_each_node(run, capsys):
    cluster = Cluster()
    engine = run(cluster, cpus=2.0)
    assert engine.reserve(first=True) == 2
    ending = engine.run(["--env", "CartPole-v1"])
    assert (ending.status, ending.reason) == (0, "")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[h0 0] I am 0", "[h1 1] I am 1"]
    assert cluster.events[0] == ("reserve", [{"CPU": 2.0}] * 2, "STRICT_SPREAD")
    assert [one["scheduling_strategy"] for one in cluster.options] == [0, 1]
    assert sorted(cluster.events[1:-1]) == sorted((what, i) for what in ("stop", "kill") for i in (0, 1))
    assert cluster.events[-1] == "release"
    keys = set()
    for i, command, environment, folder in cluster.commands:
        assert command[:4] == ["-m", "fdg.train", "--env", "CartPole-v1"]
        coordinator = ["--coordinator-address", "10.0.0.1:7", "--num-processes", "2", "--process-id", str(i)]
        assert command[4:] == coordinator and folder == os.getcwd()
        assert environment["RAY_ADDRESS"] == "here:1"
        keys.add(environment[lines.KEY_VARIABLE])
    assert len(keys) == 1 and len(keys.pop()) == 64


def test_one_node_needs_no_coordinator(run):
    cluster = Cluster()
    engine = run(cluster, nodes=1)
    assert engine.reserve(first=True) == 1
    assert engine.run([]).status == 0
    assert [command for _, command, *_ in cluster.commands] == [["-m", "fdg.train"]]


def test_process_that_cannot_start(run):
    cluster = Cluster()
    cluster.refusals[1] = "there is no folder x on that host"
    engine = run(cluster)
    engine.reserve(first=True)
    ending = engine.run([])
    assert ending.status == REFUSED and "process 1 (host h1): there is no folder x" in ending.reason
    assert ("kill", 0) in cluster.events and ("kill", 1) in cluster.events


def test_lost_actor(run, monkeypatch):
    monkeypatch.setattr(on_ray, "STOP_SECONDS", 5.0)
    cluster = Cluster()
    cluster.outputs[0] = [([], 1)]
    cluster.outputs[1] = [LostError("the actor died")]
    engine = run(cluster)
    engine.reserve(first=True)
    ending = engine.run([])
    assert "process 1 (host h1, pid 101)" in ending.reason and "its Ray actor was killed" in ending.reason
    cluster.outputs[1] = [LostError("its node has died")]
    cluster.options.clear()
    engine.reserve(first=True)
    assert "its node was lost" in engine.run([]).reason


def test_signal_reaches_all(run):
    cluster = Cluster()

    class SignalOnIteration(list):
        def __iter__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return iter([([], None)] * 3 + [([], 143)])

    cluster.outputs = [SignalOnIteration(), [([], None)] * 3 + [([], 143)]]
    engine = run(cluster)
    engine.reserve(first=True)
    ending = engine.run([])
    assert ending.interrupted and ending.status == 143
    assert {one for one in cluster.events if one[0] == "signal"} == {("signal", i, 15) for i in (0, 1)}


def test_insufficient_nodes(run):
    with pytest.raises(
        FdgError,
        match=r"--nodes 3: 2 nodes .* at here:1 have room \(it has n0: 4 CPU, n1: 4 CPU\): use --nodes 2",
    ):
        run(Cluster(), nodes=3)
    with pytest.raises(FdgError, match=r"no node of the Ray cluster at here:1 has 8 CPUs"):
        run(Cluster(), cpus=8.0)
    cluster = Cluster((4, 1))
    assert run(cluster, cpus=2.0).reserve(first=True) == 1


def test_process_reserves_all_accelerators_of_its_node(run):
    cluster = Cluster(accelerators={"GPU": 8})
    engine = run(cluster)
    engine.reserve(first=True)
    assert cluster.events[0] == ("reserve", [{"CPU": 1.0, "GPU": 8}] * 2, "STRICT_SPREAD")
    assert engine.run([]).status == 0 and {one["num_gpus"] for one in cluster.options} == {8}


def test_nodes_with_different_accelerators(run):
    """A run uses one kind of accelerator: that of most nodes."""
    cluster = Cluster((4, 4, 4))
    for node, (name, amount) in zip(cluster.alive, (("TPU", 4), ("GPU", 8), ("TPU", 8)), strict=True):
        node["Resources"][name] = amount
    assert run(cluster).reserve(first=True) == 2
    assert cluster.events[0] == ("reserve", [{"CPU": 1.0, "TPU": 4}] * 2, "STRICT_SPREAD")
