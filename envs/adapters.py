"""Helpers for the adapters to other packages (`from_*.py`): imports, and checks of parameters.

In every function `where` begins the error messages, such as "environment 'maze'".
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from envs.quiet import quietly, relaxed_checks
from envs.spaces import nested_tuple
from fdg.arguments import check_options
from fdg.errors import FdgError
from fdg.kinds import describe_alternatives

# Types of parameters, all hashable; SCALARS where a library takes no tuples.
SCALARS = bool | int | float | str
KINDS = SCALARS | tuple

Override: TypeAlias = "bool | int | float | str | tuple[Any, ...]"  # value of one parameter
# (name, value) of the parameters that a user gives for a library's environment, sorted by name
Overrides: TypeAlias = tuple[tuple[str, Override], ...]


@contextlib.contextmanager
def importing(who_needs: str, package: str, extra: str) -> Iterator[None]:
    """A context for imports, also while JAX traces; a missing module raises an `FdgError`.

    The error begins with `who_needs`, such as "maze needs", and names fdg's `extra` that has `package`.
    """
    try:
        with jax.ensure_compile_time_eval(), quietly(), relaxed_checks():
            yield
    except ModuleNotFoundError as error:
        raise FdgError(
            f"{who_needs} {package}, and {error.name} is not installed: pip install 'fdg[{extra}]'"
        ) from error


@contextlib.contextmanager
def converting_errors(where: str, package: str, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """A context for a call of a package's constructor, whose errors about arguments become an `FdgError`.

    `arguments` are the names and values that the error shows.
    """
    try:
        yield
    except FdgError:  # such as for a missing package
        raise
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value!r}" for name, value in arguments)
        message = " ".join(str(error).split())
        raise FdgError(f"{where}: {package} does not accept {values}: {message}") from error


def check_names(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises an `FdgError` if one of the parameters `names` is not in `known`."""
    known = [*known]
    if unknown := next((name for name in names if name not in known), None):
        takes = f"takes {', '.join(known)}" if known else "takes no parameters"
        raise FdgError(f"{where}: unknown parameter '{unknown}': {takes}")


def checked_overrides(
    where: str,
    overrides: Mapping[str, Any],
    defaults_of: Callable[[], Mapping[str, Any]],
    ours: Iterable[str] = (),
    kinds: Any = KINDS,
    converts: bool = False,
) -> Overrides:
    """Parameters for a library's environment as a hashable value; refuses unknown ones and wrong types.

    `defaults_of` returns the library's parameters with their defaults (None: any type is right). It is called
    only if there are overrides, because it may import the library. `ours` are fdg's own parameters, which
    messages list too. `kinds` are the permitted types. With `converts`, an integer becomes a float where the
    default is a float.
    """
    if not overrides:
        return ()
    defaults = defaults_of()
    check_names(where, overrides, sorted((*defaults, *ours)))
    values = hashable_parameters(where, overrides, kinds)
    if converts:
        values = {name: _converted(where, name, value, defaults[name]) for name, value in values.items()}
    else:
        check_options(where, defaults, values)
    return tuple(sorted(values.items()))


def _converted(where: str, name: str, value: Any, default: Any) -> Any:
    """The value, an integer as a float if the default is a float; raises unless it has the default's type.

    If the default is None, any type is right.
    """
    kind = next((kind for kind in (bool, int, float, str, tuple) if isinstance(default, kind)), None)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is not None and type(value) is not kind:
        raise FdgError(f"{where}: {name}={value!r} must be {describe_alternatives(kind)[0]}")
    return value


def hashable_parameters(where: str, arguments: Mapping[str, Any], kinds: Any = KINDS) -> dict[str, Any]:
    """The parameters with lists as tuples; raises an `FdgError` for a value that is not of `kinds`."""
    values = {name: nested_tuple(value) for name, value in arguments.items()}
    for name, value in values.items():
        if not isinstance(value, kinds):
            expected = "number, string or tuple" if issubclass(tuple, kinds) else "number or string"
            raise FdgError(
                f"{where}: {name}={value!r} must be a Python {expected}, so that the environment hashes"
            )
    return values


def check_count(where: str, name: str, value: Any, least: int = 1) -> None:
    """Raises an `FdgError` unless a parameter is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise FdgError(f"{where}: {name}={value!r} must be an integer of at least {least}")
