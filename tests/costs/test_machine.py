"""Calibration files: written, read, and refused in one line if damaged or from another machine."""

import dataclasses
import json

import jax
import pytest

from fdg.__main__ import main
from fdg.costs import machine, published
from fdg.costs.hardware import RATES, SHARES, TIMES, DeviceKind, Figure
from fdg.costs.machine import SHARED_MEMORY, SOCKETS, UNCALIBRATED_CPU, Calibration
from fdg.costs.overheads import Overheads
from fdg.errors import FdgError
from tests.costs.figures import FILE, figures
from tests.refusing import refuses


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def calibration(**changes):
    figures = {**UNCALIBRATED_CPU.figures, "memory": Figure(123.0, 0.1, "measured here")}
    kind = dataclasses.replace(UNCALIBRATED_CPU, figures=figures)
    this_machine = {**machine.fingerprint("cpu"), **changes}
    return Calibration(this_machine, kind, SHARED_MEMORY, SOCKETS, 2, "2026-11-22", 60.0)


def write(found):
    path = machine.path_of("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found.as_json()))
    return path


def test_write_and_read(cache_home):
    assert machine.read(write(calibration())) == calibration()
    fitted = {"shares_after_fusion": {"elementwise": 0.5}, "overheads": Overheads(slowed=1)}
    kind = dataclasses.replace(calibration().kind, **fitted)
    fitted = dataclasses.replace(calibration(), kind=kind, jobs={"a": 1.0})
    machine.path_of("cpu").write_text(json.dumps(fitted.as_json()))
    assert machine.read(machine.path_of("cpu")) == fitted


def test_calibration_is_used_if_present(cache_home):
    assert "python -m fdg.calibrate" in machine.host_cluster("cpu", "cpu", 2).note
    write(calibration())
    found = machine.host_cluster("cpu", "cpu", 2)
    assert found.kind.rate("memory") == 123.0 and "measured 2026-11-22" in found.note


def test_calibration_of_another_machine_is_refused(cache_home):
    path = write(calibration(cores=99))
    with pytest.raises(FdgError, match=r"another machine \(cores 99; this machine has .*fdg.calibrate"):
        machine.check_machine(machine.read(path), path)
    assert machine.usable_calibration("cpu") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"version": 0}', "version 0"),
        ('{"version": 4}', "not a complete calibration"),
        ("[]", "does not contain a JSON object"),
        ("[" * 100_000, "nested"),
    ],
)
def test_unreadable_file(cache_home, text, message):
    path = write(calibration())
    path.write_text(text)
    with refuses("fdg.calibrate", match=message):
        machine.read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("machine", []), ("cores", "2"), ("date", 3), ("seconds", None), ("jobs", {"a": "b"}), ("joined", 1.0)],
)
def test_values_of_wrong_type(cache_home, name, value):
    path = write(calibration())
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(FdgError, match="not a complete calibration"):
        machine.read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cores", 0),
        ("figures", {}),
        ("figures", {"memory": {"value": float("nan")}}),
        ("text", "{"),
        ("overheads", {**dataclasses.asdict(Overheads()), "meetings": 0}),
        ("joined", {"elementwise": -1.0}),
    ],
)
def test_plan_reports_a_damaged_calibration(cache_home, capsys, name, value):
    path = write(calibration())
    text = json.dumps({**json.loads(path.read_text()), name: value})
    path.write_text(value if name == "text" else text)
    with refuses(str(path), "remove it, and run python -m fdg.calibrate"):
        machine.read(path)
    words = ["plan", "--algo", "tests.tiny:Walk", "--total-steps", "16", "--devices", "1"]
    assert main(words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("calibration: ")]
    assert str(path) in line and "remove it, and run python -m fdg.calibrate" in line


def test_unknown_device_kind(cache_home):
    with pytest.raises(FdgError, match="fdg has no rates of devices of kind 'Abacus'"):
        machine.host_cluster("Abacus", "gpu", 1)
    assert machine.host_cluster("NVIDIA H100 80GB HBM3", "gpu", 8).inside.name == "NVLink 4"


def test_published_figures_are_plausible():
    """All figures of all kinds: rates, times and shares are not negative; times are below 1 ms."""
    for kind in published.KINDS.values():
        for name in RATES:
            value = kind.rate(name)
            assert value >= 0.0 if name in SHARES | {"product_call"} else value > 0.0, (kind.name, name)
            assert name not in TIMES or value < 1e-3, (kind.name, name)


def test_figures_are_unchanged():
    """After an intended change: `python -m tests.costs.figures`. Bytes are those of JAX 0.10's jaxprs."""
    current, stored = figures(), json.loads(FILE.read_text())
    if jax.__version_info__ >= (0, 11):
        current["needs"] = stored["needs"]
    assert current == stored


@pytest.mark.parametrize(("median", "disturbed"), [(0.05, False), (0.4, True)])
def test_note_about_a_busy_machine(cache_home, monkeypatch, median, disturbed):
    """The median spread of measured figures decides, not one outlier; assumed figures do not count."""
    spreads = {"memory": 0.02, "product/float32": median, "elementwise": 0.9}
    known = {name: Figure(1e9, spread, machine.MEASURED) for name, spread in spreads.items()}
    known["sort"] = Figure(1e9, 5.0, "taken")
    found = dataclasses.replace(calibration(), kind=DeviceKind("cpu", "cpu", known))
    assert found.is_disturbed == disturbed and found.noise == median
    write(found)
    monkeypatch.setattr(machine, "busy_cores", lambda: 0.0)
    note = machine.host_cluster("cpu", "cpu", 2).note
    assert ("other programs used it (repeats differ by 40%)" in note) == disturbed and "are busy" not in note
    monkeypatch.setattr(machine, "busy_cores", lambda: 14.0)
    assert "now 14.0 of 2 cores are busy" in machine.host_cluster("cpu", "cpu", 2).note
