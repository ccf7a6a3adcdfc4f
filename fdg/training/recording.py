"""Recordings: the arrays at every border of some iterations, in a file for a comparison on another machine.

The file is a zip that `numpy.load` reads:

    recording.json    metadata, and for each border the digest of each array
    DIGEST.npy        arrays by digest: the initial state, and others up to a size limit

It contains no code. Arrays with equal bits have equal digests; all NaNs are equal.
"""

import dataclasses
import hashlib
import io
import json
import math
import re
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fdg import files
from fdg.errors import FdgError, one_line
from fdg.kinds import matches
from fdg.reading import json_object, read_bytes
from fdg.training.exported import members
from fdg.training.stepping import Border
from fdg.training.writable import writing

FACTS, _FORMAT = "recording.json", 1
_MOST_BYTES = 4 << 30
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DTYPE = re.compile(r"bool|u?int(2|4|8|16|32|64)|b?float\w{1,16}|complex(64|128)")
_PLACE = tuple[int, str, int, str, Literal["input", "result", "state"]]  # of a `Border`


@dataclasses.dataclass(frozen=True)
class Known:
    """An array of a recording."""

    dtype: str
    shape: tuple[int, ...]
    digest: str  # the digest of its bits
    array: np.ndarray | None = None  # the array; None if only its digest was stored


class Digests:
    """Computes digests of arrays; caches them by identity."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[np.ndarray], str]] = {}

    def __call__(self, array: np.ndarray) -> str:
        """The digest of an array's dtype, shape and bits: 32 hexadecimal digits."""
        at = id(array)
        if at in self._known and self._known[at][0]() is array:
            return self._known[at][1]
        made = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
        made.update(np.ascontiguousarray(bits(array)).data)
        self._known[at] = weakref.ref(array, lambda _: self._known.pop(at, None)), made.hexdigest()
        return made.hexdigest()


def is_float(dtype: Any) -> bool:
    """Whether a dtype is floating-point, narrow ones such as float8 included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers; all NaNs get the same bits."""
    if array.dtype.kind == "c":
        array = array.reshape((*array.shape, 1)).view(array.real.dtype)
    found = array.reshape(array.shape or (1,)).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    if is_float(array.dtype) and (strange := np.isnan(array)).any():
        nan = np.full(1, np.nan, array.dtype).view(found.dtype)[0]
        return np.where(strange, nan, found)
    return found


@dataclasses.dataclass(frozen=True)
class Recording:
    """Recorded iterations."""

    # `of` (the run), `iteration` (completed before it), `iterations` (recorded), `versions`, `settings`
    facts: Mapping[str, Any]
    recorded: tuple[Border, ...]  # the borders; their arrays are `Known`

    @property
    def start(self) -> Border:
        """The state before the first recorded iteration."""
        return self.recorded[0]


def write_recording(path: Path, facts: Mapping[str, Any], borders: Iterable[Border], limit: int) -> Path:
    """Writes a recording.

    The borders begin with the initial state; of other arrays at most `limit` bytes are stored, the earliest
    first.
    """
    digest, there, room = Digests(), set[str](), limit
    told: list[Any] = []
    with (
        writing(path),
        files.replacing(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package,
    ):
        for number, border in enumerate(borders):
            arrays = []
            for name, array in border.arrays.items():
                of_it = digest(array)
                arrays.append([name, str(array.dtype), list(array.shape), of_it])
                if of_it not in there and (number == 0 or array.nbytes <= room):
                    room -= array.nbytes if number else 0
                    there.add(of_it)
                    package.writestr(f"{of_it}.npy", _npy(array))
            told.append([*border.place, arrays])
        content = {"format": _FORMAT, **facts, "borders": told}
        package.writestr(FACTS, json.dumps(content, allow_nan=False))
    return path


def read_recording(path: Path) -> Recording:
    """Reads a recording and checks its content."""
    content = read_bytes(path, _MOST_BYTES)
    try:
        parts = members(content, None)
        facts = json_object(parts.pop(FACTS), f"{path}: {FACTS}")
        arrays = {name.removesuffix(".npy"): np.load(io.BytesIO(parts[name]), allow_pickle=False)
                  for name in parts}  # fmt: skip
    except KeyError:
        raise FdgError(f"{path} is no recording: it holds no {FACTS}") from None
    except FdgError as error:
        raise FdgError(f"{path} is no recording: {error}") from None
    except Exception as error:  # zipfile and NumPy raise various types for invalid bytes
        fix = "give a run directory, or the file that fdg diff RUN --record FILE wrote"
        raise FdgError(f"{path} is no recording ({one_line(error)}): {fix}") from None
    if facts.get("format") != _FORMAT:
        raise FdgError(f"{path} is a recording of format {facts.get('format')!r:.40}, and {_FORMAT} is read")
    try:
        return Recording(_checked_facts(facts), tuple(_borders(facts["borders"], arrays)))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FdgError(
            f"{path} is no recording: {FACTS} is not what was written ({one_line(error)})"
        ) from None


def _checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: facts[name] for name in ("of", "iteration", "iterations", "versions", "settings")}
    if not matches(tuple(found.values()), tuple[str, int, int, dict, dict]):
        raise ValueError("one of its facts is of another kind")
    if found["iteration"] < 0 or found["iterations"] < 1:
        raise ValueError("its iterations are below one")
    return found


