"""`Sampling` refuses values that are out of range, or of another type."""

import pytest

from algos.language import Sampling
from fdg.errors import FdgError
from tests.refusing import refuses


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: it must be 1 or more"),
        ({"temperature": -0.1}, "temperature=-0.1: it must be 0 or more"),
        ({"top_k": -1}, "top_k=-1: it must be zero"),
        ({"top_p": 0.0}, "top_p=0.0: it must be above 0, and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01: it must be above 0, and at most 1"),
    ],
)
def test_out_of_range(fields, message):
    with pytest.raises(FdgError, match=message):
        Sampling(**{"max_new_tokens": 1, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": "4"}, "Sampling(max_new_tokens='4'): give an integer: write 4"),
        ({"temperature": None}, "Sampling(temperature=None): give a number"),
        ({"top_k": 2.5}, "Sampling(top_k=2.5): give an integer"),
        ({"top_p": "0.9"}, "Sampling(top_p='0.9'): give a number: write 0.9"),
        ({"stop_tokens": 2}, "Sampling: stop_tokens=2: give a tuple of tokens"),
        ({"stop_tokens": None}, "Sampling: stop_tokens=None: give a tuple of tokens"),
        ({"stop_tokens": ("a",)}, "Sampling: stop_tokens=('a',): give a tuple of tokens, which are integers"),
        ({"stop_tokens": (1.5,)}, "Sampling: stop_tokens=(1.5,): give a tuple of tokens, which are integers"),
    ],
)
def test_values_of_another_type(fields, message):
    with refuses(message):
        Sampling(**{"max_new_tokens": 1, **fields})


def test_limits_are_allowed():
    Sampling(1, temperature=0, top_k=0, top_p=1.0)
