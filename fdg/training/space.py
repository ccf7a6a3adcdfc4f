"""What a search looks through: choices and ranges of hyperparameters, as texts and as values.

hidden=64,64/128,128/256      choices of a tuple, with / or |
num_steps=64,128              choices of anything else, with , or |
learning_rate=log:1e-4..1e-2  a range; of an integer, of its whole numbers
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdg.errors import FdgError, FdgWarning

_RANGE = re.compile(r"(log|lin):(\S+?)\.\.(\S+)")


@dataclasses.dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included, by equal factors (`log`) or differences.

    Raises:
      FdgError: (construction) no range.
    """

    name: str
    low: float
    high: float
    log: bool
    whole: bool = False  # integers

    def __post_init__(self):
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise FdgError(f"search: {self}: a range goes from the lower number to the higher one")
        if self.log and self.low <= 0:
            raise FdgError(f"search: {self}: a range in equal factors begins above zero: use lin:")
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise FdgError(f"search: {self}: {self.name} is an integer: give whole numbers")

    def suggested(self, trial: Any) -> Any:
        """A value from Optuna's trial."""
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def __str__(self) -> str:
        ends = (int(self.low), int(self.high)) if self.whole and self.low % 1 == self.high % 1 == 0 else (
            self.low, self.high)  # fmt: skip
        return f"{self.name}={'log' if self.log else 'lin'}:{ends[0]!r}..{ends[1]!r}"


@dataclasses.dataclass(frozen=True)
class Choices:
    """Some values, in no order.

    Raises:
      FdgError: (construction) none, or one twice.
    """

    name: str
    values: tuple[Any, ...]

    def __post_init__(self):
        if not self.values:
            raise FdgError(f"search: {self.name} has no values: give at least one")
        if len(set(self.labels)) != len(self.values):
            raise FdgError(f"search: {self} has a value twice")

    @property
    def labels(self) -> list[str]:
        """The values as they are written."""
        return [written(value) for value in self.values]

    def suggested(self, trial: Any) -> Any:
        """A value from Optuna's trial, which knows it by its label."""
        return self.values[self.labels.index(trial.suggest_categorical(self.name, self.labels))]

    def __str__(self) -> str:
        return f"{self.name}={'|'.join(self.labels)}"


Space = tuple[Range | Choices, ...]


def space_text(space: Space) -> str:
    """A space as `parse_space` reads it."""
    return " ".join(map(str, space))


def parse_space(text: str, read: Callable[[str], tuple[Callable[[str], Any], bool, bool]]) -> Space:
    """The space that a text spells.

    Args:
      text: words `NAME=VALUES`, a space between them.
      read: from a hyperparameter's name to a function that reads one value (its ValueError says what was
        expected), whether it is a tuple, and whether it is an integer.

    Raises:
      FdgError: a word that is none; says which, and what it should be.
    """
    found: list[Range | Choices] = []
    for word in text.split():
        raw_name, equals, values = word.partition("=")
        name = raw_name.replace("-", "_")
        if not (name and equals):
            raise FdgError(f"search: '{word:.60}' names no values: write NAME=VALUES (hidden=64,64/128,128)")
        value_of, is_tuple, whole = read(name)
        if match := _RANGE.fullmatch(values):
            found.append(_range(name, match, value_of, whole))
            continue
        parts = re.split(r"[|/]", values) if is_tuple else values.split("|" if "|" in values else ",")
        try:
            found.append(Choices(name, tuple(value_of(part) for part in parts)))
        except ValueError as error:
            if isinstance(error, FdgError):
                raise
            raise FdgError(f"search: {word:.60}: one of its values is not {error}") from None
    return checked(found)


def make_space(values: Mapping[str, Any], whole: Callable[[str], bool]) -> Space:
    """A space from values by name: a sequence of choices, or a range as a text.

    Args:
      values: by name.
      whole: whether a hyperparameter is an integer.

    >>> print(space_text(make_space({"hidden": [(64, 64), (128,)], "size": "lin:1..8"}, "size".__eq__)))
    hidden=64,64|128 size=lin:1..8
    """
    found: list[Range | Choices] = []
    for name, given in values.items():
        if isinstance(given, str):
            match = _RANGE.fullmatch(given)
            if match is None:
                raise FdgError(
                    f"search: {name}={given!r:.60}: give a list of choices, or a range, 'log:1e-4..1e-2'"
                )
            found.append(_range(name, match, float, whole(name)))
        elif isinstance(given, Sequence | set | frozenset | range):
            found.append(Choices(name, tuple(given)))
        else:
            raise FdgError(f"search: {name}={given!r:.60}: give a list of choices")
    return checked(found)


def checked(space: Sequence[Range | Choices]) -> Space:
    """The space, unless it is empty or names something twice.

    Raises:
      FdgError: it does.
    """
    if not space:
        raise FdgError("search: nothing to try: give values, such as hidden=64,64|128,128")
    names = [one.name for one in space]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise FdgError(f"search: {twice} is there twice: give all of its values at once")
    return tuple(space)


def check_choices(space: Space, trials: int) -> None:
    """Warns of a tuple that is the only choice of its name, which several numbers may have been meant as.

    Raises:
      FdgError: the space has one point, and there are several trials.
    """
    for one in space:
        if isinstance(one, Choices) and len(one.values) == 1:
            alone, is_tuple = len(space) == 1 and trials > 1, isinstance(one.values[0], tuple)
            fix = "write / between tuples, hidden=64,64/128" if is_tuple else "give several"
            flag = f"--{one.name.replace('_', '-')}"
            said = f"search: {one} is one choice: {fix}, or leave it to the algorithm ({flag})"
            if alone:
                raise FdgError(said)
            if is_tuple:
                warnings.warn(said, FdgWarning, stacklevel=3)


def written(value: Any) -> str:
    """A value as a command line has it.

    >>> written((64, 64)), written(None), written(True), written(0.5)
    ('64,64', 'none', 'true', '0.5')
    """
    if isinstance(value, tuple | list):
        return ",".join(map(written, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _range(name: str, match: re.Match, value_of: Callable[[str], Any], whole: bool) -> Range:
    try:
        ends = value_of(match[2]), value_of(match[3])
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            raise ValueError(f"{ends} are no numbers")
        low, high = map(float, ends)
    except (TypeError, ValueError, OverflowError):
        raise FdgError(f"search: {name}={match[0]}: a range goes from one number to another") from None
    return Range(name, low, high, match[1] == "log", whole)
