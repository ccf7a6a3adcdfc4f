"""Hyperparameter values to try, as text and as Python values: the grid of a sweep, the space of a search.

Grid:

    learning_rate=1e-4,3e-4,1e-3          these values
    learning_rate=log:1e-4..1e-2x8        eight values from 1e-4 to 1e-2, spaced logarithmically
    discount=lin:0.9..0.99x4              four values, spaced linearly

Space:

    hidden=64,64/128,128/256              choices that are tuples, separated by / or |
    num_steps=64,128                      other choices, separated by , or |
    learning_rate=log:1e-4..1e-2          a range, of floats or of integers
"""

import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fdg.arguments import quoted
from fdg.errors import FdgError, FdgWarning

Grid = tuple[tuple[str, tuple[float, ...]], ...]  # pairs (name, values)

# A range of a grid; a number; a range that lacks `log:` or `lin:`, for the error message.
_GRID_RANGE = re.compile(r"(log|lin):([^.\s][^\s]*?)\.\.([^\s]+?)x(\d{1,6})")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_BARE_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(?:x\d*)?")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_VALUES = 10_000  # maximum values per name, and maximum points of a grid


def parse_grid(text: str) -> Grid:
    """Parses a grid.

    >>> parse_grid("learning_rate=1e-3,3e-3 entropy_coefficient=0")
    (('learning_rate', (0.001, 0.003)), ('entropy_coefficient', (0.0,)))
    >>> [f"{value:g}" for value in parse_grid("learning_rate=log:1e-4..1e-2x3")[0][1]]
    ['0.0001', '0.001', '0.01']
    """
    return make_grid(_split_words(text, "sweep", "NAME=VALUE,VALUE (learning_rate=1e-4,3e-4)"))


def make_grid(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Grid:
    """Makes a grid from values by name: numbers, a range as text, or one number.

    >>> make_grid({"learning_rate": [1e-3, 3e-3], "discount": "lin:0.5..1x2"})
    (('learning_rate', (0.001, 0.003)), ('discount', (0.5, 1.0)))
    """
    try:
        pairs = [(name, value) for name, value in (values.items() if isinstance(values, Mapping) else values)]
    except (TypeError, ValueError):
        raise FdgError(f"sweep: {quoted(values)}: write {{'learning_rate': [1e-4, 3e-4]}}") from None
    names = [str(name).replace("-", "_") for name, _ in pairs]
    _check_names("sweep", names, "learning_rate=1e-4,3e-4,1e-3")
    grid = tuple((name, _parse_values(name, value)) for name, (_, value) in zip(names, pairs, strict=True))
    if math.prod(len(values) for _, values in grid) > _MAX_VALUES:
        raise FdgError(f"sweep: more than {_MAX_VALUES:,} points: give fewer values")
    return grid


def use_search_instead(*names: str) -> str:
    """The fix for hyperparameters that cannot be swept: `fdg.search`."""
    choices = ", ".join(f"{name!r}: [...]" for name in names)
    options = " ".join(f"{name}=..." for name in names)
    return (
        f"try its values in separate programs: fdg.search(algorithm, {{{choices}}})"
        f" (--optuna TRIALS --search {options})"
    )


def grid_text(grid: Grid) -> str:
    """A grid as text, the inverse of `parse_grid`.

    >>> grid_text((("learning_rate", (0.001, 0.003)), ("discount", (1.0,))))
    'learning_rate=0.001,0.003 discount=1.0'
    """
    return " ".join(f"{name}={','.join(map(repr, values))}" for name, values in grid)


def points_of(grid: Grid) -> list[dict[str, float]]:
    """Every combination of a grid's values; the last name varies fastest.

    >>> points_of((("learning_rate", (0.1, 0.2)), ("discount", (1.0,))))
    [{'learning_rate': 0.1, 'discount': 1.0}, {'learning_rate': 0.2, 'discount': 1.0}]
    """
    names = [name for name, _ in grid]
    return [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in grid))
    ]


def point_text(point: Mapping[str, float]) -> str:
    """A point as text.

    >>> point_text({"learning_rate": 0.001, "discount": 0.99})
    'learning_rate=0.001, discount=0.99'
    """
    return ", ".join(f"{name}={value:g}" for name, value in point.items())


def _split_words(text: str, command: str, example: str) -> list[tuple[str, str]]:
    """Splits a text into words `NAME=VALUES`: pairs (name, values). Errors name the `command`."""
    pairs = []
    for word in text.split():
        name, equals, values = word.partition("=")
        if not (name and equals):
            raise FdgError(f"{command}: '{word:.60}' has no values: write {example}")
        pairs.append((name, values))
    return pairs


