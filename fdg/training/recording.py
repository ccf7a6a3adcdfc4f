"""Recordings: files with the arrays at every border of some iterations, for a comparison on another machine.

The file is a zip that `numpy.load` reads:

    recording.json    metadata, and for each border the digest of each array
    DIGEST.npy        arrays by digest: those of the initial state, and others up to a size limit

It contains no code. Arrays with equal bits have equal digests; all NaNs count as equal.
"""

import dataclasses
import hashlib
import io
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError, kind_of, one_line
from fdg.files import writing
from fdg.kinds import matches
from fdg.reading import json_object, read_bytes
from fdg.training.exported import read_members
from fdg.training.stepping import Border

FACTS, _FORMAT = "recording.json", 1  # the file in the zip with the metadata; the version of its format
_MAX_BYTES = 4 << 30
_DIGEST = re.compile(r"[0-9a-f]{32}")
# Real numbers have at most 64 bits, because `bits` needs integers of the same size.
_DTYPE = re.compile(r"bool|u?int(2|4|8|16|32|64)|b?float16|float(32|64|\d_\w{1,16})|complex(64|128)")
_PLACE_TYPE = tuple[int, str, int, str, Literal["input", "result", "state"]]  # the type of `Border.place`


@dataclasses.dataclass(frozen=True)
class RecordedArray:
    """An array of a recording, with or without its elements."""

    dtype: str
    shape: tuple[int, ...]
    digest: str  # the digest of its dtype, shape and bits
    array: np.ndarray | None = None  # the elements; None if only the digest was stored


def digest_of(array: np.ndarray) -> str:
    """The digest of an array's dtype, shape and bits: 32 hexadecimal digits."""
    hasher = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    hasher.update(np.ascontiguousarray(bits(array)).data)
    return hasher.hexdigest()


def is_float(dtype: Any) -> bool:
    """Whether a dtype is floating-point, including narrow dtypes such as float8."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers; all NaNs get the same bits."""
    if array.dtype.kind == "c":
        array = array.reshape((*array.shape, 1)).view(array.real.dtype)
    integers = array.reshape(array.shape or (1,)).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    if is_float(array.dtype) and (is_nan := np.isnan(array)).any():
        nan = np.full(1, np.nan, array.dtype).view(integers.dtype)[0]
        return np.where(is_nan, nan, integers)
    return integers


@dataclasses.dataclass(frozen=True)
class Recording:
    """The content of a recording."""

    # `of` (the run), `iteration` (completed before the recording), `iterations` (number of recorded
    # iterations), `versions`, `settings`
    facts: Mapping[str, Any]
    # Their arrays are `RecordedArray`; the first is the state before the first recorded iteration.
    borders: tuple[Border, ...]


def write_recording(path: Path, facts: Mapping[str, Any], borders: Iterable[Border], limit: int) -> Path:
    """Writes a recording of borders, the first of which is the initial state.

    All arrays of the initial state are stored, and then the earliest other arrays up to `limit` bytes.
    """
    stored, remaining = set[str](), limit
    entries: list[Any] = []
    with (
        writing(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package,
    ):
        for index, border in enumerate(borders):
            arrays = []
            for name, array in border.arrays.items():
                digest = digest_of(array)
                arrays.append([name, str(array.dtype), list(array.shape), digest])
                if digest not in stored and (index == 0 or array.nbytes <= remaining):
                    remaining -= array.nbytes if index else 0
                    stored.add(digest)
                    package.writestr(f"{digest}.npy", _npy_bytes(array))
            entries.append([*border.place, arrays])
        content = {"format": _FORMAT, **facts, "borders": entries}
        package.writestr(FACTS, json.dumps(content, allow_nan=False))
    return path


def read_recording(path: Path) -> Recording:
    """Reads a recording and checks its content."""
    content = read_bytes(path, _MAX_BYTES)
    try:
        files = read_members(content, None)
        facts = json_object(files.pop(FACTS), f"{path}: {FACTS}")
        loaded = {name: np.load(io.BytesIO(data), allow_pickle=False) for name, data in files.items()}
        arrays = {name.removesuffix(".npy"): array for name, array in loaded.items()}
    except KeyError:
        raise FdgError(f"{path} is not a recording: it has no {FACTS}") from None
    except FdgError as error:
        raise FdgError(f"{path} is not a recording: {error}") from None
    except Exception as error:  # zipfile and NumPy raise various types for invalid bytes
        fix = "give a run directory, or the file that fdg diff RUN --record FILE wrote"
        raise FdgError(f"{path} is not a recording ({one_line(error)}): {fix}") from None
    if facts.get("format") != _FORMAT:
        raise FdgError(f"{path} has format {facts.get('format')!r:.40}, but this fdg reads format {_FORMAT}")
    try:
        return Recording(_check_facts(facts), tuple(_parse_borders(facts["borders"], arrays)))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FdgError(f"{path} is not a recording: {FACTS} is invalid ({one_line(error)})") from None


def _check_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    entries = {name: facts[name] for name in ("of", "iteration", "iterations", "versions", "settings")}
    if not matches(tuple(entries.values()), tuple[str, int, int, dict, dict]):
        raise ValueError("an entry has the wrong type")
    if entries["iteration"] < 0 or entries["iterations"] < 1:
        raise ValueError("iteration is below 0, or iterations below 1")
    return entries


def _parse_borders(entries: Any, arrays: Mapping[str, np.ndarray]) -> Iterator[Border]:
    """Parses borders from JSON; checks that the first one is a state with all of its arrays."""
    for index, (iteration, fragment, call, parent, side, values) in enumerate(entries):
        if not matches((iteration, fragment, call, parent, side), _PLACE_TYPE):
            raise ValueError(f"border {index} is invalid")
        parsed = {name: _parse_array(dtype, shape, digest, arrays) for name, dtype, shape, digest in values}
        if len(parsed) != len(values) or not all(isinstance(name, str) for name in parsed):
            raise ValueError(f"border {index} has a repeated or missing name")
        if index == 0 and (side != "state" or any(value.array is None for value in parsed.values())):
            raise ValueError("it does not begin with a state")
        yield Border(iteration, fragment, call, parent, side, parsed)
    if not entries:
        raise ValueError("it has no borders")


def _parse_array(dtype: Any, shape: Any, digest: Any, arrays: Mapping[str, np.ndarray]) -> RecordedArray:
    if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype) and isinstance(digest, str)):
        raise ValueError("an array has no dtype or digest")
    if not _DIGEST.fullmatch(digest) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array has no shape or digest")
    array = arrays.get(digest)
    if array is not None:
        target = jnp.dtype(dtype)
        if (array.dtype.kind != "u" and array.dtype != target) or array.dtype.itemsize != target.itemsize:
            raise ValueError(f"{digest}.npy is not of {dtype}")
        if array.size != math.prod(shape):
            raise ValueError(f"{digest}.npy is not of shape {shape}")
        array = np.ascontiguousarray(array).reshape(-1).view(target).reshape(shape)
    return RecordedArray(dtype, tuple(shape), digest, array)


