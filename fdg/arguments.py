"""Checks arguments of public functions against their type annotations, with one-line errors."""

import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from fdg.aliases import METHOD_FIXES, instead, ours
from fdg.errors import (
    Elsewhere,
    FdgError,
    FrozenError,
    NoAttributeError,
    listed,
    nearest,
    one_line,
    unknown_name,
)
from fdg.kinds import TOO_LARGE, as_int, dataclass_fields, describe_alternatives, matches, number_fix

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_SIMPLE_TYPES = {bool, int, float, str, types.NoneType}  # the types that `check_options` checks
_UNIONS = (typing.Union, types.UnionType)
_SELF_NAMES = ("self", "cls", "_cls")  # names of the first parameter of methods and of `__new__`
_MAX_QUOTED = 60  # characters of a value in an error message


def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes wrong arguments of a function or dataclass one-line `FdgError`s, and NumPy's integers Python's.

    Raises:
      FdgError: an unknown argument (the message names the most similar one), a missing argument, or a wrong
        type as in `check_arguments`.

    >>> @checked
    ... def play(path: str, total_steps: int = 1) -> None: ...
    >>> play("a.gif", total_timesteps=3)
    Traceback (most recent call last):
    fdg.errors.UnknownNameError: unknown argument of play 'total_timesteps': did you mean 'total_steps'? (...)
    >>> play(total_steps=3)
    Traceback (most recent call last):
    fdg.errors.FdgError: play: path is missing: give a string
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        check_arguments(function, _bind(function, signature, args, kwargs))
        return function(*map(as_int, args), **{name: as_int(value) for name, value in kwargs.items()})

    return call


