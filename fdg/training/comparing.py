"""Two arrays, and two borders: what differs, and by how much."""

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
      name: of the array.
      kinds: dtype and shape of each, such as "float32[4, 64]".
      count: elements that differ; None where an array is not at hand.
      size: elements of each.
      max_abs: the largest absolute difference of finite elements; None likewise.
      ulps: the largest difference of finite elements in units in the last place; None of integers too.
      at: index of the element of the largest difference.
      values: both elements there.
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
    """What differs between two arrays, each a NumPy array or `Known`; None if nothing does.

    NaN equals NaN. Without a tolerance bits are compared, so -0.0 differs from 0.0.

    Args:
      name: of the array.
      a: the first.
      b: the second.
      tolerance: floats x and y are equal where |x - y| <= tolerance * (1 + |y|).
      digests: of arrays that were read before.
    """
    kinds = _kind(a), _kind(b)
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
    values = _plain(a[at]), _plain(b[at])
    return ArrayDifference(name, kinds, int(differs.sum()), a.size, most, ulps, at, values)


@dataclasses.dataclass(frozen=True)
class BorderDifference:
    """The first border at which two programs part.

    Attributes:
      border: of the first program, or of the second where the first has ended.
      other: the place of the second, where the programs do not do the same; else None.
      arrays: that differ.
      compared: how many arrays were equal before.
    """

    border: Border
    other: str | None
    arrays: tuple[ArrayDifference, ...]
    compared: int


def first_difference(
    a: Iterable[Border], b: Iterable[Border], tolerance: float = 0.0
) -> tuple[BorderDifference | None, int]:
    """Where two programs part first, and how many arrays were compared.

    Arrays that one of them has alone are passed over: versions of JAX hand on other ones.
    """
    digests, compared = Digests(), 0
    for one, two in zip_longest(a, b):
        if one is None or two is None or one.place != two.place:
            border, other = (one, two) if one is not None else (two, None)
            return BorderDifference(
                border, "its end" if other is None else said(other), (), compared
            ), compared
        found = _arrays(one.arrays, two.arrays, tolerance, digests)
        if found:
            return BorderDifference(one, None, found, compared), compared
        compared += len(one.arrays.keys() & two.arrays.keys())
    return None, compared


def said(border: Border) -> str:
    """Where a border is, in words."""
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
    """Representable numbers from each element to the other; those of both zeros are none."""

    def ordered(x: np.ndarray) -> np.ndarray:
        whole = bits(x).view(f"i{x.dtype.itemsize}").astype(np.int64)
        lowest = -(1 << (8 * x.dtype.itemsize - 1))
        with np.errstate(over="ignore"):
            return np.where(whole < 0, np.int64(lowest) - whole, whole)

    x, y = ordered(a), ordered(b)
    with np.errstate(over="ignore"):
        return np.where(x > y, x - y, y - x).view(np.uint64)


def _plain(element: Any) -> Any:
    """A Python number; of a float32 with the shortest digits that give it back."""
    return float(str(element)) if is_float(element.dtype) else element.item()


def _digest(value: Any, digests: Digests) -> str:
    return value.digest if isinstance(value, Known) else digests(value)


def _array(value: Any) -> np.ndarray | None:
    return value.array if isinstance(value, Known) else value


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"
