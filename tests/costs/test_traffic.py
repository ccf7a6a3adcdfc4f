"""Collectives and transfers, by hand."""

import types

import pytest

from fdg.batch.collective import Collective
from fdg.costs.traffic import collective, transfer
from fdg.placing.layout import Layout
from tests.costs.machines import cluster, link


def reduce(size, devices, **where):
    where = cluster(devices, **where)
    return collective(Collective("all-reduce", size, 1), range(devices), where)


def test_a_ring_passes_its_bytes_nearly_twice():
    """1 MB over 4 devices at 1 GB/s: 2 x 3/4 x 1 ms."""
    assert reduce(10**6, 4).seconds == pytest.approx(1.5e-3)
    assert reduce(10**6, 4).inside == pytest.approx(4 * 1.5e6)
    assert reduce(10**6, 1).seconds == 0.0


def test_an_all_gather_passes_them_once():
    found = collective(Collective("all-gather", 10**6, 1), range(4), cluster(4))
    assert found.seconds == pytest.approx(0.75e-3)


def test_latency_counts_with_the_logarithm():
    slow = link("inside", latency=1e-3, call=5e-3)
    assert reduce(1, 8, inside=slow).seconds == pytest.approx(5e-3 + 2 * 3 * 1e-3, rel=1e-3)
    assert reduce(1, 8, inside=slow).bound == "inside latency"


def test_hosts_have_a_ring_of_their_own():
    """8 devices on 2 hosts, 1 MB: 2 x 3/4 ms within, 2 x 1/2 ms between at 1 GB/s."""
    found = reduce(10**6, 8, hosts=2)
    assert found.seconds == pytest.approx(1.5e-3 + 1e-3)
    assert found.between == pytest.approx(2 * 10**6)
    assert reduce(10**6, 8).between == 0.0


def test_devices_that_share_cores_wait_for_their_turn():
    slow = link("inside", call=1e-3)
    assert reduce(1, 8, inside=slow, cores=2).seconds == pytest.approx(4e-3, rel=1e-3)


@pytest.mark.parametrize(("hosts", "seconds"), [(1, 2e-3 + 1e-3), (2, 4e-3 + 0.5e-3 + 7e-3)])
def test_what_crosses_from_process_to_process_is_a_collective(hosts, seconds):
    """1 MB at 1 GB/s after 2 ms; to another host at 2 GB/s after 4 ms, and a call's 7 ms."""
    value = types.SimpleNamespace(bytes=10**6, laid_out=Layout.of_batch((250_000,), None, 1))
    move = types.SimpleNamespace(pairs=[(value, value)])
    inside = link("inside", latency=2e-3, call=5e-3)
    between = link("between", latency=4e-3, bandwidth=2e9, call=7e-3)
    found = transfer(move, [0], [1], cluster(2, hosts, inside=inside, between=between))
    assert found.seconds == pytest.approx(seconds)
    assert (found.inside, found.between) == ((10**6, 0) if hosts == 1 else (0, 10**6))
