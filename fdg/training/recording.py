"""A recording: what was at every border of some iterations, in a file that another machine compares with.

The file is a zip that `numpy.load` reads:

    recording.json    where it is from, and for each border the digest of each array
    DIGEST.npy        arrays by their digest: the state that it begins with, and others up to a limit

Nothing in it is code. Arrays of equal bits have equal digests; every NaN counts as the same.
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
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fdg import files
from fdg.errors import FdgError, one_line
from fdg.reading import json_object, read_bytes
from fdg.training.exported import members
from fdg.training.stepping import Border
from fdg.training.writable import writing

FACTS, _FORMAT = "recording.json", 1
_MOST_BYTES = 4 << 30
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DTYPE = re.compile(r"bool|u?int(2|4|8|16|32|64)|b?float\w{1,16}|complex(64|128)")
_SIDES = ("input", "result", "state")


@dataclasses.dataclass(frozen=True)
class Known:
    """An array of a recording.

    Attributes:
      digest: of its bits.
      array: itself; None where the recording has no room for it.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    array: np.ndarray | None = None


class Digests:
    """Digests of arrays; one that does not change from border to border is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[np.ndarray], str]] = {}

    def __call__(self, array: np.ndarray) -> str:
        """Of an array's dtype, shape and bits, 32 hexadecimal digits."""
        at = id(array)
        if at in self._known and self._known[at][0]() is array:
            return self._known[at][1]
        made = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
        made.update(np.ascontiguousarray(bits(array)).data)
        self._known[at] = weakref.ref(array, lambda _: self._known.pop(at, None)), made.hexdigest()
        return made.hexdigest()


def is_float(dtype: Any) -> bool:
    """Whether arrays of this dtype are floating numbers, those of few bits too."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers; every NaN as the same ones."""
    if array.dtype.kind == "c":
        array = array.reshape((*array.shape, 1)).view(array.real.dtype)
    found = array.reshape(array.shape or (1,)).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    if is_float(array.dtype) and (strange := np.isnan(array)).any():
        nan = np.full(1, np.nan, array.dtype).view(found.dtype)[0]
        return np.where(strange, nan, found)
    return found


@dataclasses.dataclass(frozen=True)
class Recording:
    """Iterations that were carried out elsewhere.

    Attributes:
      facts: `of` (the run), `iteration` (how many were done before it), `iterations` (recorded), `versions`,
        `settings`.
      recorded: each border, whose arrays are `Known`.
    """

    facts: Mapping[str, Any]
    recorded: tuple[Border, ...]

    @property
    def start(self) -> Border:
        """The state that it begins with."""
        return self.recorded[0]


def write_recording(path: Path, facts: Mapping[str, Any], borders: Iterable[Border], limit: int) -> Path:
    """Writes a recording.

    Args:
      path: the file; it replaces one of the same name.
      facts: as of `Recording`.
      borders: of the recorded iterations, the first state in front.
      limit: bytes of arrays that are kept beside the first state, the earliest first.

    Raises:
      FdgError: it cannot be written.
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
    """The recording in a file; everything that it says is checked.

    Raises:
      FdgError: it is none, or damaged.
    """
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
    except Exception as error:  # whatever zipfile and NumPy raise of bytes that are none of theirs
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
    kinds = {"of": str, "iteration": int, "iterations": int, "versions": dict, "settings": dict}
    for name, kind in kinds.items():
        if type(facts[name]) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
    if facts["iteration"] < 0 or facts["iterations"] < 1:
        raise ValueError("its iterations are below one")
    return {name: facts[name] for name in kinds}


def _borders(told: Any, arrays: Mapping[str, np.ndarray]) -> Iterator[Border]:
    """Borders as JSON has them; the first has all of its arrays."""
    for number, (iteration, fragment, call, inside, side, values) in enumerate(told):
        if (type(iteration), type(call)) != (int, int) or side not in _SIDES:
            raise ValueError(f"border {number} is none")
        if not all(isinstance(word, str) for word in (fragment, inside)):
            raise ValueError(f"border {number} has no names")
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
    """An array as `numpy.save` writes it; one of a dtype that NumPy lacks as unsigned integers."""
    file = io.BytesIO()
    np.save(
        file,
        array if array.dtype.isbuiltin == 1 else np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}"),
    )
    return file.getvalue()


def until(borders: Iterator[Border], last: int) -> Iterator[Border]:
    """Borders up to the state after the iteration `last`."""
    for border in borders:
        yield border
        if border.side == "state" and border.iteration >= last:
            return
