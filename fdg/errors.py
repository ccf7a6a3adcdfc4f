"""Errors that a user can act on: what was wrong, where, the values, and the fix, on one line."""

import contextlib
import dataclasses
import difflib
import inspect
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from fdg import aliases

_MAX_CHARACTERS = 1000  # of an error message
OURS = ("fdg", "envs", "algos", "policies")  # fdg's packages
_MAX_VALUE_CHARACTERS = 200  # characters between the brackets of a value in a message
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def shortened(message: str) -> str:
    """Elides the middle of long values and of a long message; keeps the end, which has the fix.

    >>> len(shortened("x" * 5000))
    1005
    >>> shortened(f"PPO(a={list(range(9))}, b={list(range(100))}) is no policy")
    'PPO(a=[0, 1, 2, 3, 4, 5, 6, 7, 8]...4, 95, 96, 97, 98, 99]) is no policy'
    """
    parts, position = [], 0
    for start, end in _long_values(message):
        parts += [message[position : start + 30], "..."]  # 30 and 26 characters of the value remain
        position = end - 26
    message = "".join(parts) + message[position:]
    if len(message) <= _MAX_CHARACTERS:
        return message
    return f"{message[: _MAX_CHARACTERS // 2]} ... {message[-_MAX_CHARACTERS // 2 :]}"


def _long_values(message: str) -> list[tuple[int, int]]:
    """Start and end of long bracketed values, such as `PPO(env=...)`, except nested ones."""
    spans: list[tuple[int, int]] = []
    starts = []
    for position, character in enumerate(message):
        if character in "([{":
            starts.append(position)
        elif character in ")]}" and starts:
            start = starts.pop()
            if position - start > _MAX_VALUE_CHARACTERS and message[max(start - 1, 0)].isalnum():
                spans = [span for span in spans if span[0] < start] + [(start, position)]
    return spans


def escape_unprintable(message: str) -> str:
    """Escapes unprintable characters: text from a file may contain newlines or terminal control sequences.

    >>> print(escape_unprintable("algo = " + chr(10) + ":main" + chr(27) + "[2J"))
    algo = \\n:main\\x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


class FdgError(ValueError):
    """An error that the user can fix; the command line prints it without a traceback."""

    def __str__(self) -> str:
        return shortened(escape_unprintable(super().__str__()))


class FdgWarning(UserWarning):
    """A warning: the program runs, but probably not as intended."""


class NoAttributeError(FdgError, AttributeError):
    """A class lacks an attribute that another library's class has."""


class NotIterableError(FdgError, TypeError):
    """Iteration over, or unpacking of, a single value."""


class FrozenError(FdgError, dataclasses.FrozenInstanceError):
    """Assignment to a field of a frozen value."""


class Elsewhere:
    """Marks a name of another library in a class body: its use raises an error with the equivalent.

    >>> class Run:
    ...     predict = Elsewhere("run.policy(observation)")
    >>> Run().predict
    Traceback (most recent call last):
    fdg.errors.NoAttributeError: Run has no predict: write run.policy(observation)
    >>> hasattr(Run(), "predict")
    False

    `help` shows that text; `dir` of an instance leaves the name out (`fdg.arguments.explain_attributes`).
    """

    def __init__(self, fix: str):
        self.fix = fix
        self.__doc__ = f"Not in fdg: write {fix}"

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise NoAttributeError(f"{owner.__name__} has no {self.name}: write {self.fix}")


class GraphError(FdgError):
    """An algorithm, or its dataflow graph, is invalid."""


class PlanError(FdgError):
    """A policy cannot place an algorithm on these devices."""


class RunError(FdgError):
    """A valid run failed while it ran: exit status 1."""


class UnwritableError(RunError):
    """A run cannot be saved, for example on a full disk; its settings are valid, so it can be resumed."""


class HostError(RunError):
    """Python code failed that a running program had called on the host: exit status 1.

    JAX raises an error of its own, whose message ends with this error's text: see `host_error`.
    """


# The line of this error in JAX's message.
_HOST_ERROR = re.compile(rf"^(?:[\w.]+\.)?{HostError.__name__}: (.+)", re.MULTILINE)


