"""Checks values against type annotations, describes annotations, and reads and writes text and JSON."""

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fdg.errors import FdgError, listed, nearest, place_of

TOO_LARGE = 10**18  # integers must be below this, since JAX's counters have 63 bits

Leaf = Callable[[Any, Any], bool | None]  # (value, annotation) -> whether it matches; None: undecided


def matches(value: Any, kind: Any, leaf: Leaf = lambda value, kind: None) -> bool:
    """Whether a value matches a type annotation.

    A number may be a NumPy or JAX scalar; `True` and NaN do not count as numbers. A `runtime_checkable`
    protocol matches values that have its members; other protocols, type variables and `Any` match every
    value. `leaf` is called first for each annotation, also a nested one; if it returns a bool, that decides.

    >>> matches(3, int | None), matches((3, 4.5), tuple[int, ...]), matches("stop", Literal["stop", "warn"])
    (True, False, True)
    """
    if (decided := leaf(value, kind)) is not None:
        return decided
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, alternative, leaf) for alternative in arguments)
    if origin is Literal:
        return isinstance(value, str | int | None) and value in arguments
    cls = origin or kind
    if cls in _TESTS:
        return _TESTS[cls](value)
    if getattr(cls, "_is_runtime_protocol", False):
        value_type = type(value)  # properties are not evaluated, since they may import a library
        names = _members(cls)
        return value_type is not type and all(hasattr(value_type, n) or hasattr(value, n) for n in names)
    if not isinstance(cls, type) or getattr(cls, "_is_protocol", False):
        return True
    if cls in (Sequence, list, tuple, Iterable):
        is_sequence = isinstance(value, cls) and not isinstance(value, str | bytes)
        if cls is tuple and arguments and arguments[-1] is not ...:
            pairs = zip(value, arguments, strict=False) if is_sequence else ()
            has_length = is_sequence and len(value) == len(arguments)
            return has_length and all(matches(*pair, leaf) for pair in pairs)
        item_kind = arguments[0] if arguments else Any
        return is_sequence and (cls is Iterable or all(matches(item, item_kind, leaf) for item in value))
    return isinstance(value, cls)


def _members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def describe_alternatives(kind: Any) -> list[str]:
    """Describes each alternative of an annotation in English; None comes last.

    A class is described by its method `described`, or else by its name.

    >>> describe_alternatives(tuple[int, ...] | None)
    ['a tuple of integers', 'None']
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = sorted(arguments, key=lambda alternative: alternative is types.NoneType)
        return [text for alternative in kinds for text in describe_alternatives(alternative)]
    if origin is Literal:
        return [repr(alternative) for alternative in arguments]
    cls = origin or kind
    if cls in _DESCRIPTIONS:
        return [_DESCRIPTIONS[cls]]
    if cls is tuple and arguments and arguments[-1] is not ...:
        return [f"a tuple ({', '.join(describe_alternatives(alternative)[0] for alternative in arguments)})"]
    if cls in (Sequence, list, tuple, Iterable):
        has_item_kind = arguments[:1] not in ((), (Any,))
        item_name = describe_alternatives(arguments[0])[0].partition(" ")[2] if has_item_kind else "values"
        items = item_name if item_name.endswith("s") else f"{item_name}s"
        return [f"a {'sequence' if cls in (Sequence, Iterable) else cls.__name__} of {items}"]
    if hasattr(cls, "described"):
        return [cls.described()]
    name = getattr(cls, "__name__", str(cls)).rpartition(".")[2]
    members = f" with {listed(_members(cls), 'and')}" if getattr(cls, "_is_runtime_protocol", False) else ""
    return [f"a{'n' if name[0] in 'AEIOU' else ''} {name}{members}"]


def reader(kind: Any) -> Callable[[str], Any]:
    """Returns a function that parses a word to a value of `kind`; its ValueError names the expected values.

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
        readers = [reader(kind) for kind in sorted(arguments, key=lambda kind: kind is not type(None))]
        return lambda word: _read_first(word, readers)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        read, brackets = reader(arguments[0]), "" if arguments[0] is str else "[]()"  # as in Python's repr
        return lambda word: tuple(
            read(part.strip()) for part in word.strip(brackets or None).split(",") if part.strip()
        )
    raise TypeError(f"no flag can have a value of type {kind}")


