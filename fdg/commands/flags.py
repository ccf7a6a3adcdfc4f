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
    dataclass_fields,
    fits_one_word,
    is_tuple,
    mentions,
    number_fix,
    reader,
    shown,
)
from fdg.training.settings import GROUPS, Settings

_ONE_VALUE = "give one value, and start a run for each further value"  # the default fix for several values


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command line."""

    name: str  # the Python name: `num_envs` is written --num-envs or --num_envs
    kind: Any  # the annotation of its value
    default: Any  # `dataclasses.MISSING` if the flag is required
    help: str  # may contain "(None: ...)", which explains the default None
    words: bool = False  # whether its value is several words, which are joined to one string
    several: str = _ONE_VALUE  # the fix if several values are given; `{n}` is their number, `{}` the values

    @property
    def option(self) -> str:
        """The flag as written on the command line."""
        return "--" + self.name.replace("_", "-")


def flags_of(cls: type) -> list[Flag]:
    """Flags for those fields of a dataclass whose values can be written on a command line."""
    hints = annotations_of(cls)
    flags = []
    for field in sorted(dataclass_fields(cls), key=lambda field: bool(field.kw_only)):
        kind = field.metadata.get("flag", hints[field.name])  # the type on the command line; None: no flag
        if not field.init or not fits_one_word(kind):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        metadata = {name: field.metadata[name] for name in ("words", "several") if name in field.metadata}
        flags.append(Flag(field.name, kind, default, field.metadata.get("help", ""), **metadata))
    return flags


class Words:
    """The words of a command line that no parser has taken yet. Each parser takes the words of its flags."""

    def __init__(self, argv: Sequence[str]):
        self._leading_words, self._flags = _split_by_flag(normalise(argv))

    @property
    def options(self) -> dict[str, str]:
        """The remaining flags, each with the value of its last use ("" without a value)."""
        flags = ((*words[0].partition("=")[::2], words[1:]) for words in self._flags)
        return {option: value or " ".join(values) for option, value, values in flags}

    def take(self, parser: "Parser") -> dict[str, Any]:
        """Removes a parser's flags, and returns their values by name."""
        options = parser.options()
        parser_words = [words for words in self._flags if words[0].partition("=")[0] in options]
        self._flags = [words for words in self._flags if words not in parser_words]
        namespace, strays = parser.parse_known_args([word for words in parser_words for word in words])
        if strays:
            raise parser.stray_word_error(strays[0], parser_words)
        return vars(namespace)

    def drop(self, *options: str) -> bool:
        """Removes these options, which take no value; returns whether there were any of them."""
        previous, self._flags = self._flags, [words for words in self._flags if words[0] not in options]
        return len(previous) > len(self._flags)

    @property
    def remaining(self) -> list[str]:
        """The remaining words."""
        return [*self._leading_words, *(word for words in self._flags for word in words)]


_NEGATIVE_NUMBER = re.compile(r"-([\d.]\S*|inf|infinity|nan)", re.IGNORECASE)  # a value, not a flag


