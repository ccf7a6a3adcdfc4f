"""Formatting of quantities, tables, names and device ranges."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

import fdg
import policies
from fdg.showing import words
from tests.showing.plans import Scattered, plan, walker


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (12_345_678, "12.3 MB"),
     (999_499, "999 kB"), (5e9, "5 GB"), (7.25e12, "7.25 TB"), (3e15, "3 PB"), (4e18, "4e+03 PB")],
)  # fmt: skip
def test_quantities(number, expected):
    assert words.quantity(number, "B") == expected


def test_table_alignment():
    rows = [("act", "6", "x"), ("environment", "128", "y")]
    assert words.table(("name", "calls", "z"), rows, numeric=[1]) == [
        "  name         calls  z",
        "  act              6  x",
        "  environment    128  y",
    ]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abcdef", 6, "abcdef"), ("abcdefg", 6, "abc..."), ("abcdefgh", 7, "abcd..."), ("", 3, "")],
)
def test_clip(text, width, expected):
    assert words.clip(text, width) == expected


@pytest.mark.parametrize(
    ("names", "width", "expected"),
    [
        (["act", "step", "judge", "learn"], 22, "act, step, +2 more"),
        (["act", "step", "judge", "learn"], 23, "act, step, judge, learn"),
        (["act", "step", "judge", "learn"], 15, "act, +3 more"),
        (["environment", "step"], 9, "env... +1"),
        (["environment"], 8, "envir..."),
        ([], 5, ""),
    ],
)
def test_names_within_width(names, width, expected):
    assert words.listed_within(names, width) == expected and len(expected) <= width


def test_names_joined_by_and():
    assert words.joined_by_and(["act"]) == "act"
    assert words.joined_by_and(["act", "step"]) == "act and step"
    assert words.joined_by_and(["act", "step", "learn"]) == "act, step and learn"
    assert words.joined_by_and(["a" * 17, "b" * 18]) == "a" * 17 + " and " + "b" * 18  # within 40 characters
    assert words.joined_by_and(["a" * 18, "b" * 18]) == "a" * 18 + ", " + "b" * 18
    assert words.joined_by_and(["act", "step", "learn"], 10) == "act +2"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([0], "0"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 4, 6, 8, 10], "0, ..., 10 (6)"),
     ([0, 2, 4, 6, 8, 9], "0, 2, 4, 6, 8-9"), ([*range(0, 20, 2), 21, 22], "0, ..., 21-22 (12)")],
)  # fmt: skip
def test_devices_as_ranges(devices, expected):
    assert words.device_ranges(devices) == expected


def test_plan_repr_and_str():
    first, second = plan(policies.GPUOnly(), 4), plan(Scattered(), 64)
    assert repr(first).endswith("1 program>") and repr(second).endswith(f"{len(second.programs)} programs>")
    assert len(second.programs) > 1 and walker().fragments[0].name in str(first)


def test_quotes_are_escaped_in_label():
    @dataclasses.dataclass(frozen=True)
    class Named(Scattered):
        word: str = 'all "of" them'

    label = ET.fromstring(plan(Named(), 64)._repr_svg_()).attrib["aria-label"]
    assert "word='all \"of\" them'" in label and isinstance(plan(Named(), 64), fdg.Plan)
