"""Calibration computes figures from measured times; here the times are given, so the figures are known."""

import types

import jax
import pytest

from fdg.costs import calibration, links
from fdg.costs.calibration import Times
from fdg.errors import FdgError
from fdg.jaxprs.count import Product
from fdg.profiling.work import work_of

LANES = 4


@pytest.fixture
def fake_times(monkeypatch):
    """Replaces measured times by `seconds_of(name, work)`."""

    def install(seconds_of, gain=2.0):
        def timed(functions, lanes):
            found = {}
            for name, (function, arguments) in functions.items():
                work = work_of(jax.make_jaxpr(function)(*arguments))
                seconds = seconds_of(name, work)
                found[name] = Times(work, seconds / gain, seconds, 0.125)
            return found

        monkeypatch.setattr(calibration, "_time_functions", timed)

    return install


def product_seconds(start, a_flop, a_byte):
    def seconds(name, work):
        m, k, n = eval(name)
        product = Product(1, m, k, n, "float32")
        return start + a_flop * product.flops + a_byte * product.bytes

    return seconds


def test_product_figures(fake_times):
    fake_times(product_seconds(2e-6, 1e-11, 1e-10))
    found = {name: figure.value for name, figure in calibration._product_figures(LANES).items()}
    assert found == pytest.approx(
        {"product/float32": 1e11, "product_call": 2e-6, "product_bytes": 1e10, "parallel": 1 / 3}, rel=1e-6
    )
    assert {figure.spread for figure in calibration._product_figures(LANES).values()} == {0.125}


def test_one_core_has_no_parallel_figure(fake_times):
    fake_times(product_seconds(2e-6, 1e-11, 1e-10))
    assert "parallel" not in calibration._product_figures(1)


def test_products_independent_of_bytes(fake_times):
    fake_times(product_seconds(2e-6, 1e-11, -1e-14))
    assert calibration._product_figures(1)["product_bytes"].value == 1e15


def test_products_independent_of_flops(fake_times):
    """The rate is then that of the largest product."""
    fake_times(product_seconds(1e-3, 0.0, 0.0))
    assert calibration._product_figures(1)["product/float32"].value == pytest.approx(2 * 512**3 / 1e-3)


def test_figures_per_operation_class(fake_times):
    """An operation starts in 1 us, a loop trip takes 3 us, and each class has its own bytes per second."""
    rates = {"elementwise": 1e9, "transcendental": 2e9, "reduction": 3e9, "random": 4e9, "sort": 5e9}
    rates |= {"movement": 6e9, "host": 7e9, "special": 10e9, "copy": 11e9}

    def seconds(name, work):
        if name in ("memory", "cache"):
            return work.total_bytes / (8e9 if name == "memory" else 9e9)
        if name.endswith(" bytes"):  # up to 8 MiB at almost the cache's rate
            return work.total_bytes / (8.9e9 if work.total_bytes <= 2**23 else 8.1e9)
        if name in rates:
            size = sum(operation.bytes * count for operation, count in work.operations.items())
            return 1e-6 + size / rates[name]
        if name in ("operation", "trip"):
            return 1e-6 * sum(work.operations.values()) + 3e-6 * work.trips
        return product_seconds(0.0, 1e-11, 1e-10)(name, work)

    fake_times(seconds)
    found = {name: figure.value for name, figure in calibration._device_figures(LANES, print).items()}
    expected = {**rates, "memory": 8e9, "cache": 9e9, "operation": 1e-6, "trip": 3e-6}
    expected |= {"cache_bytes": 2**23, "parallel": 1 / 3, "parallel_bytes": 1e5}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


class FakeProgram:
    """A program with given times."""

    def __init__(self, seconds):
        self.samples, self._seconds, self.seconds = [], list(seconds), 0.0

    def measure(self):
        """Sets `seconds` to the next time."""
        self.seconds = self._seconds.pop(0)


@pytest.mark.parametrize(
    ("count", "latency", "call"),
    [(2, 0.0, 5e-6), (3, 0.0, 5e-6), (4, 1.5e-6, 2e-6), (8, 1.5e-6, 2e-6)],
)
def test_link_figures(monkeypatch, devices, count, latency, call):
    """An all-reduce on `n` devices: `2 (n - 1)` steps in a ring, `2 log2 n` messages if it is small."""

    def fake_program(some, size_name):
        rounds = {2: 1, 4: 3, 8: 5}[len(some)]
        size = {"": 0, "little": 0, "much": links._LARGE_BYTES}[size_name]
        communication = 2e-6 + rounds * 1.5e-6 + 1.5e-6 if size_name else 0.0
        base = 8e-5 + communication + size / 1e9
        return FakeProgram(base + 1e-3 * (i == 1) for i in range(links.ROUNDS))

    monkeypatch.setattr(links, "_work_then_all_reduce", fake_program)
    monkeypatch.setattr(links, "compile_all", lambda programs: None)
    link = links.between_devices(devices[:count], "wires", print)
    assert (link.latency.value, link.call.value) == pytest.approx((latency, call), rel=1e-6)
    assert link.bandwidth.value == pytest.approx(1e9)
    assert links.between_devices(devices[:1], "wires", print) is None


def test_sockets_between_two_processes(monkeypatch):
    link = links.between_processes(print)
    assert link is not None and link.name == "sockets of this host"
    assert "measured here" in {link.call.source, link.bandwidth.source}  # values depend on what else runs
    monkeypatch.setattr(links.sys, "executable", "/bin/false")
    assert links.between_processes(print) is None


def test_devices_of_two_kinds_are_refused():
    both = [types.SimpleNamespace(device_kind=kind, platform="gpu") for kind in ("A100", "H100")]
    with pytest.raises(FdgError, match=r"devices are of 2 kinds \(A100, H100\): calibrate one at a time"):
        calibration.calibrate(both)


def test_spread_is_median_over_minimum():
    assert calibration._spread([2.0, 1.0, 4.0]) == 1.0 and calibration._spread([6.0, 1.0, 4.0]) == 3.0
