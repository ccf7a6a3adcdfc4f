"""Seconds of a program's work, computed by hand."""

import pytest

from fdg.costs.program_time import CLASSES, seconds_of
from fdg.jaxprs.count import Product
from fdg.profiling.work import SizedOperation, Work
from tests.costs.machines import kind

UNFUSED = dict.fromkeys(CLASSES, 1.0)


def test_rate_of_each_class():
    """1 MFLOP at 1 GFLOP/s, 2 x 1,000 B of tanh at 1 MB/s, 3 operations and 5 loop trips of 1 ms."""
    work = Work(
        products={Product(1, 50, 100, 100, "float32"): 1},
        operations={SizedOperation("transcendental", 1000): 2, SizedOperation("elementwise", 10**6): 1},
        trips=5,
    )
    gpu = kind(shares_after_fusion=UNFUSED, transcendental=1e6, operation=1e-3, trip=1e-3)
    found = seconds_of(work, gpu).by_class
    assert found["product"] == pytest.approx(1e-3)
    assert found["transcendental"] == pytest.approx(2e-3)
    assert found["elementwise"] == pytest.approx(1e-3)
    assert found["operation"] == pytest.approx(3e-3) and found["trip"] == pytest.approx(5e-3)
    assert max(found, key=found.__getitem__) == "trip"
    fused = kind(shares_after_fusion={**UNFUSED, "trip": 0.0}, transcendental=1e6, operation=1e-3, trip=1e-3)
    assert sum(seconds_of(work, fused).by_class.values()) == pytest.approx(7e-3)


def test_time_of_products():
    work = Work(products={Product(1, 10, 10, 10, "float32"): 2})
    gpu = kind(shares_after_fusion=UNFUSED, product_bytes=1e6, product_call=1e-3)
    assert sum(seconds_of(work, gpu).by_class.values()) == pytest.approx(2 * (2000 / 1e9 + 1200 / 1e6 + 1e-3))


def test_large_operations_use_all_cores():
    """4 cores and a parallel share of 2/3: three times as fast; small operations use one core."""
    gpu = kind(shares_after_fusion=UNFUSED, parallel=2 / 3, parallel_bytes=10**5)
    large = Work(operations={SizedOperation("elementwise", 3 * 10**8): 1})
    small = Work(operations={SizedOperation("elementwise", 10**4): 1})
    assert sum(seconds_of(large, gpu, 4).by_class.values()) == pytest.approx(0.1)
    assert seconds_of(large, gpu, 4).cores == pytest.approx(4)
    assert sum(seconds_of(small, gpu, 4).by_class.values()) == pytest.approx(1e-5)
    assert seconds_of(small, gpu, 4).cores == pytest.approx(1)


def test_dtypes_without_a_rate():
    assert kind().rate("product/bfloat16") == 1e9
    assert kind().rate("product/float64") == 5e8