def _check_names(command: str, names: Sequence[str], example: str) -> None:
    """Checks that names are not empty and not repeated."""
    if not names:
        raise FdgError(f"{command}: there is nothing to try: give values, such as {example}")
    duplicate = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if duplicate is not None:
        raise FdgError(f"{command}: {duplicate} is given twice: give all its values at once")


def _check_ends(label: str, low: float, high: float, log: bool, suffix: str = "") -> None:
    """Checks that the ends of a range ascend (the error ends with `suffix`), and are positive if `log`."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise FdgError(f"{label}: a range goes from the lower to the higher number{suffix}")
    if log and low <= 0:
        raise FdgError(f"{label}: a logarithmic range begins above 0: use lin:")


def _parse_values(name: str, argument: Any) -> tuple[float, ...]:
    if isinstance(argument, str):
        words = argument.split(",")
        is_range = ":" in argument
        values = _parse_grid_range(name, argument) if is_range else [_parse_float(name, w) for w in words]
    elif isinstance(argument, bool) or not isinstance(argument, Iterable | int | float | np.number):
        raise FdgError(
            f"sweep: {name}={quoted(argument)}: give numbers, or a range such as 'log:1e-4..1e-2x8'"
        )
    else:
        items = list(argument) if isinstance(argument, Iterable) else [argument]
        values = [_parse_float(name, item) for item in items]
    if not values:
        raise FdgError(f"sweep: {name} has no values: give at least one")
    rounded = [float(np.float32(value)) for value in values]
    duplicate = next((value for i, value in enumerate(values) if rounded[i] in rounded[:i]), None)
    if duplicate is not None:
        raise FdgError(f"sweep: {name} has {duplicate!r} twice (as float32): give each value once")
    return tuple(values)


def _parse_float(name: str, item: Any) -> float:
    try:
        value = math.nan if isinstance(item, bool) else float(item)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value) or _MAX_FLOAT32 < abs(value) < math.inf:
        if match := _BARE_RANGE.fullmatch(str(item).strip()):
            low, high = match.groups()
            kind = "log" if float(low) > 0 < float(high) else "lin"
            raise FdgError(f"sweep: {name}: {quoted(item)} is a range: write {name}={kind}:{low}..{high}x8")
        fix = f": {use_search_instead(name)}"
        raise FdgError(
            f"sweep: {name}: {quoted(item)} is not a number that float32 can represent"
            f"{fix if str(item).isalnum() and math.isnan(value) else ''}"
        )
    return value


def _parse_grid_range(name: str, text: str) -> list[float]:
    match = _GRID_RANGE.fullmatch(text.strip())
    if match is None:
        raise FdgError(
            f"sweep: {name}={quoted(text)}: a range is written log:LOW..HIGHxCOUNT or lin:LOW..HIGHxCOUNT,"
            f" such as log:1e-4..1e-2x8"
        )
    kind, count = match[1], int(match[4])
    low, high = _parse_float(name, match[2]), _parse_float(name, match[3])
    high = high if 2 <= count <= _MAX_VALUES else math.nan  # `_check_ends` refuses nan
    _check_ends(f"sweep: {name}={text}", low, high, kind == "log", ", in 2 values or more")
    spaced = np.geomspace if kind == "log" else np.linspace
    return [float(f"{value:.8g}") for value in spaced(low, high, count)]


_RANGE = re.compile(r"(log|lin):(\S+?)\.\.(\S+)")  # a range of a space


@dataclasses.dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, inclusive, on a logarithmic (`log`) or linear scale."""

    name: str
    low: float
    high: float
    log: bool
    integer: bool = False  # whether all values are integers

    def __post_init__(self):
        _check_ends(f"search: {self}", self.low, self.high, self.log)
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise FdgError(f"search: {self}: {self.name} is an integer: give whole numbers")

    def suggest(self, trial: Any) -> Any:
        """The value that Optuna suggests for a trial."""
        if self.integer:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    @property
    def count(self) -> float:
        """The number of values; infinite for floats."""
        return self.high - self.low + 1 if self.integer else math.inf

    def __str__(self) -> str:
        ends = (int(self.low), int(self.high)) if self.integer and self.low % 1 == self.high % 1 == 0 else (
            self.low, self.high)  # fmt: skip
        return f"{self.name}={'log' if self.log else 'lin'}:{ends[0]!r}..{ends[1]!r}"