def parse_quantity(word: str) -> float | None:
    """Parses a number with thousands separators, a suffix or a unit; None if the word is not a number.

    >>> [parse_quantity(text) for text in ("500k", "1,000,000", "64 GB", "10%", "30s", "400 Gbit/s")]
    [500000.0, 1000000.0, 64000000000.0, 0.1, 30.0, 50000000000.0]
    >>> parse_quantity("many"), parse_quantity("1,2")
    (None, None)
    """
    match = _QUANTITY.fullmatch(word.strip())
    if match is None:
        return None
    digits, unit = re.sub(r"[ ,_'](?=\d{3}(?!\d))", "", match[1]), match[2]
    scale = _SCALES.get(unit.lower())
    if scale is None:
        match = _PREFIXED_UNIT.fullmatch(unit)
        if match is None:
            return None
        power = "kmgtp".index(match[1].lower()) + 1 if match[1] else 0
        scale = (1024 if match[2] else 1000) ** power / (8 if match[3] in _BITS else 1)
    try:
        return float(digits) * scale
    except ValueError:
        return None


# `_QUANTITY`: a number and its unit. `_PREFIXED_UNIT`: a prefix (k, M, Gi, ...) and a unit (B, bit, FLOPs).
_QUANTITY = re.compile(r"([-+]?[\d.][\d., _']*(?:[eE][-+]?\d+)?)\s*([a-zA-Zµ%/]*)")
_PREFIXED_UNIT = re.compile(r"([kKmMgGtTpP]?)(i?)(B|b|[bB]ytes?|[bB]its?|[bB]ps|FLOPs?|FLOPS|)(?:/s)?")
_BITS = ("b", "bit", "bits", "Bit", "Bits", "bps", "Bps")  # the units of bits
_SCALES = {  # unit or suffix in lower case -> factor
    **dict.fromkeys(("s", "sec", "seconds"), 1.0),
    **dict.fromkeys(("us", "µs"), 1e-6),
    **dict.fromkeys(("million", "mio"), 1e6),
    **dict.fromkeys(("b", "bn", "billion"), 1e9),
    **dict.fromkeys(("min", "minutes"), 60.0),
    **dict.fromkeys(("h", "hours"), 3600.0),
    "%": 0.01,
    "ms": 1e-3,
    "ns": 1e-9,
}
# Units of time at the end of parameter names; values in other units of time are converted to them.
_TIME_UNITS = ("ms", "us", "ns", "seconds", "minutes", "hours")


def number_fix(word: Any, kind: Any, name: str = "") -> str:
    """How a message ends if `word` means a number of annotation `kind`: the number to write; otherwise "".

    `name` is the parameter's name, which may end in a unit, such as `latency_ms`.

    >>> number_fix("500k", int), number_fix("10%", float | None), number_fix("10%", int), number_fix("n", int)
    (': write 500_000', ': write 0.1', '', '')
    >>> number_fix("5ms", float, "latency_ms"), number_fix("5us", float, "latency_ms")
    (': write 5', ': write 0.005')
    >>> number_fix(np.array([0.1]), float)
    ': write 0.1'
    >>> number_fix("2 uJ", float, "energy_uj"), number_fix("2 mJ", float, "energy_uj")
    (': write 2', ": write the number alone, without 'mJ'")
    """
    if hasattr(word, "item") and tuple(getattr(word, "shape", ())) in ((), (1,)):
        try:
            number = word.item()
        except Exception:  # a key of JAX, an array of a traced function
            return ""
        return f": write {number:.6g}" if isinstance(number, int | float) and matches(number, kind) else ""
    match = _QUANTITY.fullmatch(word.strip()) if isinstance(word, str) else None
    if match is None or not (mentions(kind, float) or mentions(kind, int)):
        return ""
    unit, suffix = match[2], name.rpartition("_")[2]
    number = parse_quantity(match[1]) if suffix and unit.lower() == suffix else parse_quantity(word)
    if number is None:
        return f": write the number alone, without '{unit}'" if unit and mentions(kind, float) else ""
    if suffix in _TIME_UNITS and unit.lower() != suffix and unit.lower() in _SCALES:
        number = float(f"{number / _SCALES[suffix]:.12g}")
    if not (mentions(kind, float) or number.is_integer()):
        return ""
    if not number.is_integer() or abs(number) < 1000:
        return f": write {number:g}"
    digits, _, power = f"{number:e}".partition("e")
    scientific = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    # In Python and TOML, 5e5 is no integer.
    also = f" or {scientific}" if mentions(kind, float) and float(scientific) == number else ""
    return f": write {int(number):_}{also}"


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
    if abs(number) >= TOO_LARGE:
        raise ValueError(f"an integer below {TOO_LARGE:.0e}")
    return int(number)


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
    """Whether an annotation is a tuple, or a union with one."""
    return any(typing.get_origin(part) is tuple for part in (kind, *typing.get_args(kind)))


