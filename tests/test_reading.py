"""Untrusted files: only regular files are opened, and JSON is bounded."""

import gzip
import math
import os
import re
import socket

import pytest

from fdg.errors import FdgError
from fdg.reading import json_object, open_regular, read_bytes, read_json


def test_only_regular_files_are_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.mkdir("directory")
    os.symlink("/dev/zero", "device")
    os.symlink("nowhere", "dangling")
    os.symlink("loop", "loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    for name in ("fifo", "directory", "device", "socket"):
        with pytest.raises(FdgError, match=f"(?i){name}: is a {name}: give a regular file"):
            open_regular(name)
    for name in ("dangling", "none", "loop", "a\0b", "x" * 5000):
        with pytest.raises(
            FdgError, match=f"{re.escape(repr(name[:20])[1:-1])}.*: (there is no such file|cannot be read: )"
        ):
            open_regular(name)
    (tmp_path / "file").write_bytes(b'{"a": 1}')
    os.symlink("file", "link")  # caches contain symbolic links
    assert read_json("link") == {"a": 1}
    with pytest.raises(FdgError, match="is larger than 0 MiB, the limit"):
        read_bytes("file", 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": {"b": 1, "b": 2}}', "'b' occurs twice"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "more than 64 levels deep"),
        (b"[" * 10**6, "more than 64 levels deep"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": -Infinity}', "not a finite number"),
        (b'{"a": 1e999}', "not a finite number"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "does not fit 64 bits"),
        (b'{"a": 9223372036854775808}', "does not fit 64 bits"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"a": "\xff"}', "is not UTF-8: byte 7 is 0xff: save it as UTF-8"),
        (b'\xff\xfe{\x00"\x00', "is UTF-16 and not UTF-8: save it as UTF-8"),
        (gzip.compress(b"{}", mtime=0), "is compressed and not UTF-8: decompress it"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "is compressed and not UTF-8: decompress it"),
        (b"[1]", "does not contain a JSON object"),
        (b'{"a": 1', "is not JSON"),
        (b"", "is not JSON"),
    ],
)
def test_json_out_of_bounds(content, message):
    with pytest.raises(FdgError, match=f"^some.json: .*{re.escape(message)}") as error:
        json_object(content, "some.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_json_within_bounds():
    deepest = b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert json_object(b"\xef\xbb\xbf" + deepest, "x").keys() == {"a"}
    content = b'{"a": 9223372036854775807, "b": -1.5e308, "c": "\\ud83d\\ude00 1e999"}'
    assert json_object(content, "x") == {"a": 2**63 - 1, "b": -1.5e308, "c": "\U0001f600 1e999"}


def test_any_number_reads_large_numbers_as_floats():
    content = b'{"a": 1000000000000000019884624838656, "b": [-Infinity, 1e999], "c": 1' + b"0" * 5000 + b"}"
    found = json_object(content, "x", any_number=True)
    assert found == {"a": 1e30, "b": [-math.inf, math.inf], "c": math.inf} and type(found["a"]) is float
    assert math.isnan(json_object(b'{"a": NaN}', "x", any_number=True)["a"])
