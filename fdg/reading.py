"""Reads untrusted files: only regular files of limited size, and JSON within limits.

FIFOs, devices and sockets are refused without waiting, sizes are limited, and every error is one line.
"""

import functools
import io
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable
from typing import Any

from fdg.errors import FdgError, one_line

JSON_BYTES = 8 << 20
"""Default maximum size of a JSON file."""

_MAX_DEPTH = 64  # maximum nesting of objects and arrays
_INTEGER_LIMIT = 2**63  # integers must be smaller, to fit int64
# `_AS_ZEROS` replaces each digit by 0. A number that may be out of range then contains one of `_MAYBE_LARGE`.
# (A regular expression takes four times as long.)
_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_MAYBE_LARGE = (b"0" * 19, b"e000", b"e+000")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of half a character in JSON


class EncodingError(FdgError):
    """Text that is not UTF-8."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a regular file, or a link to one, for reading.

    >>> open_regular("/dev/zero")
    Traceback (most recent call last):
    fdg.errors.FdgError: /dev/zero: is a device: give a regular file
    """
    try:
        kind = _REFUSED_KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
        if kind is None:
            # Do not block: a FIFO may have replaced the file meanwhile.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            kind = _REFUSED_KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode))
            if kind is None:
                return open(descriptor, "rb")
            os.close(descriptor)
    except FileNotFoundError:
        raise FdgError(f"{path}: there is no such file: give the path of a file") from None
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise FdgError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    raise FdgError(f"{path}: is a {kind}: give a regular file")


