"""What calibrations make of measured times: the times are given here, so the figures are known."""

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
def machine(monkeypatch):
    """Has every function take what a rule says, of its name and work."""

    def install(rule, gain=2.0):
        def timed(functions, lanes):
            found = {}
            for name, (function, arguments) in functions.items():
                work = work_of(jax.make_jaxpr(function)(*arguments))
                seconds = rule(name, work)
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


def test_products_by_their_start_flops_and_bytes(machine):
    machine(product_seconds(2e-6, 1e-11, 1e-10))
    found = {name: figure.value for name, figure in calibration._product_figures(LANES).items()}
    assert found == pytest.approx(
        {"product/float32": 1e11, "product_call": 2e-6, "product_bytes": 1e10, "parallel": 1 / 3}, rel=1e-6
    )
    assert {figure.spread for figure in calibration._product_figures(LANES).values()} == {0.125}


def test_one_core_divides_nothing(machine):
    machine(product_seconds(2e-6, 1e-11, 1e-10))
    assert "parallel" not in calibration._product_figures(1)


def test_products_that_are_no_slower_for_their_bytes(machine):
    machine(product_seconds(2e-6, 1e-11, -1e-14))
    assert calibration._product_figures(1)["product_bytes"].value == 1e15


def test_products_that_are_no_slower_for_their_flops(machine):
    """Then the rate is what the largest of them reached."""
    machine(product_seconds(1e-3, 0.0, 0.0))
    assert calibration._product_figures(1)["product/float32"].value == pytest.approx(2 * 512**3 / 1e-3)


def test_operations_by_their_class(machine):
    """An operation starts in 1 us, a trip in 3 us, and each class has bytes at a rate of its own."""
    rates = {"elementwise": 1e9, "transcendental": 2e9, "reduction": 3e9, "random": 4e9, "sort": 5e9}
    rates |= {"movement": 6e9, "host": 7e9, "special": 10e9, "copy": 11e9}

    def seconds(name, work):
        if name in ("memory", "cache"):
            return work.total_bytes / (8e9 if name == "memory" else 9e9)
        if name.endswith(" bytes"):  # up to 8 MiB nearly at the cache's rate
            return work.total_bytes / (8.9e9 if work.total_bytes <= 2**23 else 8.1e9)
        if name in rates:
            size = sum(operation.bytes * count for operation, count in work.operations.items())
            return 1e-6 + size / rates[name]
        if name in ("operation", "trip"):
            return 1e-6 * sum(work.operations.values()) + 3e-6 * work.trips
        return product_seconds(0.0, 1e-11, 1e-10)(name, work)

    machine(seconds)
    found = {name: figure.value for name, figure in calibration._device_figures(LANES, print).items()}
    expected = {**rates, "memory": 8e9, "cache": 9e9, "operation": 1e-6, "trip": 3e-6}
    expected |= {"cache_bytes": 2**23, "parallel": 1 / 3, "parallel_bytes": 1e5}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


class Fake:
    """Work, with an all-reduce behind it or not, that takes what a rule says."""

    def __init__(self, seconds):
        self.samples, self._seconds, self.seconds = [], list(seconds), 0.0

    def measure(self):
        """The next of the times."""
        self.seconds = self._seconds.pop(0)


@pytest.mark.parametrize(
    ("count", "latency", "call"),
    [(2, 0.0, 5e-6), (3, 0.0, 5e-6), (4, 1.5e-6, 2e-6), (8, 1.5e-6, 2e-6)],
)
def test_links_by_little_and_much_on_two_and_on_all(monkeypatch, devices, count, latency, call):
    """A ring of `n` takes `2 (n - 1)` steps, but what is small goes `2 log2 n` ways."""

    def worked(some, how):
        rounds = {2: 1, 4: 3, 8: 5}[len(some)]
        size = {"": 0, "little": 0, "much": links._LARGE_BYTES}[how]
        meeting = 2e-6 + rounds * 1.5e-6 + 1.5e-6 if how else 0.0
        once = 8e-5 + meeting + size / 1e9
        return Fake(once + 1e-3 * (i == 1) for i in range(links.ROUNDS))

    monkeypatch.setattr(links, "_work_then_all_reduce", worked)
    monkeypatch.setattr(links, "compile_all", lambda programs: None)
    link = links.between_devices(devices[:count], "wires", print)
    assert (link.latency.value, link.call.value) == pytest.approx((latency, call), rel=1e-6)
    assert link.bandwidth.value == pytest.approx(1e9)
    assert links.between_devices(devices[:1], "wires", print) is None


def test_sockets_by_two_processes_of_this_machine(monkeypatch):
    link = links.between_processes(print)
    assert link is not None and link.name == "sockets of this host"
    assert "measured here" in {link.call.source, link.bandwidth.source}  # values depend on what else runs
    monkeypatch.setattr(links.sys, "executable", "/bin/false")
    assert links.between_processes(print) is None


def test_devices_of_two_kinds_are_calibrated_one_by_one():
    both = [types.SimpleNamespace(device_kind=kind, platform="gpu") for kind in ("A100", "H100")]
    with pytest.raises(FdgError, match="devices are of 2 kinds: calibrate each kind by itself"):
        calibration.calibrate(both)


def test_a_spread_is_how_far_the_median_lies_above_the_least():
    assert calibration._spread([2.0, 1.0, 4.0]) == 1.0 and calibration._spread([6.0, 1.0, 4.0]) == 3.0