def host_error(error: BaseException) -> HostError | None:
    """The `HostError` inside the text of JAX's error of a running program, or None.

    >>> host_error(RuntimeError("INTERNAL: Traceback ...\\nfdg.errors.HostError: step raised ValueError: no"))
    HostError('step raised ValueError: no')
    """
    match = _HOST_ERROR.search(str(error))
    return HostError(match[1]) if match else None


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Context manager that replaces two long errors of JAX, raised by a running program, by one-line errors.

    One is the failure of a host callback (`HostError`), the other a NaN that `JAX_DEBUG_NANS` found.

    >>> with host_errors():
    ...     raise RuntimeError("INTERNAL: Traceback ...\\nfdg.errors.HostError: the judge is asleep")
    Traceback (most recent call last):
    fdg.errors.HostError: the judge is asleep
    """
    try:
        yield
    except Exception as error:
        if cause := host_error(error):
            raise cause from None
        import jax

        config: Any = jax.config
        checks_nan = config.jax_debug_nans or config.jax_debug_infs
        # JAX's exception has no public base class.
        if checks_nan and type(error).__name__ in ("FloatingPointError", "InternalFloatingPointError"):
            raise RunError(
                f"jax_debug_nans or jax_debug_infs ended the run ({one_line(error)}), though metrics may have"
                " NaN (episode_return until an episode ends): unset JAX_DEBUG_NANS and JAX_DEBUG_INFS; fdg"
                " itself stops training at a loss that is not finite"
            ) from error
        raise


def one_line(error: BaseException) -> str:
    """Any exception as one line.

    >>> one_line(ValueError("a\\n  b")), one_line(KeyError())
    ('ValueError: a b', 'KeyError: no message')
    """
    return f"{type(error).__name__}: {' '.join(text_of(error).split()) or 'no message'}"


def text_of(error: BaseException) -> str:
    """`str(error)`; `""` if the exception's own `__str__` fails.

    >>> class Mute(Exception):
    ...     __str__ = None
    >>> text_of(ValueError("no")), text_of(Mute("no"))
    ('no', '')
    """
    try:
        return str(error)
    except Exception:  # user code may raise anything
        return ""


def user_frame(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame of user code in an error's traceback, and its line.

    If the user has no frame in it, returns the innermost frame of any other code, such as a library or
    `algos`, but not of JAX, Flax, Optax, Chex, `fdg` or `envs`. None if there is no such frame either.
    """
    excluded_folders = _folders("jax", "jaxlib", "flax", "optax", "chex", "fdg", "envs")
    outside = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(excluded_folders)
        and not is_generated(frame.f_code.co_filename, frame.f_code.co_name)
        and not ("__file__" in frame.f_globals and frame.f_code.co_filename.startswith("<"))
    ]
    user = (place for place in reversed(outside) if whose_file(place[0].f_code.co_filename) == "user")
    return next(user, [None, *outside][-1])


