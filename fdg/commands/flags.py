"""Flags: from the fields of dataclasses to argparse, with errors of one line.

See docs/decisions/005-command-line-is-argparse.md.
"""

import argparse
import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from fdg.aliases import ALIASES, instead
from fdg.errors import FdgError, nearest

_NOT_FLAGS = ("env",)  # fields of an algorithm that a command line cannot write down


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command line."""

    name: str  # as in Python: `num_envs`, which is given as --num-envs or --num_envs
    kind: Any  # annotation of its value
    default: Any  # `dataclasses.MISSING`: there is none
    help: str  # "(None: ...)" in it says what a default of None means
    words: bool = False  # whether several words make its value, a string

    @property
    def option(self) -> str:
        """As it is written."""
        return "--" + self.name.replace("_", "-")


def dataclass_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass; none of another class, which then has no flags of its own."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def fields_of(cls: type) -> list[Flag]:
    """Flags for the fields of a dataclass whose values can be written on a command line."""
    hints = typing.get_type_hints(cls)
    flags = []
    for field in sorted(dataclass_fields(cls), key=lambda field: bool(field.kw_only)):
        kind = field.metadata.get("flag", hints[field.name])  # what of it a command line can say
        if not field.init or field.name in _NOT_FLAGS or not _is_writable(kind):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        flags.append(Flag(field.name, kind, default, field.metadata.get("help", "")))
    return flags


def normalise(argv: Sequence[str]) -> list[str]:
    """`--num_envs` as `--num-envs`, and `--x -1e-3` as `--x=-1e-3` (argparse knows -1 and -0.1 only)."""
    words: list[str] = []
    for word in argv:
        if "\0" in word:
            raise FdgError(f"{word!r}: a null character belongs to no flag")
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name == "--" or value == "--":  # which argparse would take for its own
                raise FdgError(f"'{word}': '--' is neither a flag nor a value of one: see --help")
            words.append(name.replace("_", "-") + equals + value)
        elif words and re.fullmatch(r"--[\w-]+", words[-1]) and re.fullmatch(r"-[\d.]\S*", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


class Parser(argparse.ArgumentParser):
    """Leaves out of the result what was not given, and raises its errors."""

    def __init__(self, **settings: Any):
        formatter = lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110)  # noqa: E731
        super().__init__(argument_default=argparse.SUPPRESS, formatter_class=formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print below its usage."""
        raise FdgError(message.removeprefix("argument "))

    def parse_strictly(self, words: Sequence[str]) -> dict[str, Any]:
        """What was given, by name; refuses what is no flag."""
        known, rest = self.parse_known_args(words)
        unknown = [word for word in rest if word.startswith("-")]
        if unknown:
            raise _unknown_flag(unknown[0].partition("=")[0], self.options())
        if rest:
            name, equals, value = rest[0].partition("=")
            meant = f"--{name.replace('_', '-')}"
            fix = f"write {meant} {value}" if equals and meant in self.options() else "write --NAME VALUE"
            raise FdgError(f"'{rest[0]}' belongs to no flag: {fix} (--help lists them all)")
        return vars(known)

    def options(self) -> dict[str, str]:
        """The flag's name by every way in which it may be written: `--seed`, `--random-seed`, ..."""
        return {option: action.dest for action in self._actions for option in action.option_strings}


_FEW = 16  # flags, which one line can list


def _unknown_flag(name: str, options: Iterable[str]) -> FdgError:
    if fix := instead(name):
        return FdgError(f"unknown flag '{name}': {fix}")
    close = nearest(name, options)
    if not close:
        known = [option for option in options if re.match("--(?!no-|help)", option)]
        few = f": known are {', '.join(known)}" if len(known) <= _FEW else " (--help lists them all)"
        return FdgError(f"unknown flag '{name}'{few}")
    near = f"near it: {', '.join(close[1:])}; " if close[1:] else ""
    return FdgError(f"unknown flag '{name}': did you mean '{close[0]}'? ({near}--help lists them all)")


def add_flag(parser: Any, flag: Flag) -> None:
    """Adds a flag. What is not given stays out of the result: it may come from a preset or an earlier run."""
    if flag.default is None and "None: " in flag.help:  # the help says what happens then
        text = flag.help.replace("None: ", "default: ")
    else:
        default = "required" if flag.default is dataclasses.MISSING else f"default: {shown(flag.default)}"
        text = f"{flag.help} ({default})".strip()
    text = text.replace("%", "%%")
    _add_argument(parser, flag, flag.option, text)