def checked_names(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Like `checked`, without type checks. A valid call has no overhead, so it suits hot paths.

    For a named tuple, `__new__` is checked.
    """
    if isinstance(function, type):
        cls: Any = function
        if issubclass(cls, tuple):
            cls.__new__ = staticmethod(checked_names(cls.__new__))
        else:
            cls.__init__ = checked_names(cls.__init__)
        return cls
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TypeError:
            _bind(function, signature, args, kwargs)
            raise

    return call


def explain_frozen(cls: type, word: str) -> None:
    """Makes assignment to a field of a frozen dataclass raise an `FdgError` with the fix.

    Unknown attributes raise an `FdgError` too (`explain_attributes`). Messages call an instance `word`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Mine:
    ...     rate: float = 0.1
    >>> explain_frozen(Mine, "algorithm")
    >>> Mine().rate = 0.5
    Traceback (most recent call last):
    fdg.errors.FrozenError: Mine does not change: write algorithm = dataclasses.replace(algorithm, rate=0.5)
    """
    explain_attributes(cls)
    original = cls.__dict__.get("__setattr__")
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def assign(self: Any, name: str, value: Any) -> None:
        try:
            original(self, name, value)
        except dataclasses.FrozenInstanceError:
            kind, names = type(self).__name__, [field.name for field in dataclass_fields(self) if field.init]
            problem = (
                f"{kind} does not change: write {word} = dataclasses.replace({word}, {name}={quoted(value)})"
            )
            if name in names and name not in vars(self) and type(self) is not cls:  # in a subclass's __init__
                problem = (
                    f"{kind} does not change, as every {cls.__name__}: in its __init__ write"
                    f" super().__init__({name}) in place of self.{name} = {name}"
                )
            elif name not in names and hasattr(self, name):
                source = listed(names, "and") if len(names) < 6 else "its fields"
                problem = (
                    f"{kind} does not change: its {name} is computed from {source}: create another {word}"
                    " with dataclasses.replace"
                )
            elif name not in names:
                problem = str(unknown_name(f"field of {kind}", name, names, f"help({kind})"))
            raise FrozenError(problem) from None

    cls.__setattr__ = assign  # type: ignore[assignment, method-assign]


def explain_attributes(cls: type) -> None:
    """Makes an unknown public attribute of a class raise an `FdgError` with similar known names.

    A class that defines `__getattr__` keeps it. Arguments of `__init__` are checked by `checked_names`.

    >>> class Run:
    ...     policy = None
    >>> explain_attributes(Run)
    >>> Run().polciy
    Traceback (most recent call last):
    fdg.arguments.UnknownAttributeError: unknown attribute of Run 'polciy': did you mean 'policy'? (...)
    >>> hasattr(Run(), "polciy")
    False
    """
    if "__init__" in vars(cls) and not hasattr(cls.__init__, "__wrapped__"):  # type: ignore[misc]
        checked_names(cls)
    if hasattr(cls, "__getattr__"):
        return

    def raise_unknown(self: Any, name: str) -> Any:
        """Raises an error with the attributes that resemble an unknown one."""
        is_known = any(name in vars(base) for base in type(self).__mro__) or name in [
            field.name for field in dataclass_fields(cls)
        ]
        if name.startswith("_") or is_known:  # properties and `Elsewhere` raise their own errors
            return object.__getattribute__(self, name)
        error = UnknownAttributeError(type(self), name)
        # Not stored as `obj`: Python would then add a second "Did you mean".
        error.name, error.owner = name, self
        raise error

    def listed_names(self: Any) -> list[str]:
        """The names of attributes, without names of other libraries (`Elsewhere`)."""
        values = {name: value for base in type(self).__mro__[::-1] for name, value in vars(base).items()}
        return [name for name in object.__dir__(self) if not isinstance(values.get(name), Elsewhere)]

    raise_unknown.__name__, listed_names.__name__ = "__getattr__", "__dir__"  # as `help` shows them
    cls.__getattr__, cls.__dir__ = raise_unknown, listed_names  # type: ignore[assignment, attr-defined, method-assign]


class UnknownAttributeError(NoAttributeError):
    """An unknown attribute. It formats its message lazily, since `hasattr` raises many such errors."""

    owner: Any = None  # the object without the attribute

    def __str__(self) -> str:
        cls, name = self.args
        if hasattr(cls, "iterate") and name in METHOD_FIXES:
            return f"{cls.__name__} has no {name}: {METHOD_FIXES[name]}"
        fields = [field.name for field in dataclass_fields(cls)]
        names = {*fields, *(attribute for attribute in dir(cls) if not attribute.startswith("_"))}
        known = [attribute for attribute in names if attribute in fields or hasattr(cls, attribute)]
        return str(unknown_name(f"attribute of {cls.__name__}", name, known, f"dir of a {cls.__name__}"))


def check_call(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any], what: str = "argument") -> None:
    """Checks that a class or function accepts these arguments: all are known, and no required one is missing.

    `args` do not include `self`; messages call an argument `what`. A class must pass `kinds.check_decorated`.
    """
    dataclass_fields(cls)
    function, args = (cls.__init__, (None, *args)) if isinstance(cls, type) else (cls, tuple(args))  # type: ignore[misc]
    _bind(function, inspect.signature(function), args, kwargs, getattr(cls, "__name__", ""), what)


def check_takes(function: Callable, names: Sequence[str], what: str) -> None:
    """Checks that a user-defined function can be called with these positional arguments.

    Messages call the function `what`, such as `Mine.step`.

    >>> check_takes(lambda action: None, ("key", "state", "action"), "Maze.step")
    Traceback (most recent call last):
    fdg.errors.FdgError: Maze.step takes (action), but is called with (key, state, action): let it take these
    """
    if isinstance(function, type):
        name = function.__name__
        raise FdgError(f"{what}: {name} is a class: give an instance, {name}(...)")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function without signature
        return
    try:
        signature.bind(*names)
    except TypeError:
        raise _signature_error(signature, names, what, "") from None
    check_order(function, names, what)


def check_order(function: Callable, names: Sequence[str], what: str) -> None:
    """Checks that a user-defined function's parameters are in the order in which arguments are passed.

    Messages call the function `what`.

    >>> check_order(lambda obs, key: None, ("key", "obs"), "it")
    Traceback (most recent call last):
    fdg.errors.FdgError: it takes (obs, key), but is called with (key, obs): let it take these, in this order
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [_canonical_name(p.name) for p in signature.parameters.values() if p.kind in kinds]
    arguments = [_canonical_name(name) for name in names]
    if any(p != a and p in arguments for p, a in zip(parameters, arguments, strict=False)):
        raise _signature_error(signature, names, what, ", in this order")


def _signature_error(signature: inspect.Signature, names: Sequence[str], what: str, end: str) -> FdgError:
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in signature.parameters.values()):
        end = " by position, so remove the *"
    takes, called = str(signature).partition(" -> ")[0], ", ".join(names)
    return FdgError(f"{what} takes {takes}, but is called with ({called}): let it take these{end}")


