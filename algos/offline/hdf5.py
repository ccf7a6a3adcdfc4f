"""Arrays of HDF5 files of others (docs/security.md): what a file declares is checked before it is read.

HDF5 can name other files in three ways (external links, external storage, virtual data sets), load plugins
that decompress, and declare arrays far larger than the file. None of these is followed, loaded or allocated.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from fdg.errors import FdgError, one_line
from fdg.reading import open_regular

_INFLATED = 64  # bytes of an array for each byte of its file, beyond `_FREE`
_FREE = 256 << 20
_CHUNK = 256 << 20  # bytes of a chunk, which HDF5 decompresses whole
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}  # compiled into HDF5; others may be plugins
_KINDS = "biuf"  # NumPy's kinds of dtypes: booleans, integers, floats


def library() -> Any:
    """The module `h5py`.

    Raises:
      FdgError: it is not installed.
    """
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise FdgError(f"data sets need h5py ({error}): pip install 'fdg[data]'") from None


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator["Arrays"]:
    """The arrays of an HDF5 file; whatever is wrong with the file is an error of one line.

    Raises:
      FdgError: it is no regular file, no HDF5, cut off or damaged.
    """
    h5py = library()
    with open_regular(path) as content:
        size = os.fstat(content.fileno()).st_size
        try:
            with h5py.File(content, "r") as file:
                yield Arrays(h5py, file, path, size)
        except FdgError:
            raise
        # h5py has no exception of its own: HDF5's errors are any of these.
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
            raise FdgError(f"{path}: is no HDF5, cut off or damaged ({one_line(error):.120})") from None


class Arrays:
    """The arrays of an open HDF5 file, by their path in it.

    Attributes:
      read_bytes: of all arrays read so far.
    """

    def __init__(self, h5py: Any, file: Any, path: str | os.PathLike[str], size: int):
        self._h5py, self._file, self._path = h5py, file, path
        self._most = _FREE + _INFLATED * size
        self.read_bytes = 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array.

        Raises:
          FdgError: as `read`.
        """
        return self._checked(name).shape

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array of numbers, of this shape.

        Raises:
          FdgError: there is none, it is in another file, of another shape, or of another kind.
        """
        array = self._checked(name)
        if array.shape != shape:
            raise self._refused(name, f"has shape {list(array.shape)}, expected {list(shape)}")
        self.read_bytes += math.prod(shape) * array.dtype.itemsize
        if self.read_bytes > self._most:
            raise self._refused(
                name, f"and those before it have over {self._most >> 20} MiB, far more than the file"
            )
        return np.asarray(array[()])

    def _checked(self, name: str) -> Any:
        """The array, whose data is in this file and of a size that can be read."""
        found, h5py = self._file, self._h5py
        for part in name.split("/"):
            if not isinstance(found, h5py.Group):
                raise self._refused(name, "is in no group")
            # The lower interface, for `part in found` would look through links.
            if not found.id.links.exists(part.encode()):
                raise self._refused(name, "is not there")
            if not isinstance(found.get(part, getlink=True), h5py.HardLink):
                raise self._refused(name, "is a link, and links are not followed")
            found = found[part]
        if not isinstance(found, h5py.Dataset):
            raise self._refused(name, "is no array")
        if found.is_virtual or found.external:
            raise self._refused(name, "has its data in another file, which is not read")
        if found.dtype.kind not in _KINDS or found.shape is None:
            raise self._refused(name, f"has dtype {found.dtype!s:.40}: it must be of numbers")
        properties = found.id.get_create_plist()
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        if unknown := [number for number in filters if number not in _FILTERS]:
            raise self._refused(
                name, f"has filter {unknown[0]}: only {', '.join(_FILTERS.values())} are read"
            )
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > _CHUNK:
            raise self._refused(name, f"has chunks of over {_CHUNK >> 20} MiB")
        return found

    def _refused(self, name: str, why: str) -> FdgError:
        return FdgError(f"{self._path}: {name:.80} {why}")
