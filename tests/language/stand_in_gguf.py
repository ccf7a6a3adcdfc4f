"""A stub of the package `gguf` with what the reader uses, and a writer of files with float32 tensors."""

import enum
import struct
import sys
import types

import numpy as np

_STRING, _ARRAY = 8, 9


class _Types(enum.IntEnum):
    F32 = 0


def install(monkeypatch):
    """Makes `import gguf` import the stub."""
    quants = types.SimpleNamespace(dequantize=lambda content, kind: content.view(np.float32))
    package = types.SimpleNamespace(
        GGMLQuantizationType=_Types, GGML_QUANT_SIZES={_Types.F32: (1, 4)}, quants=quants
    )
    monkeypatch.setitem(sys.modules, "gguf", package)
    monkeypatch.setitem(sys.modules, "gguf.quants", quants)


def write(path, values, arrays):
    """Writes a GGUF file, version 3, of values by key and float32 arrays by name."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(values))
    header += b"".join(_text(key) + _value(value) for key, value in values.items())
    contents = b""
    for name, array in arrays.items():
        shape = array.shape[::-1]
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(contents))
        contents += array.astype("<f4").tobytes()
        contents += bytes(-len(contents) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + contents)
    return path


def _text(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value):
    """The number of a value's type, and its bytes."""
    kind, content = _encoded(value)
    return struct.pack("<I", kind) + content


def _encoded(value):
    if isinstance(value, list):
        kinds, contents = zip(*map(_encoded, value), strict=True)
        return _ARRAY, struct.pack("<IQ", kinds[0], len(value)) + b"".join(contents)
    if isinstance(value, str):
        return _STRING, _text(value)
    kind, form = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}[type(value)]
    return kind, struct.pack(form, value)