def _split_by_flag(words: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """The words before the first flag, and each flag with the words up to the next flag."""
    flags: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-") and word != "-" and not _NEGATIVE_NUMBER.fullmatch(word):
            flags.append([])
        flags[-1].append(word)
    return flags[0], flags[1:]


def normalise(argv: Sequence[str]) -> list[str]:
    """Turns `--num_envs` into `--num-envs`, and `--x -1e-3`, which argparse refuses, into `--x=-1e-3`."""
    words: list[str] = []
    for word in argv:
        if "\0" in word:
            raise FdgError(f"{word!r} contains a null character: remove it")
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name == "--" or value == "--":  # argparse takes it for the end of the flags
                raise FdgError(f"'{word}': '--' is neither a flag nor a value: see --help")
            words.append(name.replace("_", "-") + equals + value)
        elif words and re.fullmatch(r"--[\w-]+", words[-1]) and _NEGATIVE_NUMBER.fullmatch(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that returns only flags of the command line; raises errors instead of exiting."""

    def __init__(self, **settings: Any):
        formatter = lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110)  # noqa: E731
        super().__init__(argument_default=argparse.SUPPRESS, formatter_class=formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises argparse's usage error, with an example if a flag lacks its value."""
        message = message.removeprefix("argument ")
        option, _, expected = message.partition(": expected ")
        wordings = {"one argument": "one value", "at least one argument": "a value or more"}
        actions = {option: action for action in self._actions for option in action.option_strings}
        if expected in wordings and option in actions:
            message = f"{option} takes {wordings[expected]}: write {option} {actions[option].metavar}"
        raise FdgError(message)

    def parse_strictly(self, words: Sequence[str]) -> dict[str, Any]:
        """The values of the words by name; refuses words that are not flags."""
        namespace, strays = self.parse_known_args(words)
        unknown = [word for word in strays if word.startswith("-")]
        if unknown:
            raise _unknown_flag_error(unknown[0].partition("=")[0], self.options())
        if strays:
            raise self.stray_word_error(strays[0], _split_by_flag(words)[1])
        return vars(namespace)

    def stray_word_error(self, word: str, flags: Iterable[Sequence[str]]) -> FdgError:
        """The error for a word that does not belong to a flag."""
        actions = {option: action for action in self._actions for option in action.option_strings}
        for option, *values in flags:
            name, equals, value = option.partition("=")
            action, values = actions.get(name), [value] * bool(equals) + values
            if action is None or action.nargs == "+" or len(values) < 2 or word not in values:
                continue
            fix = self._registry_get("several", name, _ONE_VALUE).format(",".join(values), n=len(values))
            return FdgError(f"{name} takes one value, not {len(values)} ('{' '.join(values):.100}'): {fix}")
        positionals = [action.metavar for action in self._actions if not action.option_strings]
        if positionals and "=" not in word:
            return FdgError(
                f"'{word}' is one argument too many: give one {positionals[0]}, and flags as --NAME VALUE"
            )
        name, equals, value = word.partition("=")
        intended = f"--{name.replace('_', '-')}"
        fix = f"write {intended} {value}" if equals and intended in self.options() else "write --NAME VALUE"
        return FdgError(f"'{word}' does not belong to a flag: {fix} (--help lists them all)")

    def options(self) -> dict[str, str]:
        """Maps every spelling of a flag (`--seed`, `--random-seed`, ...) to its name."""
        return {option: action.dest for action in self._actions for option in action.option_strings}


_MAX_LISTED_FLAGS = 16  # flags that one line can list


def _unknown_flag_error(name: str, options: Iterable[str]) -> FdgError:
    if fix := instead(name):
        return FdgError(f"unknown flag '{name}': {fix}")
    suggestions = nearest(name, options)
    if not suggestions:
        flags = [option for option in options if re.match("--(?!no-|help)", option)]
        is_short = len(flags) <= _MAX_LISTED_FLAGS
        hint = f": known are {', '.join(flags)}" if is_short else " (--help lists them all)"
        return FdgError(f"unknown flag '{name}'{hint}")
    further = f"near it: {', '.join(suggestions[1:])}; " if suggestions[1:] else ""
    return FdgError(
        f"unknown flag '{name}': did you mean '{suggestions[0]}'? ({further}--help lists them all)"
    )


def add_flags(parser: Any, flags: Iterable[Flag]) -> None:
    """Adds flags to a parser or an argument group.

    A flag that is not on the command line is absent from the result: its value may come from a preset or an
    earlier run.
    """
    for flag in flags:
        _add_argument(parser, flag, flag.option, _help_text(flag))


def _help_text(flag: Flag) -> str:
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
    """Adds the aliases of flags, unless they are flags themselves. Call it after all flags are added."""
    for flag in flags:
        for alias in spellings(flag)[1:]:
            with contextlib.suppress(argparse.ArgumentError):
                _add_argument(parser, flag, alias, argparse.SUPPRESS)


def _add_argument(parser: Any, flag: Flag, option: str, help_text: str) -> None:
    parse = reader(flag.kind)

    def parse_word(word: str) -> Any:
        try:
            return parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{word:.200}' is not {error}{_fix(flag, word)}") from None

    add = functools.partial(parser.add_argument, dest=flag.name)
    if flag.words:
        add(option, nargs="+", action=_JoinWords, metavar="NAME=VALUES", help=help_text)
    elif flag.kind is bool:
        # A bare flag is true; --no-flag or a value sets it.
        add(option, nargs="?", const=True, type=parse_word, metavar="BOOL", help=help_text)
        add("--no-" + option[2:], action="store_const", const=False, help=argparse.SUPPRESS)
    elif is_tuple(flag.kind):
        add(option, nargs="+", action=_ConcatenateTuples, type=parse_word, metavar="N", help=help_text)
    else:
        add(option, type=parse_word, metavar=_metavar(flag.kind), help=help_text)
    is_text = mentions(flag.kind, str) and flag.several == _ONE_VALUE
    parser.register(
        "several", option, f"{flag.several}, and blanks are 'in quotes'" if is_text else flag.several
    )


def _fix(flag: Flag, word: str) -> str:
    """The end of an error message about an invalid value: the meaning of the flag, and the fix."""
    if fix := number_fix(word, flag.kind, flag.name):
        return fix
    parts = [part for part in word.strip("[]()").split(",") if part.strip()]
    if is_tuple(flag.kind):
        for part in parts if len(parts) > 1 else ():
            try:
                reader(flag.kind)(part)
            except ValueError:
                return f", by {part!r}: write {flag.option} 64 64"
        return f": write {flag.option} 64 64"
    if len(parts) > 1 and (mentions(flag.kind, float) or mentions(flag.kind, int)):
        return f": {flag.several.format(','.join(parts), n=len(parts))}"
    if "Literal" in str(flag.kind):  # the message lists the choices
        return ""
    meaning = re.split(r"[;(]|: ", flag.help)[0].strip()
    is_number = mentions(flag.kind, float) or mentions(flag.kind, int)
    example = flag.default if type(flag.default) in (int, float) else 1
    fix = instead(word) or (f"write {flag.option} {shown(example)}" if is_number else "")
    return (f" ({meaning})" if meaning else "") + (f": {fix}" if fix else "")


class _JoinWords(argparse.Action):
    """Joins the words `learning_rate=1e-3,3e-3 discount=0.9,0.99` to one string; `none` is None."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, None if values == ["none"] else " ".join(values))


class _ConcatenateTuples(argparse.Action):
    """Parses `--hidden 64 64`, `--hidden 64,64` and `--hidden none`."""

    def __call__(self, parser, namespace, values, option_string=None):
        parts = [part for part in values if part is not None]
        setattr(namespace, self.dest, sum(parts, ()) if parts else None)


def _metavar(kind: Any) -> str:
    """What a flag takes: `INT`, `{a,b}` for words, `INT|auto`; `NAME` for any text."""
    parts = (kind, *typing.get_args(kind))  # also in `Literal[...] | None`
    words = [
        str(word) for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)
    ]
    numbers = ((bool, "BOOL"), (int, "INT"), (float, "FLOAT"))
    number = next((name for cls, name in numbers if mentions(kind, cls)), None)
    if number and words:
        return "|".join([number, *words])
    return "{" + ",".join(words) + "}" if words else number or "NAME"


def add_earlier_run_flags(parser: Any) -> None:
    """Adds the flags that name an earlier run."""
    text = "continue the run in DIR (or in --out) exactly from its last checkpoint; no other flag is needed"
    parser.add_argument("--resume", nargs="?", const="", metavar="DIR", help=text)
    text = (
        "start a new run from the weights and the flags of the run in DIR, except --eval-every, --stop-at and"
        " --stop-after; flags given here override them"
    )
    parser.add_argument("--from", dest="start_from", metavar="DIR", help=text)
    text = "take the flags from a run's config.json; flags given here override them"
    parser.add_argument("--config", metavar="FILE", help=text)


@dataclasses.dataclass(frozen=True)
class JobFlags:
    """The flags of a job: the settings (`fdg.training.settings`), and fields of its policy and algorithm."""

    policy: Sequence[Flag] = ()  # flags of the policy's fields
    algorithm: Sequence[Flag] = ()  # flags of the algorithm's hyperparameters
    has_total_steps: bool = False  # whether `total_steps` is a setting of the run, not a hyperparameter

    @classmethod
    def of(cls, algorithm: type, policy: type) -> "JobFlags":
        """The flags of a job with these classes of algorithm and policy."""
        names = {option[2:].replace("-", "_") for option in cls().parser().options()}
        policy_flags = [flag for flag in flags_of(policy) if flag.name not in names]
        names |= {flag.name for flag in policy_flags}
        flags = []
        for flag in flags_of(algorithm):
            if flag.name not in names:
                option = "--sweep" if mentions(flag.kind, float) else "--optuna N --search"
                fix = f"give one value; {option} {flag.name}={{}} tries several"
                flags.append(dataclasses.replace(flag, several=fix))
        return cls(policy_flags, flags, all(flag.name != "total_steps" for flag in flags))

    def with_defaults(self, preset: Mapping[str, Any]) -> "JobFlags":
        """These flags, with a preset's values as defaults."""
        flags = [dataclasses.replace(f, default=preset.get(f.name, f.default)) for f in self.algorithm]
        return dataclasses.replace(self, algorithm=flags)

    @property
    def run(self) -> Sequence[Flag]:
        """The flags of the run's settings."""
        return [flag for flag in flags_of(Settings) if self.has_total_steps or flag.name != "total_steps"]

    @property
    def groups(self) -> Mapping[str, Sequence[Flag]]:
        """All flags by their titles in `--help`; the title of the algorithm's flags is ""."""
        names_title, run_title, *other_titles = GROUPS
        return {
            names_title: [*flags_of(GROUPS[names_title]), *self.policy],
            run_title: self.run,
            **{title: flags_of(GROUPS[title]) for title in other_titles},
            "": self.algorithm,
        }

    def parser(self, algorithm_title: str = "", extra: Sequence[Flag] = (), **settings: Any) -> Parser:
        """A parser of these flags, their aliases, and the flags `extra`."""
        parser = Parser(usage="%(prog)s [flags]", allow_abbrev=False, **settings)
        for title, flags in self.groups.items():
            group = parser.add_argument_group(title or algorithm_title)
            add_flags(group, flags)
            if GROUPS.get(title) is Settings:
                add_earlier_run_flags(group)
        add_flags(parser, extra)
        add_aliases(parser, [flag for flags in self.groups.values() for flag in flags])
        return parser