def _canonical_name(name: str) -> str:
    """A parameter's name without plural and underscores, and with synonyms replaced, for comparisons.

    >>> [_canonical_name(name) for name in ("keys", "_rng", "env_state", "params")]
    ['key', 'key', 'state', 'parameter']
    """
    stem = name.strip("_").removesuffix("s")
    return {"rng": "key", "env_state": "state", "param": "parameter", "ob": "observation"}.get(stem, stem)


def _bind(
    function: Callable,
    signature: inspect.Signature,
    args: tuple,
    kwargs: Mapping[str, Any],
    name: str = "",
    what: str = "argument",
) -> Mapping[str, Any]:
    """The arguments of a call by name; raises an `FdgError` if the function does not accept them."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        name, parameters = name or _call_name(function), signature.parameters
        names = [p for p in parameters if p not in _SELF_NAMES]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for key in kwargs:
            if key not in names and not takes_any:
                if ours(key) not in names and (fix := instead(key)):
                    raise FdgError(f"unknown {what} of {name} '{key}': {as_arguments(fix)}") from None
                unused = [
                    p for p in names[max(len(args) - len(parameters) + len(names), 0) :] if p not in kwargs
                ]
                suggestion = unused if len(unused) == 1 and not nearest(key, unused) else ()
                raise unknown_name(
                    f"{what} of {name}", key, unused or names, f"help({name})", suggestion
                ) from None
        positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(args) > len(positional):
            surplus = f"{quoted(args[len(positional)])} is one positional argument too many"
            accepted = listed([p.name for p in positional if p.name in names], "and")
            raise FdgError(f"{name}: {surplus}: only {accepted} may be positional; give it by name") from None
        for p in list(parameters.values())[len(args) :]:
            if p.default is p.empty and p.name not in kwargs:
                annotation = dict(_annotations(function)).get(p.name)
                required = [p.name for p in positional if p.default is p.empty and p.name in names]
                fix = f": write {name}({', '.join(required)}, ...)"
                if annotation:
                    fix = f": give {listed(describe_alternatives(annotation))}"
                if all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in positional):
                    fix = f": write {name}({', '.join(names)})"
                raise FdgError(f"{name}: {p.name} is missing{fix}") from None
        raise FdgError(f"{name}: {one_line(error)}") from None


def _call_name(function: Callable) -> str:
    """A function's name; for a class's `__init__` or `__new__`, the class's.

    >>> _call_name(str.upper), _call_name(FdgError.__str__)
    ('upper', '__str__')
    """
    owner = function.__qualname__.split(".")[-2:]
    return owner[0] if owner[-1] in ("__init__", "__new__") else function.__name__


def check_arguments(function: Callable, arguments: Mapping[str, Any]) -> None:
    """Checks arguments against a function's type annotations.

    A number may be a NumPy or JAX scalar; `True` and NaN do not count as numbers. Annotations that are
    protocols, type variables or `Any` are not checked.

    >>> def play(path: str, episodes: int = 1) -> None: ...
    >>> check_arguments(play, {"episodes": "3"})
    Traceback (most recent call last):
    fdg.errors.FdgError: play(episodes='3'): give an integer: write 3
    >>> check_arguments(play, {"episodes": 3e1})
    Traceback (most recent call last):
    fdg.errors.FdgError: play(episodes=30.0): give an integer: write 30
    """
    for name, kind in _annotations(function):
        if name.startswith("**"):
            for key, value in arguments.get(name[2:], {}).items():
                _check_value(function, key, value, kind, arguments)
        elif name in arguments:
            _check_value(function, name, arguments[name], kind, arguments)


def check_fields(instance: Any, *names: str) -> None:
    """Checks fields of a dataclass like `check_arguments`; call it in `__post_init__`."""
    check_arguments(type(instance), {name: getattr(instance, name) for name in names})


def check_at_least(least: int, **values: Any) -> None:
    """Raises an error for arguments that are not integers of at least `least`; None is accepted."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise FdgError(f"{name}={value!r}: give an integer of at least {least}")


