"""Command-line flags from dataclass fields, by argparse, with one-line errors.

See docs/decisions/005-command-line-is-argparse.md.
"""

import argparse
import contextlib
import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from fdg.aliases import ALIASES, instead
from fdg.errors import FdgError, nearest
from fdg.kinds import (
    annotations_of,
    as_number,
    dataclass_fields,
    is_tuple,
    is_writable,
    mentions,
    reader,
    shown,
)
from fdg.training.settings import GROUPS, Settings

_ONE = "give one value, and start another run for each other value"


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag."""

    name: str  # as in Python: `num_envs`, which is given as --num-envs or --num_envs
    kind: Any  # annotation of its value
    default: Any  # `dataclasses.MISSING` for none
    help: str  # "(None: ...)" in it says what a default of None means
    words: bool = False  # whether several words make its value, a string
    several: str = _ONE  # the fix where `{n}` values `{}` are given

    @property
    def option(self) -> str:
        """The flag as written on the command line."""
        return "--" + self.name.replace("_", "-")


def fields_of(cls: type) -> list[Flag]:
    """Flags for the fields of a dataclass whose values can be written on a command line."""
    hints = annotations_of(cls)
    flags = []
    for field in sorted(dataclass_fields(cls), key=lambda field: bool(field.kw_only)):
        kind = field.metadata.get("flag", hints[field.name])  # the type on the command line
        if not field.init or not is_writable(kind):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        more = {name: field.metadata[name] for name in ("words", "several") if name in field.metadata}
        flags.append(Flag(field.name, kind, default, field.metadata.get("help", ""), **more))
    return flags


class Words:
    """The words of a command line. Each parser removes the words of its flags."""

    def __init__(self, argv: Sequence[str]):
        self._strays, self._flags = _by_flag(normalise(argv))

    @property
    def options(self) -> dict[str, str]:
        """The remaining flags with their last values ("" for none)."""
        left = ((*words[0].partition("=")[::2], words[1:]) for words in self._flags)
        return {option: value or " ".join(after) for option, value, after in left}

    def take(self, parser: "Parser") -> dict[str, Any]:
        """Removes a parser's flags and returns the given values by name."""
        known = parser.options()
        mine = [words for words in self._flags if words[0].partition("=")[0] in known]
        self._flags = [words for words in self._flags if words not in mine]
        given, rest = parser.parse_known_args([word for words in mine for word in words])
        if rest:
            raise parser.stray(rest[0], mine)
        return vars(given)

    def drop(self, *options: str) -> bool:
        """Removes flags that take no value; returns whether any were given."""
        before, self._flags = self._flags, [words for words in self._flags if words[0] not in options]
        return len(before) > len(self._flags)

    def take_all(self, parser: "Parser") -> dict[str, Any]:
        """As `take`, for all remaining words; refuses words that are no flags."""
        return parser.parse_strictly(self.left)

    @property
    def left(self) -> list[str]:
        """The remaining words."""
        return [*self._strays, *(word for words in self._flags for word in words)]


