"""Declares settings as dataclass fields with a help text and rules, and checks their values."""

import ast
import contextlib
import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from fdg import kinds
from fdg.arguments import quoted
from fdg.errors import FdgError, listed, nearest


def setting(default: Any, description: str, **rules: Any) -> Any:
    """A dataclass field that the command line shows with this description.

    Args:
      default: its default value.
      description: a phrase; it explains a default of None by "(None: ...)".
      rules: `least` and `most` bound a number. `free=True`: a resumed run may change the field.
        `kept=False`: the field is not stored in `config.json`. `words=True`: its value may be several words.
        `several`: the fix that the error message suggests if a user gives several values where one is
        allowed; `{n}` is their number. `flag`: the type of the flag if it differs from the annotation;
        False for no flag. See also the rules that `hyperparameter` adds.
    """
    return dataclasses.field(default=default, metadata={"help": description, **rules})


def hyperparameter(
    default: Any,
    description: str,
    structural: str | None = None,
    holds: str | None = None,
    only_with: str | None = None,
) -> Any:
    """A `setting` of an algorithm.

    Args:
      default: its default value.
      description: a phrase.
      structural: why the compiled program depends on this float, as a phrase. Such a float cannot be traced,
        so it cannot be swept. None for all other fields.
      holds: "folder" if the value is a path. It is stored as an absolute path, so a run can be used from any
        folder. "folder or WORD", such as "folder or characters", if the value may also be WORD or WORD=TEXT.
      only_with: the field without which this one has no effect, such as "rnd", or the field with a value,
        such as "memory=transformer".
    """
    rules = {"structural": structural, "holds": holds, "only_with": only_with}
    return setting(
        default, description, **{name: value for name, value in rules.items() if value is not None}
    )


def own_value(description: str, holds: str) -> Any:
    """A field for a user-defined object, None by default. Its flag takes `module:name`, which is imported.

    `holds` is the kind of object, such as "optimizer", for `fdg.training.name_resolver`.
    """
    return dataclasses.field(default=None, metadata={"help": description, "flag": str | None, "holds": holds})


def absolute_folder(field: dataclasses.Field, value: Any) -> Any:
    """A field's value, as an absolute path if the field holds a folder."""
    kind, _, word = str(field.metadata.get("holds")).partition(" or ")
    if kind != "folder" or not isinstance(value, str | os.PathLike) or value == "":
        return value
    is_word = word != "" and str(value).partition("=")[0] == word
    return value if is_word else os.path.abspath(os.path.expanduser(value))


def make_paths_absolute(algorithm: Any) -> None:
    """Makes the folder paths of a frozen dataclass absolute."""
    for field in dataclasses.fields(algorithm):
        object.__setattr__(algorithm, field.name, absolute_folder(field, getattr(algorithm, field.name)))


NETWORK_FIELDS = frozenset(
    "network actor_network critic_network hidden critic_hidden convolve activation layer_norm"
    " num_critics critic_layer_norm torso"
    " normalize_observation dueling atoms quantiles mixer_size hypernetwork"
    " recurrent memory memory_size memory_window memory_layers memory_heads"
    " decoder model tokenizer adapters hidden_size num_layers num_heads num_kv_heads intermediate_size"
    " lora_rank lora_alpha".split()
)
"""Fields that define the network. A run that starts from the weights of another run inherits them."""

MAX_INT = 2**31 - 1  # largest size or count: the largest int32
MAX_STEPS = 10**12  # largest `total_steps`


def require(algorithm: Any, condition: bool | jax.Array, message: str) -> None:
    """Raises an `FdgError` that names the algorithm, unless the condition holds.

    A condition on traced values cannot be checked here and passes: the code that traces the values checks it.
    """
    if not is_traced(condition) and not condition:
        raise FdgError(f"{type(algorithm).__name__}: {message}")


def is_traced(value: Any) -> bool:
    """Whether a value is a JAX tracer, so that its number is not known.

    >>> is_traced(0.5), bool(jax.vmap(lambda x: x * is_traced(x))(jax.numpy.ones(1))[0])
    (False, True)
    """
    return isinstance(value, jax.core.Tracer)


def float_or_array(value: Any) -> Any:
    """Converts a number to a float; returns a JAX array unchanged, because it may be traced."""
    return value if isinstance(value, jax.Array) else float(value)


def structural(algorithm_class: Any) -> dict[str, str]:
    """The fields that `hyperparameter` marks as `structural`, which cannot be traced: name -> reason."""
    fields = kinds.dataclass_fields(algorithm_class)
    return {field.name: field.metadata["structural"] for field in fields if "structural" in field.metadata}


def require_types(algorithm: Any, exempt: Collection[str] = ()) -> None:
    """Requires that the fields, except the fields `exempt`, match their annotations.

    NumPy's numbers become Python's; a float may be traced. Integers are at most `MAX_INT`, and
    `total_steps` is at most `MAX_STEPS`.
    """
    kinds.make_fields_python(algorithm)
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if field.name not in exempt:
            require_type(algorithm, field.name, value)
        limit = MAX_STEPS if field.name == "total_steps" else MAX_INT
        items: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        for item in items:
            require(
                algorithm,
                not isinstance(item, int | np.integer) or abs(int(item)) <= limit,
                f"{field.name}={quoted(value)} is too large: use at most {limit}",
            )