def _borders(told: Any, arrays: Mapping[str, np.ndarray]) -> Iterator[Border]:
    """Parses borders from JSON; the first one has all of its arrays."""
    for number, (iteration, fragment, call, inside, side, values) in enumerate(told):
        if not matches((iteration, fragment, call, inside, side), _PLACE):
            raise ValueError(f"border {number} is none")
        found = {name: _known(dtype, shape, digest, arrays) for name, dtype, shape, digest in values}
        if len(found) != len(values) or not all(isinstance(name, str) for name in found):
            raise ValueError(f"border {number} has a name twice, or none")
        if number == 0 and (side != "state" or any(value.array is None for value in found.values())):
            raise ValueError("it does not begin with a state")
        yield Border(iteration, fragment, call, inside, side, found)
    if not told:
        raise ValueError("it has no borders")


def _known(dtype: Any, shape: Any, digest: Any, arrays: Mapping[str, np.ndarray]) -> Known:
    if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype) and isinstance(digest, str)):
        raise ValueError("an array has no dtype or digest")
    if not _DIGEST.fullmatch(digest) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array has no shape or digest")
    array = arrays.get(digest)
    if array is not None:
        wanted = jnp.dtype(dtype)
        if (array.dtype.kind != "u" and array.dtype != wanted) or array.dtype.itemsize != wanted.itemsize:
            raise ValueError(f"{digest}.npy is not of {dtype}")
        if array.size != math.prod(shape):
            raise ValueError(f"{digest}.npy is not of shape {shape}")
        array = np.ascontiguousarray(array).reshape(-1).view(wanted).reshape(shape)
    return Known(dtype, tuple(shape), digest, array)


def _npy(array: np.ndarray) -> bytes:
    """An array in NumPy's format; dtypes that NumPy lacks become unsigned integers."""
    file = io.BytesIO()
    np.save(
        file,
        array if array.dtype.isbuiltin == 1 else np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}"),
    )
    return file.getvalue()


def until(borders: Iterator[Border], last: int) -> Iterator[Border]:
    """The borders up to the state after iteration `last`."""
    for border in borders:
        yield border
        if border.side == "state" and border.iteration >= last:
            return


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

    NaN equals NaN. A tolerance of 0 compares bits, so -0.0 differs from 0.0. Floats x and y are equal where
    |x - y| <= tolerance * (1 + |y|).
    """
    kinds = dtype_and_shape(a), dtype_and_shape(b)
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
    """The first border at which two programs differ."""

    border: Border  # the border of the first program, or of the second if the first has ended
    # the second program's place in the iteration if the two programs run different calls; else None
    other: str | None
    arrays: tuple[ArrayDifference, ...]  # the arrays that differ
    compared: int  # the number of equal arrays before this border


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


def dtype_and_shape(value: Any) -> str:
    """Text such as `float32[4, 64]`, of an array or `Known`."""
    return f"{value.dtype}{list(value.shape)}"
