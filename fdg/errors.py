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

_LONGEST = 1000  # characters of an error
OURS = ("fdg", "envs", "algos", "policies")  # our packages
_LONGEST_VALUE = 200  # characters in the brackets of a value
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def shortened(message: str) -> str:
    """Elides the middle of long values and of a long message; keeps the end, where the fix is.

    >>> len(shortened("x" * 5000))
    1005
    >>> shortened(f"PPO(a={list(range(9))}, b={list(range(100))}) is no policy")
    'PPO(a=[0, 1, 2, 3, 4, 5, 6, 7, 8]...4, 95, 96, 97, 98, 99]) is no policy'
    """
    parts, at = [], 0
    for start, end in _values(message):
        parts += [message[at : start + 30], "..."]
        at = end - 26
    message = "".join(parts) + message[at:]
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"


def _values(message: str) -> list[tuple[int, int]]:
    """Start and end of long bracketed values, `PPO(env=...)`, except nested ones."""
    found: list[tuple[int, int]] = []
    opened = []
    for at, character in enumerate(message):
        if character in "([{":
            opened.append(at)
        elif character in ")]}" and opened:
            start = opened.pop()
            if at - start > _LONGEST_VALUE and message[max(start - 1, 0)].isalnum():
                found = [one for one in found if one[0] < start] + [(start, at)]
    return found


def printable(message: str) -> str:
    """Escapes unprintable characters: text from a file may contain newlines or terminal control sequences.

    >>> print(printable("algo = " + chr(10) + ":main" + chr(27) + "[2J"))
    algo = \\n:main\\x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


class FdgError(ValueError):
    """A request that cannot be carried out; the command line prints it without a traceback."""

    def __str__(self) -> str:
        return shortened(printable(super().__str__()))


class FdgWarning(UserWarning):
    """A warning: the program runs, but probably not as intended."""


class NoAttributeError(FdgError, AttributeError):
    """An attribute that another library's class has, and this class does not."""


class NotIterableError(FdgError, TypeError):
    """Iteration over, or unpacking of, a single value."""


class FrozenError(FdgError, dataclasses.FrozenInstanceError):
    """Assignment to a field of a frozen value."""


class Elsewhere:
    """Marks a name of other libraries in a class body: the error names its equivalent here.

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
        self.__doc__ = f"Not here: write {fix}"

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise NoAttributeError(f"{owner.__name__} has no {self.name}: write {self.fix}")


class GraphError(FdgError):
    """An algorithm, or its dataflow graph, is invalid."""


class PlanError(FdgError):
    """A policy cannot be carried out on the given devices."""


class RunError(FdgError):
    """A valid run failed while running: exit status 1."""


class UnwritableError(RunError):
    """A run cannot be saved, such as on a full disk; its settings are valid, so it can be resumed."""


class HostError(RunError):
    """Python code that a running program called on the host failed: exit status 1.

    JAX only raises its text, at the end of the traceback in its own error: see `host_error`.
    """


# The last line of that traceback.
_HOST_ERROR = re.compile(rf"^(?:[\w.]+\.)?{HostError.__name__}: (.+)", re.MULTILINE)


def host_error(error: BaseException) -> HostError | None:
    """The `HostError` that JAX's error of a running program quotes; None if it quotes none.

    >>> host_error(RuntimeError("INTERNAL: Traceback ...\\nfdg.errors.HostError: step raised ValueError: no"))
    HostError('step raised ValueError: no')
    """
    found = _HOST_ERROR.search(str(error))
    return HostError(found[1]) if found else None


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Context manager: raises a failed host callback's `HostError` in place of JAX's long error.

    >>> with host_errors():
    ...     raise RuntimeError("INTERNAL: Traceback ...\\nfdg.errors.HostError: the judge is asleep")
    Traceback (most recent call last):
    fdg.errors.HostError: the judge is asleep
    """
    try:
        yield
    except RuntimeError as error:
        if cause := host_error(error):
            raise cause from None
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