def require_type(algorithm: Any, name: str, value: Any, kind: Any = None) -> None:
    """Requires that a value of one field matches its annotation, or `kind` if it is given."""
    cls: Any = type(algorithm)
    kind = kind or _annotations(cls)[name]
    fix = "" if _matches(value, kind) else _conversion_fix(name, value, kind) or _anneal_fix(cls, name, value)
    require(algorithm, _matches(value, kind), f"{name}={quoted(value)}: it must be {_expected(kind)}{fix}")


def _anneal_fix(cls: Any, name: str, value: Any) -> str:
    """The fix for a schedule (a function of the step) where a number is expected: `anneal_NAME`, or ""."""
    switch = f"anneal_{name}"
    if not callable(value) or not hasattr(cls, switch):
        return ""
    other = ", or give optimizer=optax.adam(schedule)" if name == "learning_rate" else ""
    return f": write a number, and {switch}=True to decrease it linearly{other}"


@functools.cache
def _annotations(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _matches(value: Any, kind: Any) -> bool:
    """Whether a value matches an annotation; all values match an annotation that fdg cannot check."""
    return kinds.matches(value, kind, _matches_plain)


def _matches_plain(value: Any, kind: Any) -> bool | None:
    """Whether a value matches an annotation without type arguments; None to let `kinds.matches` decide.

    Arrays do not match integers, since they are not hashable. If the annotation is a named tuple class with
    the method `described`, an object matches that has a function for each field of the class.
    """
    if kind is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    if kind is float and isinstance(value, jax.Array):  # it may be traced
        return value.ndim == 0 and jax.dtypes.issubdtype(value.dtype, np.number)  # a random key is no number
    if hasattr(kind, "described"):
        return all(callable(getattr(value, part, None)) for part in kind._fields)
    return True if isinstance(kind, type) and kind not in _SIMPLE_TYPES else None


_SIMPLE_TYPES = (bool, int, float, str, type(None))  # those that `kinds.matches` checks


def _expected(kind: Any) -> str:
    """The values that an annotation allows, in English.

    >>> _expected(tuple[int, ...] | None)
    'a tuple of integers, or None'
    """
    texts = kinds.describe_alternatives(kind)
    if typing.get_origin(kind) is typing.Literal:
        return listed(texts)
    return ", or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _conversion_fix(name: str, value: Any, kind: Any) -> str:
    """A fix if the intended value is clear, such as ": write hidden=(64, 64)"; else ""."""
    intended: Any = None
    if fix := kinds.number_fix(value, kind, name) if hasattr(value, "item") else "":
        return fix.replace("write ", f"write {name}=")
    if isinstance(value, list) and _matches(tuple(value), kind):
        intended = tuple(value)
    elif _matches((value,), kind):
        intended = (value,)
    elif isinstance(value, float) and value.is_integer() and _matches(int(value), kind):
        intended = int(value)
    elif isinstance(value, str):
        choices = [choice for choice in typing.get_args(kind) if isinstance(choice, str)]
        if similar := nearest(value, choices, 1):
            intended = similar[0]
        else:
            with contextlib.suppress(ValueError, SyntaxError):
                literal = ast.literal_eval(value)
                intended = literal if _matches(literal, kind) else None
            if intended is None:
                return kinds.number_fix(value, kind, name)
    elif isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return f": write {name}=algos.Network(*{name})"
    return "" if intended is None else f": write {name}={intended!r}"


def require_positive(algorithm: Any, *names: str) -> None:
    """Requires that the fields are integers or floats above zero."""
    for name in names:
        value = getattr(algorithm, name)
        require(algorithm, value > 0, f"{name}={value}: it must be above zero")


def require_not_negative(algorithm: Any, *names: str) -> None:
    """Requires that the fields are zero or above."""
    for name in names:
        value = getattr(algorithm, name)
        require(algorithm, value >= 0, f"{name}={value}: it must be 0 or more")


def require_divides(algorithm: Any, name: str, count: int, text: str) -> None:
    """Requires that a field divides `count`, which `text` describes; the error gives the nearest sizes."""
    value = getattr(algorithm, name)
    if value < 1 or count % value:
        nearest_ones = nearest_divisors(count, value)
        if value > 0 and (field := text.partition("=")[0]).isidentifier():
            nearest_ones += f", or {field}={count + -count % value}"
        require(algorithm, False, f"{name}={value} does not divide {text}: use {nearest_ones}")


def nearest_divisors(number: int, wish: int, fits: Callable[[int], bool] = bool) -> str:
    """The divisors of a number that fit and are nearest to `wish`, at most two, for a message.

    >>> nearest_divisors(64, 3), nearest_divisors(8, 100)
    ('2 or 4', '8')
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    candidates = [n for n in sorted({*small, *(number // n for n in small)}) if fits(n)]
    nearest = [n for n in candidates if n <= wish][-1:] + [n for n in candidates if n > wish][:1]
    return listed(nearest, "or")


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; 0 if there is none.

    >>> largest_divisor(66, 4)
    3
    """
    return next((n for n in range(min(number, limit), 0, -1) if number % n == 0), 0)


def require_within(algorithm: Any, low: float, high: float, *names: str) -> None:
    """Requires that the fields lie in `[low, high]`."""
    for name in names:
        value = getattr(algorithm, name)
        require(
            algorithm,
            (low <= value) & (value <= high),
            f"{name}={value}: it must be from {low:g} to {high:g}",
        )
