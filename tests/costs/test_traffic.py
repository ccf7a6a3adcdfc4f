"""Costs of collectives and transfers, computed by hand."""

import types

import pytest

import algos
import envs
import fdg
import policies
from fdg.batch.collective import Collective
from fdg.costs.traffic import collective, host_work, transfer_cost
from fdg.errors import PlanError
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
    one = Layout.of_batch((250_000,), None, 1)
    inside = link("inside", latency=2e-3, call=5e-3)
    between = link("between", latency=4e-3, bandwidth=2e9, call=7e-3)
    found = transfer_cost(
        moving(10**6, one, one), [0], [1], cluster(2, hosts, inside=inside, between=between)
    )
    assert found.seconds == pytest.approx(seconds)
    assert (found.inside, found.between) == ((10**6, 0) if hosts == 1 else (0, 10**6))


def moving(size, source, target):
    """A move of one value of `size` bytes between these layouts."""
    values = [types.SimpleNamespace(bytes=size, laid_out=layout) for layout in (source, target)]
    return types.SimpleNamespace(pairs=[values])


@pytest.mark.parametrize(("receivers", "rounds"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3)])
def test_parameters_are_sent_along_a_tree(receivers, rounds):
    """1 MB at 1 GB/s, one device per host: each round takes 1 ms, after a latency of 2 ms."""
    one, all_of_them = (Layout.of_batch((250_000,), None, count) for count in (1, receivers))
    where = cluster(8, hosts=8, between=link("between", latency=2e-3))
    found = transfer_cost(moving(10**6, one, all_of_them), [0], range(1, 1 + receivers), where)
    assert found.seconds == pytest.approx(rounds * (2e-3 + 1e-3))
    assert found.between == receivers * 10**6


def test_each_device_of_a_host_receives_parameters_once():
    """1 MB at 1 GB/s to 7 devices of another host, in three rounds."""
    one, seven = (Layout.of_batch((250_000,), None, count) for count in (1, 7))
    found = transfer_cost(moving(10**6, one, seven), [0], range(8, 15), cluster(16, hosts=2))
    assert found.seconds == pytest.approx(7e-3)


def test_transfer_between_kinds_of_hosts():
    """8 MB from 4 hosts with links of 1 GB/s to one host with a link of 16 GB/s, and back."""
    first = cluster(8, hosts=4)
    where = cluster(2, first=first, between=link("fast", bandwidth=1.6e10))
    assert [where.host_of(device) for device in (0, 1, 2, 7, 8, 9)] == [0, 0, 1, 3, 4, 4]
    slow, fast = (Layout.of_batch((8,), 0, count) for count in (8, 2))
    there = transfer_cost(moving(8 * 10**6, slow, fast), range(8), [8, 9], where)
    back = transfer_cost(moving(8 * 10**6, fast, slow), [8, 9], range(8), where)
    assert there.seconds == back.seconds == pytest.approx(8e6 / 4 / 1e9)
    assert collective(Collective("all-reduce", 10**6, 1), [8, 9], where).between == 0
    with pytest.raises(PlanError, match="devices 0 to 9, but those before 8 are of another kind"):
        collective(Collective("all-reduce", 10**6, 1), range(10), where)


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
    check_host_work(fdg.trace(Pupil(num_envs=4096)), policy)


def test_host_work_of_a_stream_is_independent_of_device_count():
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_minibatches": 1, "micro_batch": None}
    stream = {"num_prompts": 1024, "group_size": 8, "slots": 4096, "micro_batches": 4, "ahead": 1}
    algorithm = algos.GRPO(env=envs.make("text:addition"), **sizes, **stream)
    check_host_work(fdg.trace(algorithm), lambda count: policies.Split(learners=count // 2, lag=1))


def check_host_work(graph, policy):
    """Programs, transfers, arrays and communication rounds of an iteration, on hosts with eight devices. The
    rounds depend on the ratio of senders to receivers, which is constant here."""
    found = []
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