def _by_flag(words: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """The words before all flags, and each flag with the words up to the next one."""
    flags: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-|-[\d.]\S*", word):
            flags.append([])
        flags[-1].append(word)
    return flags[0], flags[1:]


def normalise(argv: Sequence[str]) -> list[str]:
    """Turns `--num_envs` into `--num-envs`, and `--x -1e-3` into `--x=-1e-3` (argparse only parses -1 and
    -0.1)."""
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
    """An `ArgumentParser` that returns only given flags, and raises instead of exiting."""

    def __init__(self, **settings: Any):
        formatter = lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110)  # noqa: E731
        super().__init__(argument_default=argparse.SUPPRESS, formatter_class=formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises argparse's usage error; for a flag without value, with an example."""
        message = message.removeprefix("argument ")
        option, _, rest = message.partition(": expected ")
        words = {"one argument": "one value", "at least one argument": "a value or more"}
        actions = {one: action for action in self._actions for one in action.option_strings}
        if rest in words and option in actions:
            message = f"{option} takes {words[rest]}: write {option} {actions[option].metavar}"
        raise FdgError(message)

    def parse_strictly(self, words: Sequence[str]) -> dict[str, Any]:
        """The given values by name; refuses words that are no flags."""
        known, rest = self.parse_known_args(words)
        unknown = [word for word in rest if word.startswith("-")]
        if unknown:
            raise _unknown_flag(unknown[0].partition("=")[0], self.options())
        if rest:
            raise self.stray(rest[0], _by_flag(words)[1])
        return vars(known)

    def stray(self, word: str, flags: Iterable[Sequence[str]]) -> FdgError:
        """The error for a word that belongs to no flag."""
        actions = {option: action for action in self._actions for option in action.option_strings}
        for option, *values in flags:
            name, equals, value = option.partition("=")
            action, values = actions.get(name), [value] * bool(equals) + values
            if action is None or action.nargs == "+" or len(values) < 2 or word not in values:
                continue
            fix = self._registry_get("several", name, _ONE).format(",".join(values), n=len(values))
            return FdgError(f"{name} takes one value, not {len(values)} ('{' '.join(values):.100}'): {fix}")
        places = [action.metavar for action in self._actions if not action.option_strings]
        if places and "=" not in word:
            return FdgError(f"'{word}' is one too many: give one {places[0]}, and flags as --NAME VALUE")
        name, equals, value = word.partition("=")
        meant = f"--{name.replace('_', '-')}"
        fix = f"write {meant} {value}" if equals and meant in self.options() else "write --NAME VALUE"
        return FdgError(f"'{word}' belongs to no flag: {fix} (--help lists them all)")

    def options(self) -> dict[str, str]:
        """Maps every spelling of a flag to its name: `--seed`, `--random-seed`, ..."""
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


def add_flags(parser: Any, flags: Iterable[Flag]) -> None:
    """Adds flags to a parser or an argument group.

    Flags that are not given are absent from the result: their values may come from a preset or an earlier
    run.
    """
    for flag in flags:
        _add_argument(parser, flag, flag.option, _help(flag))


def _help(flag: Flag) -> str:
    if flag.default is None and "None: " in flag.help:  # the help explains None
        text = flag.help.replace("None: ", "default: ")
    else:
        default = "required" if flag.default is dataclasses.MISSING else f"default: {shown(flag.default)}"
        text = f"{flag.help} ({default})".strip()
    return text.replace("%", "%%")


def spellings(flag: Flag) -> tuple[str, ...]:
    """All spellings of a flag: `--learning-rate`, `--lr`, ..."""
    return (flag.option, *(f"--{alias}" for alias in ALIASES.get(flag.name, ())))


def add_aliases(parser: Any, flags: Iterable[Flag]) -> None:
    """Adds the other names of flags, unless they are flags. Call it after all flags are added."""
    for flag in flags:
        for alias in spellings(flag)[1:]:
            with contextlib.suppress(argparse.ArgumentError):
                _add_argument(parser, flag, alias, argparse.SUPPRESS)


def _add_argument(parser: Any, flag: Flag, option: str, text: str) -> None:
    read = reader(flag.kind)

    def checked(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{word:.200}' is not {error}{_fix(flag, word)}") from None

    add = functools.partial(parser.add_argument, dest=flag.name)
    if flag.words:
        add(option, nargs="+", action=_Joined, metavar="NAME=VALUES", help=text)
    elif flag.kind is bool:
        # A bare flag is true; --no-flag or a value sets it.
        add(option, nargs="?", const=True, type=checked, metavar="BOOL", help=text)
        add("--no-" + option[2:], action="store_const", const=False, help=argparse.SUPPRESS)
    elif is_tuple(flag.kind):
        add(option, nargs="+", action=_Tuple, type=checked, metavar="N", help=text)
    else:
        add(option, type=checked, metavar=_metavar(flag.kind), help=text)
    is_word = mentions(flag.kind, str) and flag.several == _ONE
    parser.register(
        "several", option, f"{flag.several}, and blanks are 'in quotes'" if is_word else flag.several
    )


def _fix(flag: Flag, word: str) -> str:
    """The fix for an invalid value, if its annotation has one."""
    if fix := as_number(word, flag.kind, flag.name):
        return fix
    several = [part for part in word.strip("[]()").split(",") if part.strip()]
    if is_tuple(flag.kind):
        wrong = [part for part in several if not _is_readable(flag.kind, part)] if several[1:] else []
        return f"{f', by {wrong[0]!r}' if wrong else ''}: write {flag.option} 64 64"
    if len(several) > 1 and (mentions(flag.kind, float) or mentions(flag.kind, int)):
        return f": {flag.several.format(','.join(several), n=len(several))}"
    if "Literal" in str(flag.kind):  # its choices are listed
        return ""
    meaning = re.split(r"[;:(]", flag.help)[0].strip()
    is_number = mentions(flag.kind, float) or mentions(flag.kind, int)
    example = flag.default if type(flag.default) in (int, float) else 1
    fix = instead(word) or (f"write {flag.option} {shown(example)}" if is_number else "")
    return (f" ({meaning})" if meaning else "") + (f": {fix}" if fix else "")


def _is_readable(kind: Any, word: str) -> bool:
    try:
        reader(kind)(word)
    except ValueError:
        return False
    return True


class _Joined(argparse.Action):
    """Joins `--sweep learning_rate=1e-3,3e-3 discount=0.9,0.99` to one string; `--sweep none` is None."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, None if values == ["none"] else " ".join(values))


class _Tuple(argparse.Action):
    """Parses `--hidden 64 64`, `--hidden 64,64` and `--hidden none`."""

    def __call__(self, parser, namespace, values, option_string=None):
        parts = [part for part in values if part is not None]
        setattr(namespace, self.dest, sum(parts, ()) if parts else None)


def _searched(flag: Flag) -> Flag:
    """The fix for several values of a hyperparameter: a sweep or a search."""
    how = "--sweep" if mentions(flag.kind, float) else "--optuna N --search"
    return dataclasses.replace(flag, several=f"give one; {how} {flag.name}={{}} tries several")


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return next(
        (name for plain, name in ((bool, "BOOL"), (int, "INT"), (float, "FLOAT")) if mentions(kind, plain)),
        "NAME",
    )


def add_earlier(parser: Any) -> None:
    """Adds the flags that name an earlier run."""
    text = "continue the run in DIR (or in --out) exactly from its last checkpoint; no other flag is needed"
    parser.add_argument("--resume", nargs="?", const="", metavar="DIR", help=text)
    text = "start a new run from the weights and the flags of the run in DIR; flags given here override them"
    parser.add_argument("--from", dest="start_from", metavar="DIR", help=text)
    text = "take the flags from a run's config.json; flags given here override them"
    parser.add_argument("--config", metavar="FILE", help=text)


@dataclasses.dataclass(frozen=True)
class JobFlags:
    """The flags of a job: those of every job (`fdg.training.settings`), its policy and its algorithm."""

    policy: Sequence[Flag] = ()  # flags of the policy's fields
    own: Sequence[Flag] = ()  # flags of the algorithm's hyperparameters
    has_length: bool = False  # whether `total_steps` is a setting of the run instead of a hyperparameter

    @classmethod
    def of(cls, algorithm: type, policy: type, is_auto: bool) -> "JobFlags":
        """The flags of a class of algorithms and a class of policies."""
        taken = {option[2:].replace("-", "_") for option in cls().parser().options()}
        taken |= {"measure"} if is_auto else set()
        placing = [flag for flag in fields_of(policy) if flag.name not in taken]
        taken |= {flag.name for flag in placing}
        own = [_searched(flag) for flag in fields_of(algorithm) if flag.name not in taken]
        return cls(placing, own, all(flag.name != "total_steps" for flag in own))

    def beginning_with(self, preset: Mapping[str, Any]) -> "JobFlags":
        """The flags with a preset's values as defaults."""
        own = [dataclasses.replace(flag, default=preset.get(flag.name, flag.default)) for flag in self.own]
        return dataclasses.replace(self, own=own)

    @property
    def run(self) -> Sequence[Flag]:
        """The flags of the run."""
        return [flag for flag in fields_of(Settings) if self.has_length or flag.name != "total_steps"]

    @property
    def groups(self) -> Mapping[str, Sequence[Flag]]:
        """All flags by their titles in `--help`; the algorithm's without a title."""
        names, run, *others = GROUPS
        return {
            names: [*fields_of(GROUPS[names]), *self.policy],
            run: self.run,
            **{title: fields_of(GROUPS[title]) for title in others},
            "": self.own,
        }

    def parser(self, own_title: str = "", more: Sequence[Flag] = (), **settings: Any) -> Parser:
        """A parser of these flags and their aliases."""
        parser = Parser(usage="%(prog)s [flags]", allow_abbrev=False, **settings)
        for title, flags in self.groups.items():
            group = parser.add_argument_group(title or own_title)
            add_flags(group, flags)
            if GROUPS.get(title) is Settings:
                add_earlier(group)
        add_flags(parser, more)
        add_aliases(parser, [flag for flags in self.groups.values() for flag in flags])
        return parser
