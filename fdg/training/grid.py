"""The values that a sweep tries, as they are written on a command line and in `config.json`.

learning_rate=1e-4,3e-4,1e-3  entropy_coefficient=0,0.01     values
learning_rate=log:1e-4..1e-2x8                               eight from 1e-4 to 1e-2, equal factors apart
discount=lin:0.9..0.99x4                                     four, equal differences apart
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fdg.errors import FdgError

Grid = tuple[tuple[str, tuple[float, ...]], ...]  # names, and the values of each

_RANGE = re.compile(r"(log|lin):([^.\s][^\s]*?)\.\.([^\s]+?)x(\d{1,6})")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_BARE_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(?:x\d*)?")
_LARGEST = float(np.finfo(np.float32).max)
_MOST = 10_000  # values of one name, and points of a grid


def parse_grid(text: str) -> Grid:
    """The grid that a text spells.

    Raises:
      FdgError: a word that is none; says which, and what it should be.

    >>> parse_grid("learning_rate=1e-3,3e-3 entropy_coefficient=0")
    (('learning_rate', (0.001, 0.003)), ('entropy_coefficient', (0.0,)))
    >>> [f"{value:g}" for value in parse_grid("learning_rate=log:1e-4..1e-2x3")[0][1]]
    ['0.0001', '0.001', '0.01']
    """
    return make_grid(_pairs(text.split()))


def make_grid(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Grid:
    """A grid from values by name: numbers, a range as a text, or one number.

    Raises:
      FdgError: there are no values, one is no number, or one is there twice.

    >>> make_grid({"learning_rate": [1e-3, 3e-3], "discount": "lin:0.5..1x2"})
    (('learning_rate', (0.001, 0.003)), ('discount', (0.5, 1.0)))
    """
    pairs = list(values.items() if isinstance(values, Mapping) else values)
    if not pairs:
        raise FdgError("sweep: nothing to try: give values, such as learning_rate=1e-4,3e-4,1e-3")
    grid: dict[str, tuple[float, ...]] = {}
    for raw_name, given in pairs:
        name = str(raw_name).replace("-", "_")
        if name in grid:
            raise FdgError(f"sweep: {name} is there twice: give all of its values at once")
        grid[name] = _values(name, given)
    if math.prod(map(len, grid.values())) > _MOST:
        raise FdgError(f"sweep: more than {_MOST:,} points: give fewer values")
    return tuple(grid.items())


def in_programs_of_their_own(*names: str) -> str:
    """How to try values of what no sweep is of."""
    choices = ", ".join(f"{name!r}: [...]" for name in names)
    options = " ".join(f"{name}=..." for name in names)
    return (
        f"try its values in programs of their own: fdg.search(algorithm, {{{choices}}})"
        f" (--optuna TRIALS --search {options})"
    )


def grid_text(grid: Grid) -> str:
    """A grid as it is spelled, which `parse_grid` reads.

    >>> grid_text((("learning_rate", (0.001, 0.003)), ("discount", (1.0,))))
    'learning_rate=0.001,0.003 discount=1.0'
    """
    return " ".join(f"{name}={','.join(map(repr, values))}" for name, values in grid)


def points_of(grid: Grid) -> list[dict[str, float]]:
    """Every combination of a grid's values, the last name's changing fastest.

    >>> points_of((("learning_rate", (0.1, 0.2)), ("discount", (1.0,))))
    [{'learning_rate': 0.1, 'discount': 1.0}, {'learning_rate': 0.2, 'discount': 1.0}]
    """
    names = [name for name, _ in grid]
    return [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in grid))
    ]


def spelled(point: Mapping[str, float]) -> str:
    """The values of one point, for reading.

    >>> spelled({"learning_rate": 0.001, "discount": 0.99})
    'learning_rate=0.001, discount=0.99'
    """
    return ", ".join(f"{name}={value:g}" for name, value in point.items())


def _pairs(words: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for word in words:
        name, equals, values = word.partition("=")
        if not (name and equals):
            raise FdgError(
                f"sweep: '{word:.60}' names no values: write NAME=VALUE,VALUE (learning_rate=1e-4,3e-4)"
            )
        pairs.append((name, values))
    return pairs


def _values(name: str, given: Any) -> tuple[float, ...]:
    if isinstance(given, str):
        found = _range(name, given) if ":" in given else [_float(name, word) for word in given.split(",")]
    elif isinstance(given, bool) or not isinstance(given, Iterable | int | float | np.number):
        raise FdgError(f"sweep: {name}={given!r:.60}: give numbers, or a range such as 'log:1e-4..1e-2x8'")
    else:
        items = list(given) if isinstance(given, Iterable) else [given]
        found = [_float(name, item) for item in items]
    if not found:
        raise FdgError(f"sweep: {name} has no values: give at least one")
    single = [float(np.float32(value)) for value in found]
    twice = next((value for i, value in enumerate(found) if single[i] in single[:i]), None)
    if twice is not None:
        raise FdgError(f"sweep: {name} has {twice!r} twice (as float32): give each value once")
    return tuple(found)


def _float(name: str, item: Any) -> float:
    try:
        value = math.nan if isinstance(item, bool) else float(item)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value) or _LARGEST < abs(value) < math.inf:
        if match := _BARE_RANGE.fullmatch(str(item).strip()):
            low, high = match.groups()
            kind = "log" if float(low) > 0 < float(high) else "lin"
            raise FdgError(f"sweep: {name}: {item!r:.60} is a range: write {name}={kind}:{low}..{high}x8")
        words = f": {in_programs_of_their_own(name)}"
        raise FdgError(
            f"sweep: {name}: {item!r:.60} is not a number that float32 has"
            f"{words if str(item).isalnum() and math.isnan(value) else ''}"
        )
    return value


def _range(name: str, text: str) -> list[float]:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise FdgError(
            f"sweep: {name}={text!r:.60}: a range is written log:LOW..HIGHxCOUNT or lin:LOW..HIGHxCOUNT,"
            f" such as log:1e-4..1e-2x8"
        )
    kind, count = match[1], int(match[4])
    low, high = _float(name, match[2]), _float(name, match[3])
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or not 2 <= count <= _MOST:
        raise FdgError(
            f"sweep: {name}={text}: a range goes from the lower number to the higher one, in 2 values or more"
        )
    if kind == "log" and low <= 0:
        raise FdgError(f"sweep: {name}={text}: a range in equal factors begins above zero: use lin:")
    space = np.geomspace if kind == "log" else np.linspace
    return [float(f"{value:.8g}") for value in space(low, high, count)]