_REFUSED_KINDS = {  # file type -> its name in messages
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


def stamp(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Numbers that differ after a file was replaced or changed; empty if it cannot be found."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # reading the file raises a better error
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def cached_by_stamp(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that caches a function of a path until the file is replaced or changed."""
    cached = functools.lru_cache(maxsize=8)(lambda path, _: read(path))
    return functools.wraps(read)(lambda path: cached(path, stamp(path)))


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise FdgError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise FdgError(f"{path}: is larger than {limit >> 20} MiB, the limit: give a smaller file")
    return content


def read_text(path: str | os.PathLike[str], limit: int = JSON_BYTES) -> str:
    """The text of a regular file in UTF-8."""
    return _decode(read_bytes(path, limit), path)


def read_json(
    path: str | os.PathLike[str], limit: int = JSON_BYTES, any_number: bool = False
) -> dict[str, Any]:
    """The JSON object in a regular file; arguments and errors as for `json_object`."""
    return json_object(read_bytes(path, limit), path, any_number)


def json_object(content: bytes, where: object, any_number: bool = False) -> dict[str, Any]:
    """Parses a JSON object; refuses duplicate keys, NaN, huge integers, lone surrogates and deep nesting.

    With `any_number`, NaN, infinities and larger integers are accepted, as floats; the caller must check each
    value. Transformers writes `int(1e30)` and Infinity for "no limit".

    >>> json_object(b'{"a": [1, 2.5]}', "some.json")
    {'a': [1, 2.5]}
    >>> json_object(b'{"a": [36893488147419103232, -Infinity]}', "some.json", any_number=True)
    {'a': [3.6893488147419103e+19, -inf]}
    >>> json_object(b'{"a": 1, "a": 2}', "some.json")
    Traceback (most recent call last):
    fdg.errors.FdgError: some.json: 'a' occurs twice: remove one
    """
    text = _decode(content, where)

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            seen_names: set[str] = set()
            name = next(name for name, _ in pairs if name in seen_names or seen_names.add(name))  # type: ignore[func-returns-value]
            raise FdgError(f"{where}: {name[:60]!r} occurs twice: remove one")
        return parsed

    def parse_integer(digits: str) -> int | float:
        if len(digits) > 20 or abs(int(digits)) >= _INTEGER_LIMIT:
            if any_number:
                return float(digits)
            raise FdgError(f"{where}: {digits[:20]}... does not fit 64 bits")
        return int(digits)

    def parse_number(digits: str) -> float:
        if not (any_number or math.isfinite(float(digits))):
            raise FdgError(f"{where}: {digits[:20]} is not a finite number")
        return float(digits)

    # The slower hooks are needed only if a number may be out of range.
    zeros = content.translate(_AS_ZEROS)
    has_large = any(part in zeros for part in _MAYBE_LARGE)
    try:
        parsed = json.loads(
            text,
            object_pairs_hook=without_duplicates,
            parse_int=parse_integer if has_large else None,
            parse_float=parse_number if has_large else None,
            parse_constant=parse_number,
        )
    except FdgError:
        raise
    except RecursionError:
        raise FdgError(f"{where}: is nested more than {_MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise FdgError(f"{where}: is not JSON: {one_line(error)}") from None
    if not isinstance(parsed, dict):
        raise FdgError(f"{where}: does not contain a JSON object: write one in braces")
    if _depth(parsed) > _MAX_DEPTH:
        raise FdgError(f"{where}: is nested more than {_MAX_DEPTH} levels deep")
    if _SURROGATE.search(content) and not _is_unicode(parsed):
        raise FdgError(
            f"{where}: has an escape such as \\ud83d, half a character (a lone surrogate): write the whole"
            " character, or remove it"
        )
    return parsed


def read_toml(path: str | os.PathLike[str], fix: str) -> dict[str, Any]:
    """The tables in a regular TOML file; depth and integers are limited as in JSON.

    Error messages about its content end with `fix`.
    """
    text = read_text(path)
    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an invalid date, or too many digits
        raise FdgError(f"{path} is not TOML: {one_line(error)}: {fix}") from None
    if _depth(parsed) > _MAX_DEPTH:
        raise FdgError(f"{path}: is nested more than {_MAX_DEPTH} levels deep: {fix}")
    if name := _large_integer(parsed):
        raise FdgError(f"{path}: {name} does not fit 64 bits: {fix}")
    return parsed


def _large_integer(parsed: Any, name: str = "") -> str:
    """The name of the first integer that does not fit 64 bits; "" if there is none."""
    if isinstance(parsed, dict | list):
        pairs = parsed.items() if isinstance(parsed, dict) else ((name, item) for item in parsed)
        return next(filter(None, (_large_integer(value, key) for key, value in pairs)), "")
    return repr(name[:60]) if isinstance(parsed, int) and abs(parsed) >= _INTEGER_LIMIT else ""


def _decode(content: bytes, where: object) -> str:
    check_encoding(content, where)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is {content[error.start]:#04x}"
        raise EncodingError(f"{where}: is not UTF-8: {problem}: save it as UTF-8") from None


def check_encoding(content: bytes, where: object) -> None:
    """Raises an error for compressed files, UTF-16 and UTF-32, which the first bytes show.

    >>> check_encoding("{}".encode("utf-16"), "data.jsonl")
    Traceback (most recent call last):
    fdg.reading.EncodingError: data.jsonl: is UTF-16 and not UTF-8: save it as UTF-8
    """
    for name, start in _OTHER_FORMATS.items():
        if start.match(content):
            fix = "decompress it" if name == "compressed" else "save it as UTF-8"
            raise EncodingError(f"{where}: is {name} and not UTF-8: {fix}")


def refuse_run(directory: str | os.PathLike[str], what: str, options: str = "") -> None:
    """Raises an error for a run directory in place of a folder in Hugging Face's format.

    `what` is the expected folder; `options` are flags for `fdg export`, and end with a space.
    """
    try:
        config = read_json(os.path.join(directory, "config.json"), any_number=True)
    except FdgError:
        return
    if "hyperparameters" in config and "model_type" not in config:
        fix = f"fdg export {directory} {options}--out DIR"
        raise FdgError(f"{directory} is a run, not {what}: {fix}, and give DIR")


_OTHER_FORMATS = {  # format -> the first bytes of such a file
    # by gzip, Zstandard, xz, bzip2 or zip
    "compressed": re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ|BZh\d1AY&SY|PK\x03\x04"),
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|\0\0\0[!-~]|[!-~]\0\0\0"),
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff|\0[!-~]\0[ -~]|[!-~]\0[ -~]\0"),
}


def _depth(value: Any) -> int:
    """The nesting depth of objects and arrays."""
    level, depth = [value], 0
    while level:
        depth += 1
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for values in children for child in values if type(child) in (dict, list)]
    return depth


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
