"""Checks and loads `tokenizer.json`.

The library trusts the file: a normaliser of 10 MB uses gigabytes. So the potentially large parts (vocabulary,
merges, added tokens) are counted, other parts must be small, and rewriting steps may lengthen texts only by a
bounded factor.
"""

import base64
import binascii
import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from fdg.arguments import quoted
from fdg.errors import FdgError, one_line
from fdg.reading import json_object, read_bytes

_MAX_FILE_BYTES = 40 << 20  # the largest known file has 34 MB
_MAX_TOKENS = 1 << 20
_MAX_ADDED, _MAX_ADDED_CHARACTERS = 1 << 16, 1 << 18
_UNIGRAM_BYTES = 5 << 19  # of all pieces; the library makes a table entry per byte
_ID_LIMIT = _MAX_TOKENS  # tables have a row for each number
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MAX_ITEMS, _MAX_CHARACTERS = 2000, 16 << 10  # in all parts together
_CHARSMAP_BYTES = 1 << 20
_MAX_CONTENT = 64  # characters of a replacement
_MAX_GROWTH = {"normalizer": 1024, "decoder": 16}  # maximum factor by which texts may grow
_MAX_REPEATS = 1000
_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """A context that turns all errors of the library into one line: bare Exceptions, and Rust panics."""
    try:
        yield
    except (FdgError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise FdgError(f"{what}: {one_line(error)}") from None


def load(file: str | os.PathLike[str]) -> Any:
    """Loads a `tokenizers.Tokenizer` from a file, without padding and truncation."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise FdgError(f"tokenizer '{file}': pip install 'fdg[language]' ({one_line(error)})") from error
    content = read_bytes(file, _MAX_FILE_BYTES)
    _check_content(json_object(content, file, any_number=True), str(file))
    with library_errors(f"tokenizer '{file}' cannot be read"):
        loaded = Tokenizer.from_buffer(content)
        loaded.no_padding()
        loaded.no_truncation()
    return loaded


def size_of(loaded: Any) -> int:
    """Rows of an embedding for a tokenizer: its largest token number plus one."""
    return 1 + max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)


def _check_content(content: dict[str, Any], file: str) -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise FdgError(f"tokenizer '{file}' is not read: {what}")

    model: Any = content.get("model")
    added = content.get("added_tokens") or []
    require(isinstance(model, dict), "it has no model")
    vocabulary, merges = model.get("vocab"), model.get("merges") or []
    require(isinstance(vocabulary, dict | list), f"model.vocab={quoted(vocabulary)}")
    require(isinstance(merges, list), f"model.merges={quoted(merges)}")
    for name, part in (("vocab", vocabulary), ("merges", merges)):
        require(len(part) <= _MAX_TOKENS, f"model.{name} has {len(part)} entries, of {_MAX_TOKENS} at most")
    if isinstance(vocabulary, dict):
        numbers = vocabulary.values()
        is_valid = set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < _ID_LIMIT
        require(is_valid, f"model.vocab has a value that is no token number below {_ID_LIMIT}")
    else:
        pieces = [one[0] for one in vocabulary if isinstance(one, list) and one and isinstance(one[0], str)]
        size = sum(len(piece.encode()) for piece in pieces)
        require(
            size <= _UNIGRAM_BYTES, f"model.vocab has {size} bytes of pieces, of {_UNIGRAM_BYTES} at most"
        )
    require(isinstance(added, list) and len(added) <= _MAX_ADDED, f"more than {_MAX_ADDED} added tokens")
    words = [one.get("content") for one in added if isinstance(one, dict)]
    size = sum(len(word) for word in words if isinstance(word, str))
    require(
        size <= _MAX_ADDED_CHARACTERS,
        f"added tokens of {size} characters, of {_MAX_ADDED_CHARACTERS} at most",
    )
    for one in added:
        number = one.get("id") if isinstance(one, dict) else None
        require(type(number) is int and 0 <= number < _ID_LIMIT, f"an added token with id={quoted(number)}")

    rest = {key: value for key, value in content.items() if key not in ("model", "added_tokens")}
    rest["model"] = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    items, characters = 0, 0
    for key, value in _leaves(rest):
        items += 1
        if isinstance(value, str) and key != "precompiled_charsmap":
            characters += len(value)
        if isinstance(value, str) and key == "Regex":
            product = 1
            for number in itertools.chain.from_iterable(_REPEAT.findall(value)):
                count = int(number.lstrip("0")[:5] or 1)  # the first digits: Python refuses long integers
                product *= max(min(count, _MAX_REPEATS + 1), 1)
            require(
                product <= _MAX_REPEATS, f"the pattern {quoted(value)} repeats more than {_MAX_REPEATS} times"
            )
    require(
        items <= _MAX_ITEMS and characters <= _MAX_CHARACTERS,
        f"{', '.join(_PARTS)} have {items} values of {characters} characters;"
        f" the limit is {_MAX_ITEMS} values of {_MAX_CHARACTERS}",
    )
    for step in itertools.chain.from_iterable(_steps(content.get(part)) for part in _PARTS):
        # The library panics at these when it encodes or decodes.
        require(step.get("type") != "FixedLength" or step.get("length") != 0, "a FixedLength of 0")
        for side in ("start", "stop"):
            stripped = step.get(side) if step.get("type") == "Strip" else 0
            require(
                not isinstance(stripped, int) or stripped <= _MAX_CONTENT,
                f"a Strip with {side}={quoted(stripped)}",
            )
        known = step.get("special_tokens")
        for one in _list_of(step, "single"):  # texts are not encoded in pairs
            special = one.get("SpecialToken") if isinstance(one, dict) else None
            token = special.get("id") if isinstance(special, dict) else None
            missing = isinstance(token, str) and isinstance(known, dict) and token not in known
            require(not missing, f"its post_processor adds {quoted(token)}, which its special_tokens lack")
    for part, limit in _MAX_GROWTH.items():
        growth = 1.0
        for step in _steps(content.get(part)):
            growth *= _growth(step, require)
        require(
            growth <= limit,
            f"its {part} can make a text {growth:.0f} times longer, and the limit is {limit} times",
        )


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Leaf keys and values; at most 64 levels, as in all JSON here."""
    if isinstance(node, dict):
        yield from itertools.chain.from_iterable(_leaves(value, name) for name, value in node.items())
        yield from (("", name) for name in node)
    elif isinstance(node, list):
        yield key, None
        yield from itertools.chain.from_iterable(_leaves(value, key) for value in node)
    else:
        yield key, node


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps that rewrite a text, in order."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for each in _list_of(part, name):
                yield from _steps(each)


def _list_of(step: dict[str, Any], name: str) -> list[Any]:
    value = step.get(name)
    return value if isinstance(value, list) else []


def _growth(step: dict[str, Any], require: Any) -> float:
    """The largest factor by which a step may lengthen a text."""
    kind, pattern = step.get("type"), step.get("pattern")
    content = step.get("content", step.get("prepend", ""))
    require(
        isinstance(content, str) and len(content) <= _MAX_CONTENT, f"a {quoted(kind)} puts {quoted(content)}"
    )
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        return _longest_replacement(charsmap, require)
    if kind != "Replace" or not isinstance(pattern, dict):
        return 1.0
    literal = pattern.get("String")
    least = len(literal) if isinstance(literal, str) else 0  # a regular expression may match the empty string
    return max(1.0, len(content) / least) if least else 1.0 + len(content)


def _longest_replacement(charsmap: str, require: Any) -> float:
    """The longest replacement in a compiled table; each ends with a zero byte."""
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        table = b""
    size = int.from_bytes(table[:4], "little")
    is_valid = 4 <= len(table) <= _CHARSMAP_BYTES and size % 1024 == 0 and 0 < size <= len(table) - 4
    require(is_valid, f"its precompiled_charsmap, of {len(table)} bytes, is damaged or too large")
    # A double array (Darts-clone): a unit points to the units at its own index XOR an offset and a byte;
    # leaves hold the start of their text.
    units, texts = np.frombuffer(table[4 : 4 + size], "<u4").astype(np.int64), table[4 + size :]
    targets = np.arange(len(units)) ^ (units >> 10 << (units >> 6 & 8))
    leaf = units >> 31 == 1
    text_starts = units[leaf] & 0x7FFFFFFF
    is_valid = bool(np.all((targets | 255)[~leaf] < len(units)) and np.all(text_starts < len(texts)))
    starts = np.frombuffer(texts, np.uint8)
    is_valid = is_valid and bool(np.all(starts[text_starts] & 0xC0 != 0x80))  # the first byte of a character
    require(is_valid, "its precompiled_charsmap points outside its own table")
    return max(1.0, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))
