"""Annotations of settings: values of theirs from words, from JSON and to JSON, and whether a value is one."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fdg.errors import nearest


def reader(kind: Any) -> Callable[[str], Any]:
    """A function from a word to a value of the annotation `kind`; its ValueError says what was expected.

    >>> reader(int)("5e5"), reader(float | None)("none"), reader(tuple[int, ...])("64,64")
    (500000, None, (64, 64))
    """
    if kind is type(None):
        return _read_none
    if kind in _READERS:
        return _READERS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        choices = {str(choice): choice for choice in arguments}
        return lambda word: _read_choice(word, choices)
    if origin in (typing.Union, types.UnionType):
        # None first: "none" is also a string.
        readers = [reader(one) for one in sorted(arguments, key=lambda one: one is not type(None))]
        return lambda word: _read_first(word, readers)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        one, around = reader(arguments[0]), "" if arguments[0] is str else "[]()"  # as Python writes them
        return lambda word: tuple(
            one(part.strip()) for part in word.strip(around or None).split(",") if part.strip()
        )
    raise TypeError(f"no flag can have a value of type {kind}")


def _read_int(word: str) -> int:
    try:
        number: float = int(word)
    except ValueError:
        try:
            number = float(word)
        except ValueError:
            number = math.nan
    if isinstance(number, float) and not number.is_integer():
        raise ValueError("an integer")
    if abs(number) >= _TOO_LARGE:
        raise ValueError(f"an integer below {_TOO_LARGE:.0e}")
    return int(number)


_TOO_LARGE = 10**18  # what JAX counts with has 63 bits


def _read_float(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError("a number")
    return number


def _read_bool(word: str) -> bool:
    if word.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError("true or false")
    return word.lower() in ("true", "yes", "1")


def _read_none(word: str) -> None:
    if word.lower() != "none":
        raise ValueError("none")


def _read_choice(word: str, choices: Mapping[str, Any]) -> Any:
    if word not in choices:
        close = nearest(word, choices, 1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise ValueError(f"one of {', '.join(choices)}{hint}")
    return choices[word]


def _read_first(word: str, readers: Sequence[Callable[[str], Any]]) -> Any:
    expected = []
    for read in readers:
        try:
            return read(word)
        except ValueError as error:
            expected.append(str(error))
    raise ValueError(" or ".join(reversed(expected)))


_READERS: dict[Any, Callable[[str], Any]] = {int: _read_int, float: _read_float, bool: _read_bool, str: str}


def is_tuple(kind: Any) -> bool:
    """Whether values of an annotation are, or may be, tuples."""
    return typing.get_origin(kind) is tuple or any(
        typing.get_origin(one) is tuple for one in typing.get_args(kind)
    )


def to_json(value: Any) -> Any:
    """A value as `config.json` has it; numbers that JSON lacks (infinity) become words."""
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: Any, value: Any) -> Any:
    """What `to_json` made one of.

    Raises:
      ValueError: a value that `to_json` would not have made; says what was expected.
    """
    expected = _expected(kind)
    takes_only_words = (set(typing.get_args(kind)) or {kind}) <= {str, type(None)}
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        is_word = isinstance(part, str)
        infinite = is_word and part in ("inf", "-inf") and mentions(kind, float)
        if isinstance(part, list | dict) or (is_word and not (infinite or _takes_words(kind))):
            raise ValueError(expected)
        if not is_word and part is not None and takes_only_words:
            raise ValueError(expected)
    if isinstance(value, list) and not is_tuple(kind):
        raise ValueError(expected)
    if isinstance(value, str) and mentions(kind, str):
        return value
    words = ["none" if p is None else p if isinstance(p, str) else str(p).lower() for p in parts]
    try:
        if isinstance(value, list) and not value:
            return ()
        return reader(kind)(",".join(words))
    except ValueError:
        raise ValueError(expected) from None


def _takes_words(kind: Any) -> bool:
    origins = [typing.get_origin(one) for one in (kind, *typing.get_args(kind))]
    return mentions(kind, str) or Literal in origins


def _expected(kind: Any) -> str:
    """What the reader of an annotation says of a word that it cannot take."""
    try:
        reader(kind)("\0")
    except ValueError as error:
        return str(error)
    return "a string"


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def mentions(kind: Any, plain: type) -> bool:
    """Whether an annotation is a plain type, or a union with it."""
    return kind is plain or plain in typing.get_args(kind)


def is_writable(kind: Any) -> bool:
    """Whether a word can say a value of an annotation."""
    try:
        reader(kind)
    except TypeError:
        return False
    return True


def dataclass_fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass, or of an instance of one; none of another class."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
