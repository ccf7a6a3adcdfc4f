"""Threads for host devices, and platforms whose names JAX does not know."""

import os

import pytest

from fdg.running import host_devices
from fdg.running.host_devices import reserve_threads
from policies.groups import accelerators_and_hosts


@pytest.mark.parametrize(("cores", "devices", "threads"), [(64, 4, "64"), (2, 8, "16"), (None, 2, "4")])
def test_reserved_threads(cores, devices, threads, monkeypatch):
    """One for each core, and at least two for each device: with fewer, programs over devices deadlock."""
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    reserve_threads(devices)
    assert os.environ["PJRT_NPROC"] == threads
    reserve_threads(2 * devices)
    assert os.environ["PJRT_NPROC"] == threads  # a value that is set is kept


def test_one_device_reserves_no_threads(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    reserve_threads(1)
    assert "PJRT_NPROC" not in os.environ


def test_environment_of_a_child_process(monkeypatch):
    """It does not inherit the number of threads set for this process, but it inherits a user's number."""
    monkeypatch.setenv("PJRT_NPROC", "4")
    monkeypatch.setattr(host_devices, "_set_variables", {"PJRT_NPROC": "4"})
    assert "PJRT_NPROC" not in host_devices.environment_of_a_child()
    monkeypatch.setattr(host_devices, "_set_variables", {})
    assert host_devices.environment_of_a_child()["PJRT_NPROC"] == "4"


@pytest.mark.parametrize("platform", ["gpu", "tpu", "METAL", "axelera"])
def test_platforms_other_than_cpu_are_accelerators(platform):
    assert accelerators_and_hosts([platform, "cpu", platform]) == ([0, 2], [1])
