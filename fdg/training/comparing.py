"""Compares two arrays, or two sequences of borders."""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from fdg.training.recording import Digests, Known, bits, is_float
from fdg.training.stepping import Border


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """How two arrays of one name differ.

    Attributes:
      name: the name of both arrays.
      kinds: dtype and shape of each, such as "float32[4, 64]".
      count: elements that differ; None if the elements of an array are unknown.
      size: elements of each array.
      max_abs: the largest absolute difference of finite elements; None if unknown.
      ulps: the largest difference of finite elements in units in the last place; None if unknown or for
        integers.
      at: the index of the largest difference.
      values: both elements at this index.
    """

    name: str
    kinds: tuple[str, str]
    count: int | None = None
    size: int = 0
    max_abs: float | None = None
    ulps: int | None = None
    at: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()


def array_difference(
    name: str, a: Any, b: Any, tolerance: float = 0.0, digests: Digests | None = None
) -> ArrayDifference | None:
    """The difference of two arrays, each a NumPy array or `Known`; None if they are equal.

    NaN equals NaN. A tolerance of 0 compares bits, so -0.0 differs from 0.0.

    Args:
      name: the name of both arrays.
      a: the first array.
      b: the second array.
      tolerance: floats x and y are equal where |x - y| <= tolerance * (1 + |y|).
      digests: a cache of digests of arrays.
    """
    kinds = _dtype_and_shape(a), _dtype_and_shape(b)
    if kinds[0] != kinds[1]:
        return ArrayDifference(name, kinds)
    digests = digests or Digests()
    if isinstance(a, Known) or isinstance(b, Known):
        if _digest(a, digests) == _digest(b, digests):
            return None
        a, b = _array(a), _array(b)
        if a is None or b is None:
            return ArrayDifference(name, kinds)
    if a is b or np.array_equal(bits(a), bits(b)):
        return None
    if a.dtype.kind == "c":
        a, b = (x.reshape((*x.shape, 1)).view(x.real.dtype) for x in (a, b))
    differs, apart, ulps = bits(a) != bits(b), None, None
    if is_float(a.dtype):
        x, y = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(x - y)
            near = (apart <= tolerance * (1 + np.abs(y))) & np.isfinite(apart)
        if tolerance > 0:
            differs = differs & ~near & ~(x == y)
        if not differs.any():
            return None
        finite = differs & np.isfinite(apart)
        if finite.any():
            ulps = int(np.max(_ulps(a, b)[finite]))
        apart = np.where(differs, np.where(np.isfinite(apart), apart, np.inf), -1.0)
    else:
        x, y = a.astype(object), b.astype(object)
        apart = np.where(differs, np.abs(x - y if a.dtype.kind != "b" else differs * 1), -1)
        finite = differs
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), a.shape))
    most = float(np.max(apart[finite])) if finite.any() else float("inf")
    values = _python_number(a[at]), _python_number(b[at])
    return ArrayDifference(name, kinds, int(differs.sum()), a.size, most, ulps, at, values)


@dataclasses.dataclass(frozen=True)
class BorderDifference:
    """The first border at which two programs differ.

    Attributes:
      border: the border of the first program, or of the second if the first has ended.
      other: the second program's place in the iteration if the two programs run different calls; else None.
      arrays: the arrays that differ.
      compared: the number of equal arrays before this border.
    """

    border: Border
    other: str | None
    arrays: tuple[ArrayDifference, ...]
    compared: int


def first_difference(
    a: Iterable[Border], b: Iterable[Border], tolerance: float = 0.0
) -> tuple[BorderDifference | None, int]:
    """The first border at which two programs differ, and the number of compared arrays.

    Arrays that only one program has are skipped: JAX versions pass different constants to fragments.
    """
    digests, compared = Digests(), 0
    for one, two in zip_longest(a, b):
        if one is None or two is None or one.place != two.place:
            border, other = (one, two) if one is not None else (two, None)
            return BorderDifference(
                border, "its end" if other is None else describe_border(other), (), compared
            ), compared
        found = _arrays(one.arrays, two.arrays, tolerance, digests)
        if found:
            return BorderDifference(one, None, found, compared), compared
        compared += len(one.arrays.keys() & two.arrays.keys())
    return None, compared


def describe_border(border: Border) -> str:
    """Describes a border in English."""
    if border.side == "state":
        return "the state" if border.iteration else "the first state"
    return f"{border.side}s of call {border.call} of `{border.fragment}`"


def _arrays(
    a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float, digests: Digests
) -> tuple[ArrayDifference, ...]:
    both = ((name, a[name], b[name]) for name in a if name in b)
    found = (array_difference(*each, tolerance, digests) for each in both)
    return tuple(each for each in found if each is not None)


def _ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The number of representable numbers between elements; 0 between -0.0 and 0.0."""

    def ordered(x: np.ndarray) -> np.ndarray:
        whole = bits(x).view(f"i{x.dtype.itemsize}").astype(np.int64)
        lowest = -(1 << (8 * x.dtype.itemsize - 1))
        with np.errstate(over="ignore"):
            return np.where(whole < 0, np.int64(lowest) - whole, whole)

    x, y = ordered(a), ordered(b)
    with np.errstate(over="ignore"):
        return np.where(x > y, x - y, y - x).view(np.uint64)


def _python_number(element: Any) -> Any:
    """Converts an element to a Python number; a float32 keeps the shortest digits that round-trip."""
    return float(str(element)) if is_float(element.dtype) else element.item()


def _digest(value: Any, digests: Digests) -> str:
    return value.digest if isinstance(value, Known) else digests(value)


def _array(value: Any) -> np.ndarray | None:
    return value.array if isinstance(value, Known) else value


def _dtype_and_shape(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"
