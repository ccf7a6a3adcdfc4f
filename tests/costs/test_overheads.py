"""Overheads between programs and devices, computed by hand."""

import dataclasses

import pytest

import fdg
import policies
from fdg.costs.machine import host_cluster
from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.costs.prediction import predict
from tests.tiny import Pupil


def test_overheads_by_hand():
    overheads = Overheads(divided=0.5, slowed=0.25, start=1e-5, further=0.5)
    assert [overheads.stretch(n) for n in (1, 2, 8)] == [1.0, 1.25, 1.75]
    assert [overheads.cores(n) for n in (0.5, 1, 3)] == [1.0, 1.0, 2.0]
    assert [overheads.seconds_to_start(n) for n in (1, 3)] == pytest.approx([1e-5, 2e-5])


def test_no_overheads_on_unfitted_platforms():
    assert OVERHEADS["gpu"] == OVERHEADS["tpu"] == Overheads()
    assert (Overheads().stretch(8), Overheads().cores(4), Overheads().seconds_to_start(8)) == (1.0, 4, 0.0)


@pytest.mark.parametrize("policy", [policies.GPUOnly(), policies.SingleLearnerCoarse(staleness=1)])
def test_overheads_add_time_but_no_bytes(policy):
    plan, machine = fdg.place(Pupil(num_envs=16), policy, 2), host_cluster("cpu", "cpu", 2)
    high = Overheads(divided=0.8, slowed=0.3, meetings=1.3, start=5e-5, further=1.0, array=2e-5, arrival=1e-5)
    kinds = [dataclasses.replace(machine.kind, overheads=one) for one in (high, Overheads())]
    with_it, without = (predict(plan, dataclasses.replace(machine, kind=kind)) for kind in kinds)
    assert with_it.seconds > 1.2 * without.seconds
    assert with_it.routes == pytest.approx(without.routes)