def as_python(value: Any) -> Any:
    """A NumPy or JAX scalar as a Python value, also in tuples and lists; any other value unchanged.

    >>> as_python((np.int64(64), [np.float32(0.5)])), as_python(np.ones(2))
    ((64, [0.5]), array([1., 1.]))
    """
    if type(value) in (tuple, list):
        return type(value)(map(as_python, value))
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
        with contextlib.suppress(Exception):  # a key of JAX, an array of a traced function
            return value.item()
    return value


def as_int(value: Any) -> Any:
    """An integer of NumPy as Python's, which JSON takes; any other value unchanged."""
    return int(value) if isinstance(value, np.integer) else value


def make_fields_python(instance: Any) -> None:
    """Applies `as_python` to the fields of a frozen dataclass, so that `config.json` can store them."""
    for field in dataclasses.fields(instance):
        if field.init:
            object.__setattr__(instance, field.name, as_python(getattr(instance, field.name)))


def is_plain(value: Any) -> bool:
    """Whether `to_json` can store a value: None, a bool, a number, a string, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def to_json(value: Any) -> Any:
    """A value as `config.json` stores it; infinity and NaN, which JSON lacks, become strings."""
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: Any, value: Any) -> Any:
    """The inverse of `to_json`, for a value of an annotation (NaN matches none).

    Raises:
      ValueError: the value does not match the annotation; the message has the expected values.

    >>> from_json(tuple[int, ...], [64, 64]), from_json(float | None, "inf"), from_json(float, 1)
    ((64, 64), inf, 1.0)
    """
    plain_types = {kind, *typing.get_args(kind)}.union(*map(typing.get_args, typing.get_args(kind)))

    def read(item: Any) -> Any:
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        if float in plain_types and int not in plain_types and (is_number or item in ("inf", "-inf")):
            return float(item)
        is_whole = is_number and int in plain_types and float not in plain_types and float(item).is_integer()
        return int(item) if is_whole else item

    converted = tuple(map(read, value)) if isinstance(value, list) else read(value)
    if not matches(converted, kind):
        raise ValueError(_expected_values(kind))
    return converted


def _expected_values(kind: Any) -> str:
    """The values that an annotation's reader expects, in the words of its error message."""
    try:
        reader(kind)("\0")
    except ValueError as error:
        return str(error)
    return "a string"


def shown(value: Any) -> str:
    """A value as a user writes it on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def mentions(kind: Any, plain: type) -> bool:
    """Whether an annotation is the type `plain`, or has it as a type argument."""
    return kind is plain or plain in typing.get_args(kind)


def fits_one_word(kind: Any) -> bool:
    """Whether values of an annotation can be written as one word on a command line."""
    try:
        reader(kind)
    except TypeError:
        return False
    return True


def dataclass_fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass or of its instance; empty for other classes.

    Raises:
      FdgError: as in `check_decorated`.
    """
    if not dataclasses.is_dataclass(cls):
        return ()
    check_decorated(cls if isinstance(cls, type) else type(cls))
    return dataclasses.fields(cls)