def own_frame(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame in user code that led to an error, and its line; None if there is none.

    Files of packages and of Python itself are not their own, nor are our algorithms and policies, which
    a user may call; other files of ours and of JAX's never are.
    """
    ours = _folders("jax", "jaxlib", "flax", "optax", "chex", "fdg", "envs")
    outside = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(ours)
        and not is_generated(frame.f_code.co_filename, frame.f_code.co_name)
        and not ("__file__" in frame.f_globals and frame.f_code.co_filename.startswith("<"))
    ]
    own = (each for each in reversed(outside) if whose_file(each[0].f_code.co_filename) == "user")
    return next(own, [None, *outside][-1])


def _folders(*names: str) -> tuple[str, ...]:
    """Of these packages, the imported modules."""
    found = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in found if file)


def is_generated(file: str, function: str) -> bool:
    """Whether Python or a library wrote the code, such as a dataclass's `__init__`.

    Code of a terminal, of `python -c` and of `exec` is in no file, and counts as user code.

    >>> is_generated("<string>", "__init__"), is_generated("<stdin>", "step")
    (True, False)
    """
    return file.startswith("<frozen") or (file.startswith("<") and function.startswith("__"))


def whose_file(file: str | None) -> str:
    """`user`, `ours` or `library` (which includes Python itself); code outside of files counts as user
    code."""
    if file is None:
        return "user"
    if file.startswith(_folders(*OURS)):
        return "ours"
    installed = {"site-packages", "dist-packages"} & {*file.split(os.sep)}
    return "library" if installed or file.startswith(_STANDARD_LIBRARY) else "user"


def raised(error: BaseException) -> str:
    """An exception of user code as one line, with the line of their file: ` (maze.py, line 3)`."""
    found = own_frame(error)
    if found is None:
        return one_line(error)
    return f"{one_line(error)} ({os.path.basename(found[0].f_code.co_filename)}, line {found[1]})"


@contextlib.contextmanager
def own_code(what: str, code: Any) -> Iterator[None]:
    """Context manager: exceptions of user code become one-line `FdgError`s with file and line.

    `what` begins the message; the line of `code` is named if none of its lines ran.
    """
    try:
        yield
    except FdgError:
        raise
    except Exception as error:  # user code may raise anything
        where = "" if own_frame(error) else place_of(code)
        raise FdgError(f"{what} fails: {raised(error)}{where}") from error


def place_of(code: Any) -> str:
    """The location of a class or function: ` (maze.py, line 3)`; "" if it is in no file."""
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return ""
    return f" ({os.path.basename(file)}, line {line})" if file else ""


def _is_no_host_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HostError))


# JAX logs the traceback of a host function's error before it raises it: once is enough.
for _logger in ("jax._src.callback", "jax._src.debugging"):
    logging.getLogger(_logger).addFilter(_is_no_host_error)


class UnknownNameError(FdgError):
    """An unknown name, for example of an algorithm, environment or policy."""


_FEW, _SOME = 300, 500  # characters of listed names; of a list that appears nowhere else


def unknown_name(
    kind: str, name: str, known: Iterable[str], listing: str = "", meant: Sequence[str] = ()
) -> UnknownNameError:
    """Error for an unknown `name` of some `kind` ("environment", "policy"), with the nearest known names.

    `listing` says where all can be seen, and `meant` are names that precede the nearest ones.

    >>> print(unknown_name("policy", "gpu_onyl", ["gpu_only", "central"]))
    unknown policy 'gpu_onyl': did you mean 'gpu_only'? (known: central, gpu_only)
    >>> print(unknown_name("fruit", "appel", ["apple", "maple", *map(str, range(100))], "fruits.names()"))
    unknown fruit 'appel': did you mean 'apple'? (near it: maple; fruits.names() lists all 102)
    >>> print(unknown_name("policy", "mesh", ["gpu_only", "central"]))
    unknown policy 'mesh' (known: central, gpu_only)
    """
    if module := module_of_file(str(name)):
        return UnknownNameError(f"unknown {kind} '{name}': one of your own is written {module}:NAME")
    names = sorted(known)
    close = nearest(str(name), names)
    near = f"near it: {', '.join(close[1:])}; " if close[1:] else ""
    all_of_them = f"{listing} lists all {len(names)}" if listing else f"there are {len(names)}"
    few = len(", ".join(names)) <= (_FEW if listing else _SOME)
    rest = f"known: {', '.join(names) or 'none'}" if few else near + all_of_them
    likely = [f"'{one}'" for one in meant or close[:1]]
    hint = f": did you mean {listed(likely)}?" if likely else ""
    return UnknownNameError(f"unknown {kind} '{name}'{hint} ({rest})")


def module_of_file(name: str) -> str | None:
    """The module name for a Python file's path; None if the name is not a `.py` file.

    >>> module_of_file("./mine/mazes.py"), module_of_file("mazes")
    ('mine.mazes', None)
    """
    return name.removesuffix(".py").strip("./").replace("/", ".") if name.endswith(".py") else None


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Known names similar to a name, the most similar first, ignoring case; possibly none.

    Other libraries' exact names come first, then names within packages.

    >>> nearest("ant", ["ant_4x2", "brax:ant"])
    ['brax:ant', 'ant_4x2']
    >>> nearest("cartpole", ["CartPole-v1", "Acrobot-v1"]), nearest("lr", ["learning_rate", "env"])
    (['CartPole-v1'], ['learning_rate'])
    """
    folded: dict[str, str] = {candidate.lower(): candidate for candidate in known}
    within = [one for one in folded if name.lower() in one.split(":")[1:]]
    close = [*within, *difflib.get_close_matches(name.lower(), folded, n=count, cutoff=0.5)]
    found = [folded[candidate] for candidate in dict.fromkeys(close)][:count]
    if (meant := aliases.ours(name)) and meant in folded.values():
        return [meant, *(one for one in found if one != meant)][:count]
    return found


def kind_of(value: object) -> str:
    """The name of a value's type; for an array, traced or not, its dtype and shape.

    >>> kind_of({}), kind_of(__import__("numpy").zeros((2, 3)))
    ('dict', 'float64[2, 3]')
    """
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def structure_of(tree: Any) -> str:
    """Prints a pytree: containers in Python's syntax, leaves by `kind_of`.

    >>> structure_of(({"a": __import__("numpy").zeros(3)}, None))
    "({'a': float64[3]}, None)"
    """
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key!r}: {structure_of(one)}' for key, one in tree.items())}}}"
    if isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", None)
        parts = [structure_of(one) for one in tree]
        if names is not None:
            named = (f"{name}={part}" for name, part in zip(names, parts, strict=True))
            return f"{type(tree).__name__}({', '.join(named)})"
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
