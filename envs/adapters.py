"""Helpers of adapters of other packages: imports, and checks of parameters."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from envs.quiet import quietly, relaxed_checks
from fdg.errors import FdgError
from fdg.kinds import describe_alternatives

PLAIN = bool | int | float | str | tuple  # types of parameters, all hashable


@contextlib.contextmanager
def importing(who_needs: str, package: str, extra: str) -> Iterator[None]:
    """A context for a package's import, possibly while a program is being traced."""
    try:
        with jax.ensure_compile_time_eval(), quietly(), relaxed_checks():
            yield
    except ModuleNotFoundError as error:
        raise FdgError(
            f"{who_needs} {package}, but {error.name} is not installed: pip install 'fdg[{extra}]'"
        ) from error


@contextlib.contextmanager
def accepting(label: str, package: str, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """A context for a package's constructor, which may refuse its arguments."""
    try:
        yield
    except FdgError:  # already explained, such as a missing package
        raise
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value!r}" for name, value in arguments)
        reason = " ".join(str(error).split())
        raise FdgError(f"{label}: {package} does not accept {values}: {reason}") from error


def check_names(label: str, names: Iterable[str], parameters: Iterable[str]) -> None:
    """Raises an `FdgError` for the first unknown parameter; the message lists the accepted ones."""
    parameters = [*parameters]
    if unknown_name := next((name for name in names if name not in parameters), None):
        takes = f"takes {', '.join(parameters)}" if parameters else "takes no parameters"
        raise FdgError(f"{label}: unknown parameter '{unknown_name}': {takes}")


def lists_to_tuples(label: str, parameters: Mapping[str, Any], kinds: Any = PLAIN) -> dict[str, Any]:
    """Converts lists among parameters to tuples; raises for values of other types than `kinds`."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in parameters.items()}
    for name, value in values.items():
        if not isinstance(value, kinds):
            types = "number, string or tuple" if kinds is PLAIN else "number or string"
            raise FdgError(
                f"{label}: {name}={value!r} must be a Python {types}, so that the environment hashes"
            )
    return values


def check_type(label: str, name: str, value: Any, expected: type) -> Any:
    """Checks and returns a parameter; an integer becomes a float where `expected` is float."""
    if expected is float and type(value) is int:
        value = float(value)
    if type(value) is not expected:
        raise FdgError(f"{label}: {name}={value!r} must be {describe_alternatives(expected)[0]}")
    return value


def check_count(label: str, name: str, value: Any) -> None:
    """Raises an `FdgError` unless a parameter is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise FdgError(f"{label}: {name}={value!r} must be an integer of at least 1")