@functools.cache
def check_decorated(cls: type) -> None:
    """Raises an error for a subclass of a dataclass with settings that Python ignores.

    Python ignores a default without annotation. In a class that is not decorated itself, it also ignores new
    fields and new defaults of inherited fields.

    Raises:
      FdgError: names the settings, and what to write.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Base:
    ...     rate: float = 0.1
    >>> class Mine(Base):
    ...     rate = 0.5
    >>> check_decorated(Mine)
    Traceback (most recent call last):
    fdg.errors.FdgError: Mine...: rate has no effect: write its type, rate: float = ..., and \
@dataclasses.dataclass(frozen=True) above the class
    """
    for base in cls.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        is_decorated, annotated = "__dataclass_fields__" in vars(base), inspect.get_annotations(base)
        fields = {field.name: field for field in dataclasses.fields(base)}
        ignored = []
        for name in dict.fromkeys((*annotated, *vars(base))):
            value = vars(base).get(name, dataclasses.MISSING)
            value = value.default if isinstance(value, dataclasses.Field) else value
            if name not in annotated:
                is_ignored = name in fields and not hasattr(value, "__get__")
            elif is_decorated or "ClassVar" in str(annotated[name]):
                is_ignored = False
            else:
                default = fields[name].default if name in fields else None
                is_ignored = name not in fields or (value is not default and value != default)
            ignored += [name] * is_ignored
        if ignored:
            untyped = next((name for name in ignored if name not in annotated), None)
            kind = "" if untyped is None else _annotation_text(fields[untyped].type)
            type_fix = "" if untyped is None else f"its type, {untyped}: {kind} = ..., and "
            options: Any = base
            frozen = "(frozen=True)" if options.__dataclass_params__.frozen else ""
            verb = "has" if len(ignored) == 1 else "have"
            raise FdgError(
                f"{base.__name__}{place_of(base)}: {listed(ignored, 'and')} {verb} no effect:"
                f" write {type_fix}@dataclasses.dataclass{frozen} above the class"
            )


def _annotation_text(kind: Any) -> str:
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer, or an integer scalar of NumPy or JAX, below `TOO_LARGE`; no bool."""
    if isinstance(value, bool | np.bool_):
        return False
    try:
        is_small = abs(operator.index(value)) < TOO_LARGE
    except (TypeError, ValueError):
        return False
    return is_small and getattr(value, "shape", ()) == ()


def _is_number(value: Any) -> bool:
    """Whether a value is an integer (`_is_integer`) or a float or float scalar other than NaN."""
    if _is_integer(value):
        return True
    dtype = getattr(value, "dtype", None)  # tensors of other libraries have dtypes that NumPy lacks
    is_floating = isinstance(value, float | np.floating) or (
        getattr(value, "shape", None) == ()
        and isinstance(dtype, np.dtype)
        and np.issubdtype(dtype, np.floating)
    )
    return is_floating and not math.isnan(float(value))


# Class -> whether a value matches it, for classes with another rule than `isinstance`.
_TESTS: dict[Any, Callable[[Any], bool]] = {
    Any: lambda value: True,
    types.NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: _is_integer,
    float: _is_number,
    str: lambda value: isinstance(value, str) and "\0" not in value,
    Path: lambda value: isinstance(value, os.PathLike),
    Callable: callable,
    Mapping: lambda value: isinstance(value, Mapping),
}
_DESCRIPTIONS: dict[Any, str] = {
    types.NoneType: "None",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    Mapping: "a dict",
    dict: "a dict",
    Callable: "a function",
}


def annotations_of(cls: Any) -> dict[str, Any]:
    """The annotations of a class's fields; `Any` for all if one exists only under `TYPE_CHECKING`."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {field.name: Any for field in dataclass_fields(cls)}
