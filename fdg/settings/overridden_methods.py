"""Checks the methods that a user's algorithm class overrides; mistakes are one-line errors."""

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from fdg.arguments import check_takes
from fdg.errors import FdgError, structure_of


def check_overridden_methods(cls: type) -> None:
    """Checks signatures and results of public methods that a user's class overrides.

    Each must take the original's required arguments, in order. If the original is annotated to return a
    tuple, each call must return as many values.

    >>> class Base:
    ...     def loss(self, parameters) -> tuple[float, dict]: return 0.0, {}
    >>> class Mine(Base):
    ...     def loss(self, parameters): return 1.0
    >>> check_overridden_methods(Mine)
    >>> Mine().loss(None)
    Traceback (most recent call last):
    fdg.errors.FdgError: Mine.loss gives float: return 2 values, as Base.loss does, tuple[float, dict]
    """
    for name, own in list(vars(cls).items()):
        replaced = next((vars(one)[name] for one in cls.__mro__[1:] if name in vars(one)), None)
        original = inspect.unwrap(replaced) if replaced is not None else None  # unwraps a fragment
        if name.startswith("_") or not (inspect.isfunction(own) and inspect.isfunction(original)):
            continue
        parameters = inspect.signature(original).parameters.values()
        positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        required = [one.name for one in positional if one.default is one.empty]
        check_takes(own, required, f"{cls.__name__}.{name}")
        gives = original.__annotations__.get("return")
        count = len(typing.get_args(gives)) if typing.get_origin(gives) is tuple else 0
        if count and ... not in typing.get_args(gives):
            kinds = re.sub(r"[\w.]+\.", "", inspect.formatannotation(gives))
            fix = f"return {count} values, as {original.__qualname__} does, {kinds}"
            setattr(cls, name, _checked_result(own, count, f"{cls.__name__}.{name}", fix))


def _checked_result(function: Callable, count: int, what: str, fix: str) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not (isinstance(result, tuple | list) and len(result) == count):
            raise FdgError(f"{what} gives {structure_of(result):.200}: {fix}")
        return result

    return call
