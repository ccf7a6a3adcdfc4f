"""Tensors in files: a file's header says where its tensors are; each tensor is read when it is needed.

Headers are checked first: tensors must lie within the file and not overlap. So the memory that they take is
bounded by a multiple of the file's size (four times it for float8, which becomes float32).
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fdg.errors import FdgError
from fdg.reading import json_object, open_regular

_MAX_HEADER_BYTES = 16 << 20  # of a safetensors file, where a tensor's entry takes about a hundred bytes
_NAME_LENGTH = 120  # characters of a tensor's name in an error

# The dtypes of safetensors by their names in headers: those that weights may have, then all others.
_FLOATS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_OTHERS = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "C64": np.complex64,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: str  # the file
    shape: tuple[int, ...]  # the tensor's
    offset: int  # of the first byte
    size: int  # in bytes
    # decodes bytes `[size] uint8` to numbers, in any shape and float dtype
    decode: Callable[[np.ndarray], np.ndarray]

    def read(self) -> np.ndarray:
        """The tensor, float32."""
        content = np.empty(self.size, np.uint8)
        with open_regular(self.path) as file:
            file.seek(self.offset)
            if file.readinto(content.data) != self.size:
                raise FdgError(f"{self.path}: has become shorter while it was read")
        with np.errstate(all="ignore"):  # the caller checks for values that are not finite
            return self.decode(content).astype(np.float32, copy=False).reshape(self.shape)


def safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; reads only the header."""
    with open_regular(path) as file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(total - 8, _MAX_HEADER_BYTES):
            raise FdgError(
                f"{path}: is truncated, or no safetensors file: a header of {length} bytes, in a file of"
                f" {total}"
            )
        header = json_object(file.read(length), path)
    header.pop("__metadata__", None)
    entries = {name: _entry(str(path), name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, first, tensor_end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise FdgError(
                f"{path}: '{name:.{_NAME_LENGTH}}' begins at byte {first}, but the tensor before it ends at"
                f" {end}: download or write the file again"
            )
        end = tensor_end
    if end != total - 8 - length:
        raise FdgError(
            f"{path}: is truncated: its header says {end} bytes of tensors, and it holds {total - 8 - length}"
            if end > total - 8 - length
            else f"{path}: holds {total - 8 - length} bytes of tensors, and its header says {end}"
        )
    where = str(path)
    return {
        name: StoredTensor(
            where, shape, 8 + length + first, end - first, partial(_decode, where, name, dtype)
        )
        for name, (dtype, shape, first, end) in entries.items()
    }


def _entry(path: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Parses a header's entry: dtype, shape, first byte and end."""

    def is_list_of_counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)

    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    is_valid = isinstance(dtype, str) and is_list_of_counts(shape) and is_list_of_counts(offsets)
    if not (is_valid and len(offsets) == 2 and len(shape) <= 8):
        raise FdgError(f"{path}: '{name:.{_NAME_LENGTH}}' has no valid dtype, shape and data_offsets")
    dtypes = {**_FLOATS, **_OTHERS}
    if dtype not in dtypes:
        raise FdgError(f"{path}: '{name:.{_NAME_LENGTH}}' is {dtype[:20]!r}: known are {', '.join(dtypes)}")
    first, end = offsets
    if math.prod(shape) * np.dtype(dtypes[dtype]).itemsize != end - first:
        raise FdgError(
            f"{path}: '{name:.{_NAME_LENGTH}}' is {dtype} {shape}, and has {end - first} bytes in the file"
        )
    return dtype, tuple(shape), first, end


def _decode(path: str, name: str, dtype: str, content: np.ndarray) -> np.ndarray:
    if dtype not in _FLOATS:
        raise FdgError(
            f"{path}: '{name:.{_NAME_LENGTH}}' has dtype {dtype}: weights must be {', '.join(_FLOATS)}"
        )
    return content.view(_FLOATS[dtype])
