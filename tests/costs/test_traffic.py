"""Costs of collectives and transfers, computed by hand."""

import types

import pytest

import fdg
import policies
from fdg.batch.collective import Collective
from fdg.costs.traffic import collective, host_work, transfer_cost
from fdg.placing.layout import Layout, find_route
from fdg.running.exchange import broadcast_rounds
from tests.costs.machines import cluster, link
from tests.tiny import Pupil


def all_reduce(size, devices, **where):
    where = cluster(devices, **where)
    return collective(Collective("all-reduce", size, 1), range(devices), where)


def test_all_reduce_in_a_ring():
    """1 MB over 4 devices at 1 GB/s: 2 x 3/4 x 1 ms."""
    assert all_reduce(10**6, 4).seconds == pytest.approx(1.5e-3)
    assert all_reduce(10**6, 4).inside == pytest.approx(4 * 1.5e6)
    assert all_reduce(10**6, 1).seconds == 0.0


def test_all_gather_in_a_ring():
    found = collective(Collective("all-gather", 10**6, 1), range(4), cluster(4))
    assert found.seconds == pytest.approx(0.75e-3)


def test_latency_grows_with_log_devices():
    slow = link("inside", latency=1e-3, call=5e-3)
    assert all_reduce(1, 8, inside=slow).seconds == pytest.approx(5e-3 + 2 * 3 * 1e-3, rel=1e-3)
    assert all_reduce(1, 8, inside=slow).largest_part == "inside latency"


def test_all_reduce_between_hosts():
    """8 devices on 2 hosts, 1 MB at 1 GB/s: 2 x 3/4 ms within a host, 2 x 1/2 ms between hosts."""
    found = all_reduce(10**6, 8, hosts=2)
    assert found.seconds == pytest.approx(1.5e-3 + 1e-3)
    assert found.between == pytest.approx(2 * 10**6)
    assert all_reduce(10**6, 8).between == 0.0


def test_devices_that_share_cores_take_turns():
    slow = link("inside", call=1e-3)
    assert all_reduce(1, 8, inside=slow, cores=2).seconds == pytest.approx(4e-3, rel=1e-3)


@pytest.mark.parametrize(("hosts", "seconds"), [(1, 2e-3 + 1e-3), (2, 4e-3 + 0.5e-3 + 7e-3)])
def test_transfer_between_hosts_costs_a_collective(hosts, seconds):
    """1 MB at 1 GB/s after 2 ms; to another host at 2 GB/s after 4 ms, plus 7 ms for the call."""
    value = types.SimpleNamespace(bytes=10**6, laid_out=Layout.of_batch((250_000,), None, 1))
    move = types.SimpleNamespace(pairs=[(value, value)])
    inside = link("inside", latency=2e-3, call=5e-3)
    between = link("between", latency=4e-3, bandwidth=2e9, call=7e-3)
    found = transfer_cost(move, [0], [1], cluster(2, hosts, inside=inside, between=between))
    assert found.seconds == pytest.approx(seconds)
    assert (found.inside, found.between) == ((10**6, 0) if hosts == 1 else (0, 10**6))


def test_arrays_per_host():
    """Three values from eight devices to eight others; each host handles arrays of its own devices only."""
    move = types.SimpleNamespace(
        pairs=[[types.SimpleNamespace(laid_out=Layout.of_batch((16,), 0, 8))] * 2] * 3
    )
    groups = range(8), range(8, 16)
    assert host_work(move, *groups, cluster(16)) == (0, 3 * 8)
    assert host_work(move, *groups, cluster(16, hosts=4)) == (3, 3 * 4)


@pytest.mark.parametrize(
    "policy",
    [
        lambda count: policies.GPUOnly(),
        lambda count: policies.MultiLearner(),
        lambda count: policies.SingleLearnerCoarse(learners=count // 2, staleness=1),
        lambda count: policies.Central(servers=count // 2),
    ],
)
def test_host_work_is_independent_of_device_count(policy):
    """Programs, transfers, arrays and communication rounds of an iteration, on hosts with eight devices. The
    rounds depend on the ratio of senders to receivers, which is constant here."""
    graph, found = fdg.trace(Pupil(num_envs=4096)), []
    for count in (64, 512, 4096):
        plan, where = fdg.place(graph, policy(count), count), cluster(count, hosts=count // 8)
        groups = {group.name: group.devices for group in plan.groups}
        moves = [
            (host_work(move, groups[move.source], groups[move.target], where), _max_rounds(move), times)
            for move, times in plan.moves()
        ]
        found.append(([(call.name, len(call.inputs), times) for call, times in plan.calls()], moves))
    assert found[0] == found[1] == found[2]


def _max_rounds(move):
    """The most rounds of any value; sources and targets are numbered as devices of two disjoint groups."""
    highest = 0
    for a, b in move.pairs:
        sources = frozenset(range(a.laid_out.num_devices))
        for chunk in find_route(a.laid_out, b.laid_out).chunks:
            messages = [(i, r, len(sources) + j) for j, (i, r) in enumerate(chunk)]
            highest = max(highest, *(number + 1 for number, *_ in broadcast_rounds(messages, sources)))
    return highest