def _npy_bytes(array: np.ndarray) -> bytes:
    """An array in NumPy's file format; arrays of dtypes that NumPy lacks become unsigned integers."""
    if array.dtype.isbuiltin != 1:
        array = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """How two arrays of one name differ.

    Attributes:
      name: the name of both arrays.
      kinds: dtype and shape of each, such as "float32[4, 64]".
      count: the number of elements that differ; None if an array was stored without elements.
      size: the number of elements of each array.
      max_abs: the largest absolute difference of finite elements; None if unknown.
      ulps: the largest difference of finite elements in units in the last place; None if unknown or for
        integers.
      at: the index of the largest difference.
      values: the elements of both arrays at this index.
    """

    name: str
    kinds: tuple[str, str]
    count: int | None = None
    size: int = 0
    max_abs: float | None = None
    ulps: int | None = None
    at: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()


def array_difference(name: str, a: Any, b: Any, tolerance: float = 0.0) -> ArrayDifference | None:
    """The difference of two arrays, each a NumPy array or `RecordedArray`; None if they are equal.

    NaN equals NaN. A tolerance of 0 compares bits, so -0.0 differs from 0.0. Floats x and y are equal where
    |x - y| <= tolerance * (1 + |y|).
    """
    kinds = kind_of(a), kind_of(b)
    if kinds[0] != kinds[1]:
        return ArrayDifference(name, kinds)
    if isinstance(a, RecordedArray) or isinstance(b, RecordedArray):
        digest_a, digest_b = (x.digest if isinstance(x, RecordedArray) else digest_of(x) for x in (a, b))
        if digest_a == digest_b:
            return None
        a, b = (x.array if isinstance(x, RecordedArray) else x for x in (a, b))
        if a is None or b is None:
            return ArrayDifference(name, kinds)
    if a is b or np.array_equal(bits(a), bits(b)):
        return None
    if a.dtype.kind == "c":
        a, b = (x.reshape((*x.shape, 1)).view(x.real.dtype) for x in (a, b))
    is_unequal, distance, ulps = bits(a) != bits(b), None, None
    if is_float(a.dtype):
        x, y = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(x - y)
            is_close = (distance <= tolerance * (1 + np.abs(y))) & np.isfinite(distance)
        if tolerance > 0:
            is_unequal = is_unequal & ~is_close & ~(x == y)
        if not is_unequal.any():
            return None
        is_finite = is_unequal & np.isfinite(distance)
        if is_finite.any():
            ulps = int(np.max(_ulp_distance(a, b)[is_finite]))
        distance = np.where(is_unequal, np.where(np.isfinite(distance), distance, np.inf), -1.0)
    else:
        x, y = a.astype(object), b.astype(object)
        distance = np.where(is_unequal, np.abs(x - y if a.dtype.kind != "b" else is_unequal * 1), -1)
        is_finite = is_unequal
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), a.shape))
    largest = float(np.max(distance[is_finite])) if is_finite.any() else float("inf")
    # Python numbers; floats get the fewest digits that round-trip.
    values = tuple(float(str(x)) if is_float(x.dtype) else x.item() for x in (a[index], b[index]))
    return ArrayDifference(name, kinds, int(is_unequal.sum()), a.size, largest, ulps, index, values)


def _ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distance of elements in units in the last place, uint64; 0 between -0.0 and 0.0."""

    def sortable_integers(x: np.ndarray) -> np.ndarray:
        integers = bits(x).view(f"i{x.dtype.itemsize}").astype(np.int64)
        lowest = -(1 << (8 * x.dtype.itemsize - 1))
        with np.errstate(over="ignore"):
            return np.where(integers < 0, np.int64(lowest) - integers, integers)

    x, y = sortable_integers(a), sortable_integers(b)
    with np.errstate(over="ignore"):
        return np.where(x > y, x - y, y - x).view(np.uint64)
