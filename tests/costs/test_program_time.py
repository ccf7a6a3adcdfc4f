"""Seconds of a program's work, by hand."""

import pytest

from fdg.costs.program_time import CLASSES, seconds_of
from fdg.jaxprs.count import Product
from fdg.profiling.work import SizedOperation, Work
from tests.costs.machines import kind

WHOLE = dict.fromkeys(CLASSES, 1.0)


def test_each_class_at_its_own_rate():
    """1 MFLOP at 1 GFLOP/s, 2 x 1,000 B of tanh at 1 MB/s, 3 operations and 5 trips of 1 ms."""
    work = Work(
        products={Product(1, 50, 100, 100, "float32"): 1},
        operations={SizedOperation("transcendental", 1000): 2, SizedOperation("elementwise", 10**6): 1},
        trips=5,
    )
    one = kind(joined=WHOLE, transcendental=1e6, operation=1e-3, trip=1e-3)
    found = seconds_of(work, one).by_class
    assert found["product"] == pytest.approx(1e-3)
    assert found["transcendental"] == pytest.approx(2e-3)
    assert found["elementwise"] == pytest.approx(1e-3)
    assert found["operation"] == pytest.approx(3e-3) and found["trip"] == pytest.approx(5e-3)
    assert max(found, key=found.__getitem__) == "trip"
    without = kind(joined={**WHOLE, "trip": 0.0}, transcendental=1e6, operation=1e-3, trip=1e-3)
    assert sum(seconds_of(work, without).by_class.values()) == pytest.approx(7e-3)


def test_products_also_pay_for_their_matrices_and_their_start():
    work = Work(products={Product(1, 10, 10, 10, "float32"): 2})
    one = kind(joined=WHOLE, product_bytes=1e6, product_call=1e-3)
    assert sum(seconds_of(work, one).by_class.values()) == pytest.approx(2 * (2000 / 1e9 + 1200 / 1e6 + 1e-3))


def test_large_operations_are_divided_over_cores():
    """Of 4 cores and a share of 2/3: three times as quick; small ones stay on one core."""
    one = kind(joined=WHOLE, parallel=2 / 3, parallel_bytes=10**5)
    large = Work(operations={SizedOperation("elementwise", 3 * 10**8): 1})
    small = Work(operations={SizedOperation("elementwise", 10**4): 1})
    assert sum(seconds_of(large, one, 4).by_class.values()) == pytest.approx(0.1)
    assert seconds_of(large, one, 4).cores == pytest.approx(4)
    assert sum(seconds_of(small, one, 4).by_class.values()) == pytest.approx(1e-5)
    assert seconds_of(small, one, 4).cores == pytest.approx(1)


def test_a_type_without_a_rate_has_that_of_a_wider_one():
    assert kind().rate("product/bfloat16") == 1e9
    assert kind().rate("product/float64") == 5e8