@dataclasses.dataclass(frozen=True)
class Choices:
    """A set of values."""

    name: str
    values: tuple[Any, ...]

    def __post_init__(self):
        if not self.values:
            raise FdgError(f"search: {self.name} has no values: give at least one")
        if len(set(self.labels)) != len(self.values):
            raise FdgError(f"search: {self} has a value twice: give each once")

    @property
    def count(self) -> float:
        """The number of values."""
        return len(self.values)

    @property
    def labels(self) -> list[str]:
        """The values as text."""
        return [value_text(value) for value in self.values]

    def suggest(self, trial: Any) -> Any:
        """The value that Optuna suggests for a trial; Optuna stores its label."""
        return self.values[self.labels.index(trial.suggest_categorical(self.name, self.labels))]

    def __str__(self) -> str:
        return f"{self.name}={'|'.join(self.labels)}"


Space = tuple[Range | Choices, ...]


def space_text(space: Space) -> str:
    """A space as text, the inverse of `parse_space`."""
    return " ".join(map(str, space))


def parse_space(text: str, read: Callable[[str], tuple[Callable[[str], Any], bool, bool]]) -> Space:
    """Parses a search space.

    `read` maps a name to three values: a function that parses one value (its ValueError names the expected
    type), whether values are tuples, and whether they are integers.
    """
    parameters: list[Range | Choices] = []
    for raw_name, values in _split_words(text, "search", "NAME=VALUES (hidden=64,64/128,128)"):
        name = raw_name.replace("-", "_")
        parse_value, is_tuple, is_integer = read(name)
        if match := _RANGE.fullmatch(values):
            parameters.append(_parse_range(name, match, parse_value, is_integer))
            continue
        parts = re.split(r"[|/]", values) if is_tuple else values.split("|" if "|" in values else ",")
        try:
            parameters.append(Choices(name, tuple(parse_value(part) for part in parts)))
        except ValueError as error:
            if isinstance(error, FdgError):
                raise
            example = "64,64/128" if is_tuple else "8,16"
            raise FdgError(
                f"search: {name}={values:.60}: one of its values is not {error}: write {name}={example}"
            ) from None
    return check_space(parameters)


def make_space(values: Mapping[str, Any], is_integer: Callable[[str], bool]) -> Space:
    """Makes a space from values by name: a sequence of choices, or a range as text.

    >>> print(space_text(make_space({"hidden": [(64, 64), (128,)], "size": "lin:1..8"}, "size".__eq__)))
    hidden=64,64|128 size=lin:1..8
    """
    parameters: list[Range | Choices] = []
    for name, choices in values.items():
        if isinstance(choices, str):
            match = _RANGE.fullmatch(choices)
            if match is None:
                raise FdgError(
                    f"search: {name}={quoted(choices)}: give a list of choices, or a range, 'log:1e-4..1e-2'"
                )
            parameters.append(_parse_range(name, match, float, is_integer(name)))
        elif isinstance(choices, Sequence | set | frozenset | range):
            parameters.append(Choices(name, tuple(choices)))
        else:
            raise FdgError(f"search: {name}={quoted(choices)}: give a list of choices")
    return check_space(parameters)


def check_space(space: Sequence[Range | Choices]) -> Space:
    """The space as a tuple, after a check that it is not empty and has no name twice."""
    _check_names("search", [parameter.name for parameter in space], "hidden=64,64|128,128")
    return tuple(space)


def check_choices(space: Space, trials: int) -> None:
    """Warns about a name with a tuple as its only choice; `FdgError` if the space has no other choice."""
    for parameter in space:
        if isinstance(parameter, Choices) and len(parameter.values) == 1:
            is_only, is_tuple = len(space) == 1 and trials > 1, isinstance(parameter.values[0], tuple)
            fix = "write / between tuples, hidden=64,64/128" if is_tuple else "give several"
            flag = f"--{parameter.name.replace('_', '-')}"
            message = f"search: {parameter} is one choice: {fix}, or leave it to the algorithm ({flag})"
            if is_only:
                raise FdgError(message)
            if is_tuple:
                warnings.warn(message, FdgWarning, stacklevel=3)


def value_text(value: Any) -> str:
    """A value as text for the command line.

    >>> value_text((64, 64)), value_text(None), value_text(True), value_text(0.5)
    ('64,64', 'none', 'true', '0.5')
    """
    if isinstance(value, tuple | list):
        return ",".join(map(value_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def flags_text(values: Mapping[str, Any]) -> str:
    """Values by name as flags of a command line."""
    return " ".join(f"--{name.replace('_', '-')} {value_text(value)}" for name, value in values.items())


def _parse_range(name: str, match: re.Match, parse_value: Callable[[str], Any], is_integer: bool) -> Range:
    try:
        ends = parse_value(match[2]), parse_value(match[3])
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            raise ValueError(f"{ends} are not numbers")
        low, high = map(float, ends)
    except (TypeError, ValueError, OverflowError):
        raise FdgError(f"search: {name}={match[0]}: a range needs two numbers") from None
    return Range(name, low, high, match[1] == "log", is_integer)
