"""Threads for host devices, and platforms whose names JAX does not know yet."""

import os

import pytest

from fdg.running import host_devices
from fdg.running.host_devices import reserve_threads
from policies.groups import accelerators_and_hosts


@pytest.mark.parametrize(("cores", "devices", "threads"), [(64, 4, "64"), (2, 8, "16"), (None, 2, "4")])
def test_as_many_threads_as_cores_and_two_for_each_device(cores, devices, threads, monkeypatch):
    """With fewer, programs of several devices that wait for each other never end."""
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    reserve_threads(devices)
    assert os.environ["PJRT_NPROC"] == threads
    reserve_threads(2 * devices)
    assert os.environ["PJRT_NPROC"] == threads  # who has set it is right


def test_one_device_needs_none(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    reserve_threads(1)
    assert "PJRT_NPROC" not in os.environ


def test_a_child_has_threads_for_its_own_devices(monkeypatch):
    """What was set here for the devices of this process is not handed on; what a user has set is."""
    monkeypatch.setenv("PJRT_NPROC", "4")
    monkeypatch.setattr(host_devices, "_set_variables", {"PJRT_NPROC": "4"})
    assert "PJRT_NPROC" not in host_devices.environment_of_a_child()
    monkeypatch.setattr(host_devices, "_set_variables", {})
    assert host_devices.environment_of_a_child()["PJRT_NPROC"] == "4"


@pytest.mark.parametrize("platform", ["gpu", "tpu", "METAL", "axelera"])
def test_whatever_is_no_cpu_is_an_accelerator(platform):
    assert accelerators_and_hosts([platform, "cpu", platform]) == ([0, 2], [1])