def written(flag: Flag) -> tuple[str, ...]:
    """All ways in which a flag may be written: `--learning-rate`, `--lr`, ..."""
    return (flag.option, *(f"--{alias}" for alias in ALIASES.get(flag.name, ())))


def add_aliases(parser: Any, flags: Iterable[Flag]) -> None:
    """Adds the other names of flags, unless they are flags themselves: after all flags were added."""
    for flag in flags:
        for alias in written(flag)[1:]:
            with contextlib.suppress(argparse.ArgumentError):
                _add_argument(parser, flag, alias, argparse.SUPPRESS)


def _add_argument(parser: Any, flag: Flag, option: str, text: str) -> None:
    read = reader(flag.kind)

    def checked(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{word:.200}' is not {error}{_fix(flag, word)}") from None

    if flag.words:
        parser.add_argument(
            option, dest=flag.name, nargs="+", action=_Joined, metavar="NAME=VALUES", help=text
        )
    elif flag.kind is bool:
        # A bare flag is true; --no-flag, or a word, says otherwise.
        parser.add_argument(
            option, dest=flag.name, nargs="?", const=True, type=checked, metavar="BOOL", help=text
        )
        parser.add_argument(
            "--no-" + option[2:], dest=flag.name, action="store_const", const=False, help=argparse.SUPPRESS
        )
    elif is_tuple(flag.kind):
        parser.add_argument(
            option, dest=flag.name, nargs="+", action=_Tuple, type=checked, metavar="N", help=text
        )
    else:
        parser.add_argument(option, dest=flag.name, type=checked, metavar=_metavar(flag.kind), help=text)


def _fix(flag: Flag, word: str) -> str:
    """What to write in place of a word that a flag cannot have, where its kind says so."""
    if is_tuple(flag.kind):
        return f": write {flag.option} 64 64"
    if _mentions(flag.kind, float) and "," in word:
        return f": give one; --sweep {flag.name}={word:.200} tries several"
    return ""


class _Joined(argparse.Action):
    """`--sweep learning_rate=1e-3,3e-3 discount=0.9,0.99`, as one string; `--sweep none` is None."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, None if values == ["none"] else " ".join(values))


class _Tuple(argparse.Action):
    """`--hidden 64 64`, `--hidden 64,64` and `--hidden none`."""

    def __call__(self, parser, namespace, values, option_string=None):
        parts = [part for part in values if part is not None]
        setattr(namespace, self.dest, sum(parts, ()) if parts else None)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return next(
        (name for plain, name in ((bool, "BOOL"), (int, "INT"), (float, "FLOAT")) if _mentions(kind, plain)),
        "NAME",
    )


def _mentions(kind: Any, plain: type) -> bool:
    return kind is plain or plain in typing.get_args(kind)


def _is_writable(kind: Any) -> bool:
    try:
        reader(kind)
    except TypeError:
        return False
    return True


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


def from_json(flag: Flag, value: Any) -> Any:
    """What `to_json` made one of.

    Raises:
      ValueError: a value that `to_json` would not have made; says what was expected.
    """
    expected = _expected(flag.kind)
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        is_word = isinstance(part, str)
        infinite = is_word and part in ("inf", "-inf") and _mentions(flag.kind, float)
        if isinstance(part, list | dict) or (is_word and not (infinite or _takes_words(flag.kind))):
            raise ValueError(expected)
        if not is_word and part is not None and flag.kind is str:
            raise ValueError(expected)
    if isinstance(value, list) and not is_tuple(flag.kind):
        raise ValueError(expected)
    if isinstance(value, str) and _mentions(flag.kind, str):
        return value
    words = ["none" if p is None else p if isinstance(p, str) else str(p).lower() for p in parts]
    try:
        if isinstance(value, list) and not value:
            return ()
        return reader(flag.kind)(",".join(words))
    except ValueError:
        raise ValueError(expected) from None


def _takes_words(kind: Any) -> bool:
    origins = [typing.get_origin(one) for one in (kind, *typing.get_args(kind))]
    return _mentions(kind, str) or Literal in origins


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