def _folders(*names: str) -> tuple[str, ...]:
    """The folders of the imported packages among these."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in files if file)


def is_generated(file: str, function: str) -> bool:
    """Whether Python or a library wrote the code, such as a dataclass's `__init__`.

    Code from a terminal, from `python -c` and from `exec` has no file, and counts as user code.

    >>> is_generated("<string>", "__init__"), is_generated("<stdin>", "step")
    (True, False)
    """
    return file.startswith("<frozen") or (file.startswith("<") and function.startswith("__"))


def whose_file(file: str | None) -> str:
    """The owner of a file: `user`, `ours` (fdg) or `library` (which includes Python); None is `user`."""
    if file is None:
        return "user"
    if file.startswith(_folders(*OURS)):
        return "ours"
    installed = {"site-packages", "dist-packages"} & {*file.split(os.sep)}
    return "library" if installed or file.startswith(_STANDARD_LIBRARY) else "user"


def raised(error: BaseException) -> str:
    """An exception of user code as one line, with its file and line: ` (maze.py, line 3)`."""
    if (place := user_frame(error)) is None:
        return one_line(error)
    frame, line = place
    return f"{one_line(error)} ({os.path.basename(frame.f_code.co_filename)}, line {line})"


@contextlib.contextmanager
def user_errors(what: str, code: Any) -> Iterator[None]:
    """Context manager that turns exceptions of user code into one-line `FdgError`s with file and line.

    `what` begins the message. If no line of `code` ran, the message has the line of its definition.
    """
    try:
        yield
    except FdgError:
        raise
    except Exception as error:  # user code may raise anything
        where = "" if user_frame(error) else place_of(code)
        raise FdgError(f"{what} fails: {raised(error)}{where}") from error


def place_of(code: Any) -> str:
    """The location of a class or function, as ` (maze.py, line 3)`; "" if it has no file."""
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return ""
    return f" ({os.path.basename(file)}, line {line})" if file else ""


# JAX logs the traceback of a host function's error before raising it; the log would repeat the message.
for _logger in ("jax._src.callback", "jax._src.debugging"):
    logging.getLogger(_logger).addFilter(lambda x: not (x.exc_info and isinstance(x.exc_info[1], HostError)))


class UnknownNameError(FdgError):
    """An unknown name, for example of an algorithm, environment or policy."""


# Maximum characters of the known names in an error: if a call lists all names, and if none does.
_LISTED_CHARACTERS, _UNLISTED_CHARACTERS = 300, 500
_NAME_CHARACTERS = 100  # maximum characters of the unknown name


def unknown_name(
    kind: str, name: str, known: Iterable[str], listing: str = "", suggested: Sequence[str] = ()
) -> UnknownNameError:
    """The error for an unknown `name` of a `kind` ("environment", "policy"), with the nearest known names.

    `listing` is a call that lists all names. `suggested` are suggestions that replace the nearest name.

    >>> print(unknown_name("policy", "gpu_onyl", ["gpu_only", "central"]))
    unknown policy 'gpu_onyl': did you mean 'gpu_only'? (known: central, gpu_only)
    >>> print(unknown_name("fruit", "appel", ["apple", "maple", *map(str, range(100))], "fruits.names()"))
    unknown fruit 'appel': did you mean 'apple'? (near it: maple; fruits.names() lists all 102)
    >>> print(unknown_name("policy", "mesh", ["gpu_only", "central"]))
    unknown policy 'mesh' (known: central, gpu_only)
    >>> print(unknown_name("policy", "", ["gpu_only", "central"]))
    the name of the policy is empty (known: central, gpu_only)
    """
    name = str(name)
    shown = name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 3]}..."
    if module := module_of_file(name):
        return UnknownNameError(f"unknown {kind} '{shown}': write one of your own as {module}:NAME")
    names = sorted(known)
    similar = nearest(name, names)
    further = f"near it: {', '.join(similar[1:])}; " if similar[1:] else ""
    total = f"{listing} lists all {len(names)}" if listing else f"there are {len(names)}"
    fits = len(", ".join(names)) <= (_LISTED_CHARACTERS if listing else _UNLISTED_CHARACTERS)
    hint_names = f"known: {', '.join(names) or 'none'}" if fits else further + total
    suggestions = [f"'{name_text}'" for name_text in suggested or similar[:1]]
    question = f": did you mean {listed(suggestions)}?" if suggestions else ""
    problem = f"unknown {kind} '{shown}'" if name.strip() else f"the name of the {kind} is empty"
    return UnknownNameError(f"{problem}{question} ({hint_names})")


def module_of_file(name: str) -> str | None:
    """The module name for a Python file's path; None if the name is not a `.py` file.

    >>> module_of_file("./mine/mazes.py"), module_of_file("mazes")
    ('mine.mazes', None)
    """
    return name.removesuffix(".py").strip("./").replace("/", ".") if name.endswith(".py") else None


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Known names that resemble a name, the most similar first, ignoring case; may be empty.

    The equivalent of another library's name comes first, then names within packages.

    >>> nearest("ant", ["ant_4x2", "brax:ant"])
    ['brax:ant', 'ant_4x2']
    >>> nearest("cartpole", ["CartPole-v1", "Acrobot-v1"]), nearest("lr", ["learning_rate", "env"])
    (['CartPole-v1'], ['learning_rate'])
    """
    folded: dict[str, str] = {candidate.lower(): candidate for candidate in known}
    in_packages = [candidate for candidate in folded if name.lower() in candidate.split(":")[1:]]
    similar = [*in_packages, *difflib.get_close_matches(name.lower(), folded, n=count, cutoff=0.5)]
    names = [folded[candidate] for candidate in dict.fromkeys(similar)][:count]
    if (equivalent := aliases.ours(name)) and equivalent in folded.values():
        return [equivalent, *(candidate for candidate in names if candidate != equivalent)][:count]
    return names


def kind_of(value: object) -> str:
    """The name of a value's type; for an array, traced or not, its dtype and shape.

    >>> kind_of({}), kind_of(__import__("numpy").zeros((2, 3)))
    ('dict', 'float64[2, 3]')
    """
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def structure_of(tree: Any) -> str:
    """A pytree as text: containers in Python's syntax, leaves by `kind_of`.

    >>> structure_of(({"a": __import__("numpy").zeros(3)}, None))
    "({'a': float64[3]}, None)"
    """
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key!r}: {structure_of(child)}' for key, child in tree.items())}}}"
    if isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", None)
        parts = [structure_of(child) for child in tree]
        if names is not None:
            fields = (f"{name}={part}" for name, part in zip(names, parts, strict=True))
            return f"{type(tree).__name__}({', '.join(fields)})"
        text = ", ".join(parts)
        return f"[{text}]" if isinstance(tree, list) else f"({text},)" if len(parts) == 1 else f"({text})"
    return "None" if tree is None else kind_of(tree)


def listed(words: Iterable[object], last: str = "or") -> str:
    """Joins words to an English list.

    >>> listed("abc"), listed("ab", "and"), listed("a"), listed("")
    ('a, b or c', 'a and b', 'a', 'none')
    """
    texts = [str(word) for word in words] or ["none"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"
