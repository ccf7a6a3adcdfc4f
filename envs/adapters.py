"""What adapters of other packages share: their imports, and the checks of parameters that they take."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from envs.quiet import quietly, relaxed_checks
from fdg.errors import FdgError
from fdg.kinds import describe_alternatives

PLAIN = bool | int | float | str | tuple  # values of parameters: they hash


@contextlib.contextmanager
def importing(who_needs: str, package: str, extra: str) -> Iterator[None]:
    """For a package's import, which may happen while a program is being traced."""
    try:
        with jax.ensure_compile_time_eval(), quietly(), relaxed_checks():
            yield
    except ModuleNotFoundError as error:
        raise FdgError(
            f"{who_needs} {package}, and {error.name} is not installed: pip install 'fdg[{extra}]'"
        ) from error


@contextlib.contextmanager
def accepting(where: str, package: str, given: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """For a package's constructor, which may refuse what it is given."""
    try:
        yield
    except FdgError:  # the package is not installed, say
        raise
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value!r}" for name, value in given)
        said = " ".join(str(error).split())
        raise FdgError(f"{where}: {package} does not accept {values}: {said}") from error


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises an `FdgError` for the first parameter that is not known; lists those that are."""
    known = [*known]
    if unknown := next((name for name in given if name not in known), None):
        takes = f"takes {', '.join(known)}" if known else "takes no parameters"
        raise FdgError(f"{where}: unknown parameter '{unknown}': {takes}")


def plain(where: str, given: Mapping[str, Any], kinds: Any = PLAIN) -> dict[str, Any]:
    """Parameters with lists as tuples."""
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, value in found.items():
        if not isinstance(value, kinds):
            words = "number, string or tuple" if kinds is PLAIN else "number or string"
            raise FdgError(
                f"{where}: {name}={value!r} must be a Python {words}, so that the environment hashes"
            )
    return found


def of_type(where: str, name: str, value: Any, kind: type) -> Any:
    """A parameter as a value of a type: an integer is a float, too."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise FdgError(f"{where}: {name}={value!r} must be {describe_alternatives(kind)[0]}")
    return value


def check_count(where: str, name: str, value: Any) -> None:
    """Raises an `FdgError` unless a parameter is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise FdgError(f"{where}: {name}={value!r} must be an integer of at least 1")