def check_members(what: str, value: Any, names: Sequence[str], fix: str) -> None:
    """Raises an error for a user's object that lacks some of these attributes and methods.

    >>> check_members("source", 3, ("real", "begin", "tick"), "give an fdg.Source")
    Traceback (most recent call last):
    fdg.errors.FdgError: source=3 has no begin or tick: give an fdg.Source
    """
    if isinstance(value, type):
        raise FdgError(f"{what}={value.__name__} is a class: give an instance, {value.__name__}(...)")
    if missing := [name for name in names if not hasattr(value, name)]:
        raise FdgError(f"{what}={quoted(value)} has no {listed(missing)}: {fix}")


def check_options(where: str, takes: Any, options: Mapping[str, Any]) -> None:
    """Checks the types of options against the annotations of the function that takes them, or its defaults.

    Only options of type bool, int, float or str are checked. `takes` is a function or class, or a mapping
    from names to defaults; a function's defaults count only if they are bool. `where` begins the message.

    >>> check_options("environment 'maze'", {"slippery": False}, {"slippery": "no"})
    Traceback (most recent call last):
    fdg.errors.FdgError: environment 'maze': slippery='no' must be True or False
    """
    for name, kind in _option_kinds(takes).items():
        if name in options and not matches(options[name], kind):
            expected = listed(dict.fromkeys(describe_alternatives(kind)))
            fix = number_fix(options[name], kind, name)
            raise FdgError(f"{where}: {name}={quoted(options[name])} must be {expected}{fix}")


def _option_kinds(takes: Any) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    by_default: dict[type, type] = {bool: bool, int: int, float: float, str: str}
    if not isinstance(takes, Mapping):
        by_default = {bool: bool}
        with contextlib.suppress(Exception):  # annotations may be arbitrary code
            annotated = vars(takes).get("__init__", takes) if isinstance(takes, type) else takes
            hints = typing.get_type_hints(annotated)
        try:
            takes = {p.name: p.default for p in inspect.signature(takes).parameters.values()}
        except (TypeError, ValueError):  # a C function without signature
            return {}
    kinds = {name: hints.get(name, by_default.get(type(default), Any)) for name, default in takes.items()}
    return {
        name: kind | None if takes[name] is None else kind  # `size: int = None` takes None too
        for name, kind in kinds.items()
        if set(typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else [kind]) <= _SIMPLE_TYPES
    }


def order_of(function: Callable, name: str, arguments: Mapping[str, Any]) -> str:
    """A fix that shows the order of parameters, if two arguments of a call were exchanged; else "".

    >>> def play(path: str, episodes: int = 1) -> None: ...
    >>> order_of(play, "path", {"path": 3, "episodes": "a.gif"})
    ': the order is play(path, episodes)'
    """
    kinds = {other: Any for other in inspect.signature(function).parameters if other in arguments} | {
        other: kind
        for other, kind in _annotations(function)
        if not other.startswith("**") and other in arguments
    }
    value, annotation = arguments.get(name), kinds.pop(name, None)

    def fits(value: Any, kind: Any) -> bool:  # protocols match anything, so exclude plain values
        is_simple = type(value) in _SIMPLE_TYPES
        return matches(value, kind) and not (is_simple and getattr(kind, "_is_protocol", False))

    others = {other: kind for other, kind in kinds.items() if arguments[other] is not None}
    if not any(fits(value, kind) and fits(arguments[other], annotation) for other, kind in others.items()):
        return ""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    return f": the order is {_call_name(function)}({', '.join(names)})"


