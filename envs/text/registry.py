"""Tasks by name, as in `envs.make("text:addition", digits=3)`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from envs.text import countdown, problems, tables, verifiers, words
from envs.text.task import OPTIONS, TextTask
from envs.text.tokenizers import COMMON, CharacterTokenizer
from fdg.arguments import check_options
from fdg.errors import FdgError, listed, unknown_name

PREFIX = "text:"  # of its names for `envs.make`
FILES = tables.FILES  # parameters that are file paths


def files_of(_: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """The files of a task, by parameter."""
    files = ((field, parameters.get(field)) for field in FILES)
    return {field: path for field, path in files if isinstance(path, str) and path}


def trust_reason(name: str, parameters: Mapping[str, Any]) -> str | None:
    """What a task does that needs trust, as `envs.trust_reason`; None if nothing.

    Only `verifiers` needs trust, since files of problems are read as data.
    """
    if name.removeprefix(PREFIX) != verifiers.Verifiers.name:
        return None
    return f"imports the module {parameters.get('environment')}"


_PROBLEMS: dict[str, type] = {
    problem.name: problem
    for problem in (
        problems.Addition, problems.Subtraction, problems.Multiplication, problems.Division,
        problems.Remainder, problems.Divisor, problems.Comparison, problems.Arithmetic, problems.Sorting,
        problems.Maximum, problems.Total, words.Copying, words.Reversal, words.Counting, words.Parity,
        words.Binary, countdown.Countdown,
    )
}  # fmt: skip

# These need a file or a package, so `names()` excludes them.
_UNLISTED: dict[str, type] = {
    problem.name: problem
    for problem in (tables.File, tables.Preferences, tables.ReasoningGym, verifiers.Verifiers)
}


def names() -> tuple[str, ...]:
    """The names of tasks that need no file or package, without `text:`.

    There are also `file`, `preferences`, `reasoning_gym` and `verifiers`.

    >>> "countdown" in names()
    True
    """
    return tuple(_PROBLEMS)


def make(name: str, /, **overrides: Any) -> TextTask:
    """The task with this name (without `text:`); `overrides` are fields of its problem or of `TextTask`.

    Raises:
      FdgError: unknown task or parameter, or an invalid value.

    >>> make("addition", digits=3).prompt_length
    9
    """
    problem = _PROBLEMS.get(name) or _UNLISTED.get(name)
    if problem is None:
        raise unknown_name("text task", name, (*names(), *_UNLISTED), "envs.text.names()")
    options = {name: overrides.pop(name) for name in OPTIONS if name in overrides}
    fields = [field.name for field in dataclasses.fields(problem) if field.init]
    for field in overrides:
        if field not in fields:
            known = listed([*fields, *OPTIONS], "and")
            raise FdgError(f"task 'text:{name}' has no parameter '{field}': it has {known}")
    for function, values in ((problem, overrides), (TextTask, options)):
        check_options(f"task 'text:{name}'", function, values)
    built = problem(**overrides)
    return TextTask(
        built, host_reward=getattr(built, "host_reward", None), tokenizer=_tokenizer(built), **options
    )


def _tokenizer(problem: Any) -> CharacterTokenizer:
    """The tokenizer of all tasks, extended by the problem's characters."""
    sides = getattr(problem, "sides", (problem,))  # the chosen and the rejected side of preferences
    extra_characters = sorted({c for side in sides for c in getattr(side, "alphabet", "")} - set(COMMON))
    return CharacterTokenizer(COMMON + "".join(extra_characters))
