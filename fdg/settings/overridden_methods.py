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

    Each must take the required arguments of the original method, in order. If the original is
    annotated to return a tuple of fixed length, each call must return as many values.

    >>> class Base:
    ...     def loss(self, parameters) -> tuple[float, dict]: return 0.0, {}
    >>> class Mine(Base):
    ...     def loss(self, parameters): return 1.0
    >>> check_overridden_methods(Mine)
    >>> Mine().loss(None)
    Traceback (most recent call last):
    fdg.errors.FdgError: Mine.loss gives float: return 2 values, as Base.loss does, tuple[float, dict]
    """
    for name, method in list(vars(cls).items()):
        inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        original = inspect.unwrap(inherited) if inherited is not None else None  # unwraps a fragment
        if name.startswith("_") or not (inspect.isfunction(method) and inspect.isfunction(original)):
            continue
        parameters = inspect.signature(original).parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        required = [p.name for p in positional if p.default is p.empty]
        check_takes(method, required, f"{cls.__name__}.{name}")
        return_type = original.__annotations__.get("return")
        count = len(typing.get_args(return_type)) if typing.get_origin(return_type) is tuple else 0
        if count and ... not in typing.get_args(return_type):
            type_text = re.sub(r"[\w.]+\.", "", inspect.formatannotation(return_type))
            fix = f"return {count} values, as {original.__qualname__} does, {type_text}"
            setattr(cls, name, _with_checked_result(method, count, f"{cls.__name__}.{name}", fix))


def _with_checked_result(function: Callable, count: int, what: str, fix: str) -> Callable:
    """Wraps a function so that each call checks that it returns `count` values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not (isinstance(result, tuple | list) and len(result) == count):
            raise FdgError(f"{what} gives {structure_of(result):.200}: {fix}")
        return result

    return call