def _check_value(function: Callable, name: str, value: Any, kind: Any, arguments: Mapping[str, Any]) -> None:
    """Raises an `FdgError` with a fix if an argument's value does not match its annotation `kind`."""
    if not matches(value, kind):
        is_whole = isinstance(value, float) and value.is_integer() and matches(int(value), kind)
        fix = f": write {int(value)}" if is_whole else number_fix(value, kind, name)
        if not fix and (isinstance(value, str) or not isinstance(value, Iterable | None)):
            fix = f": write [{quoted(value)}]" if matches([value], kind) else ""
        if isinstance(value, int) and abs(value) >= TOO_LARGE:
            fix = f" below {TOO_LARGE:.0e}"
        fix = fix or order_of(function, name, arguments)
        expected = listed(dict.fromkeys(describe_alternatives(kind)))
        raise FdgError(f"{_call_name(function)}({name}={quoted(value)}): give {expected}{fix}")


def quoted(value: Any) -> str:
    """The `repr` of a value on one line, with its middle elided if it is long.

    >>> quoted("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx'"
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value nested too deep; a user's `__repr__`
        text = object.__repr__(value)
    half = (_MAX_QUOTED - 3) // 2
    return text if len(text) <= _MAX_QUOTED else f"{text[:half]}...{text[-half - 1 :]}"


def as_arguments(message: str) -> str:
    """Rewrites a message about command-line flags as one about Python arguments.

    >>> as_arguments("--num-seeds 0: it must be at least 1")
    'num_seeds=0: it must be at least 1'
    >>> as_arguments("use --num-seeds 6 or 9, or --resume")
    'use num_seeds=6 or 9, or resume'
    >>> as_arguments("--from runs/old: give another run, or leave --from out")
    'start_from=runs/old: give another run, or leave start_from out'
    """
    if re.search(r"\bfdg[. ](?:train|launch|calibrate)\b", message):  # it contains a command line
        return message
    message = re.sub(r"(?<!\S)--from\b", "--start-from", message)
    with_equals = re.sub(
        r"(?<!\S)--([a-z][\w-]*) (?=[\w.+-])(?!(?:or|and|is|it|out|needs|has)\b)", r"--\1=", message
    )
    return re.sub(r"(?<!\S)--([a-z][\w-]*)", lambda match: match[1].replace("-", "_"), with_equals)


def as_flags(message: str, names: Iterable[str]) -> str:
    """Rewrites a message that begins with an argument in `names` as a message about the command-line flag.

    Arguments without a value, such as `format=`, become flags too, even if they are not in `names`.

    >>> as_flags("max_steps=0: give an integer", ["max_steps"]), as_flags("rows=0: too few", ["max_steps"])
    ('--max-steps 0: give an integer', 'rows=0: too few')
    >>> as_flags("give lora_rank=, or leave format= out", [])
    'give --lora-rank, or leave --format out'
    """
    message = re.sub(
        r"(?<!\S)([a-z][a-z_]+)=(?=[\s,:;]|$)", lambda match: f"--{match[1].replace('_', '-')}", message
    )
    argument = re.match(r"([a-z_]+)=(?=\S+: )", message)
    if argument is None or argument[1] not in names:
        return message
    return f"--{argument[1].replace('_', '-')} {message[argument.end() :]}"


@functools.cache
def _annotations(function: Callable) -> list[tuple[str, Any]]:
    """Each parameter's name (`**name` for variadic keywords) with its annotation."""
    hints = typing.get_type_hints(function)  # for a dataclass, its fields' annotations
    parameters = inspect.signature(function).parameters.values()
    stars = {parameter.name: "**" for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
    return [
        (stars.get(parameter.name, "") + parameter.name, hints[parameter.name])
        for parameter in parameters
        if hints.get(parameter.name, Any) is not Any and parameter.kind is not parameter.VAR_POSITIONAL
    ]
