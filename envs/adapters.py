"""Helpers for the adapters to other packages: imports, and checks of parameters."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from envs.quiet import quietly, relaxed_checks
from envs.spaces import nested_tuple
from fdg.errors import FdgError
from fdg.kinds import describe_alternatives

KINDS = bool | int | float | str | tuple  # types of parameters, all hashable


@contextlib.contextmanager
def importing(who_needs: str, package: str, extra: str) -> Iterator[None]:
    """A context for imports, also while JAX traces; errors begin with `who_needs`, such as "maze needs"."""
    try:
        with jax.ensure_compile_time_eval(), quietly(), relaxed_checks():
            yield
    except ModuleNotFoundError as error:
        raise FdgError(
            f"{who_needs} {package}, and {error.name} is not installed: pip install 'fdg[{extra}]'"
        ) from error


@contextlib.contextmanager
def converting_errors(where: str, package: str, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """A context for a call of a package's constructor, whose errors about arguments become an `FdgError`."""
    try:
        yield
    except FdgError:  # such as for a missing package
        raise
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value!r}" for name, value in arguments)
        message = " ".join(str(error).split())
        raise FdgError(f"{where}: {package} does not accept {values}: {message}") from error


def check_names(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises an `FdgError`, which begins with `where` ("environment 'x'"), if a parameter is unknown."""
    known = [*known]
    if unknown := next((name for name in names if name not in known), None):
        takes = f"takes {', '.join(known)}" if known else "takes no parameters"
        raise FdgError(f"{where}: unknown parameter '{unknown}': {takes}")


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


def check_type(where: str, name: str, value: Any, kind: type) -> Any:
    """Returns a parameter's value if it has the type `kind`; an integer becomes a float where needed."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise FdgError(f"{where}: {name}={value!r} must be {describe_alternatives(kind)[0]}")
    return value


def check_count(where: str, name: str, value: Any) -> None:
    """Raises an `FdgError` unless a parameter is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise FdgError(f"{where}: {name}={value!r} must be an integer of at least 1")
