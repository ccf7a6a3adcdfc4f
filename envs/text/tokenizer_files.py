"""Checks and loads `tokenizer.json`.

The library `tokenizers` sets no limits: a normaliser of 10 MB makes it use gigabytes. This module limits the
number of tokens and merges, the total length of all other parts, and the factor by which normalisers and
decoders can lengthen a text.
"""

import base64
import binascii
import contextlib
import functools
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
_MAX_TOKENS = 1 << 20  # also of merges
_MAX_ADDED, _MAX_ADDED_CHARACTERS = 1 << 16, 1 << 18  # added tokens, and their characters together
_UNIGRAM_BYTES = 5 << 19  # maximum for all pieces; the library stores a table entry for each byte
_ID_LIMIT = _MAX_TOKENS  # exclusive; our tables have a row for each token number
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")  # have steps, which may be nested
_MAX_ITEMS, _MAX_CHARACTERS = 2000, 16 << 10  # maxima for all but tokens and merges
_CHARSMAP_BYTES = 1 << 20  # maximum
_MAX_CONTENT = 64  # characters of a replacement
_MAX_GROWTH = {"normalizer": 1024, "decoder": 16}  # maximum factor by which texts may grow
_MAX_REPEATS = 1000  # for the product of all repeat counts of a regular expression
_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")  # {3} or {3,5} of a regular expression


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """A context in which any error of the library, a Rust panic too, becomes a one-line `FdgError`."""
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


@functools.cache
def vocab_size(loaded: Any) -> int:
    """A tokenizer's largest token number plus one; numbers may have gaps."""
    return 1 + max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)


@functools.cache
def special_numbers(loaded: Any) -> frozenset[int]:
    """The numbers of a tokenizer's special tokens, which decoding leaves out."""
    return frozenset(i for i, token in loaded.get_added_tokens_decoder().items() if token.special)


def _check_content(content: dict[str, Any], file: str) -> None:
    """Raises an `FdgError` if a part exceeds its limit, or would make the library panic."""

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
        pieces = [x[0] for x in vocabulary if isinstance(x, list) and x and isinstance(x[0], str)]
        size = sum(len(piece.encode()) for piece in pieces)
        require(
            size <= _UNIGRAM_BYTES, f"model.vocab has {size} bytes of pieces, of {_UNIGRAM_BYTES} at most"
        )
    require(isinstance(added, list) and len(added) <= _MAX_ADDED, f"more than {_MAX_ADDED} added tokens")
    contents = [x.get("content") for x in added if isinstance(x, dict)]
    size = sum(len(text) for text in contents if isinstance(text, str))
    require(
        size <= _MAX_ADDED_CHARACTERS,
        f"added tokens of {size} characters, of {_MAX_ADDED_CHARACTERS} at most",
    )
    for x in added:
        number = x.get("id") if isinstance(x, dict) else None
        require(type(number) is int and 0 <= number < _ID_LIMIT, f"an added token with id={quoted(number)}")

    small_parts = {key: value for key, value in content.items() if key not in ("model", "added_tokens")}
    small_parts["model"] = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    items, characters = 0, 0
    for key, value in _leaves(small_parts):
        items += 1
        if isinstance(value, str) and key != "precompiled_charsmap":
            characters += len(value)
        if isinstance(value, str) and key == "Regex":
            product = 1
            for number in itertools.chain.from_iterable(_REPEAT.findall(value)):
                count = int(number.lstrip("0")[:5] or 1)  # five digits suffice; Python refuses very long ones
                product *= max(min(count, _MAX_REPEATS + 1), 1)
            require(
                product <= _MAX_REPEATS, f"the pattern {quoted(value)} repeats more than {_MAX_REPEATS} times"
            )
    require(
        items <= _MAX_ITEMS and characters <= _MAX_CHARACTERS,
        f"{', '.join(_PARTS)} have {items} values of {characters} characters;"
        f" the limit is {_MAX_ITEMS} values of {_MAX_CHARACTERS}",
    )
    for step in itertools.chain.from_iterable(_nested_steps(content.get(part)) for part in _PARTS):
        # With these values the library panics when it encodes or decodes.
        require(step.get("type") != "FixedLength" or step.get("length") != 0, "a FixedLength of 0")
        for side, most in (("start", _MAX_CONTENT), ("stop", 0)):  # any stop panics for an empty text
            stripped = step.get(side) if step.get("type") == "Strip" else 0
            require(
                not isinstance(stripped, int) or stripped <= most, f"a Strip with {side}={quoted(stripped)}"
            )
        listed = step.get("special_tokens")
        for x in _list_field(step, "single"):  # the template for a single text; we never encode pairs
            special = x.get("SpecialToken") if isinstance(x, dict) else None
            token = special.get("id") if isinstance(special, dict) else None
            missing = isinstance(token, str) and isinstance(listed, dict) and token not in listed
            require(not missing, f"its post_processor adds {quoted(token)}, which its special_tokens lack")
    for part, limit in _MAX_GROWTH.items():
        growth = 1.0
        for step in _nested_steps(content.get(part)):
            growth *= _growth_bound(step, require)
        require(
            growth <= limit,
            f"its {part} can make a text {growth:.0f} times longer, and the limit is {limit} times",
        )


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The keys and values of all leaves. Keys of mappings, and lists, count as leaves too.

    Recursion is safe: `json_object` allows at most 64 levels.
    """
    if isinstance(node, dict):
        yield from itertools.chain.from_iterable(_leaves(value, name) for name, value in node.items())
        yield from (("", name) for name in node)
    elif isinstance(node, list):
        yield key, None
        yield from itertools.chain.from_iterable(_leaves(value, key) for value in node)
    else:
        yield key, node


def _nested_steps(part: Any) -> Iterator[dict[str, Any]]:
    """A part and all steps within it, in order."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for step in _list_field(part, name):
                yield from _nested_steps(step)


def _list_field(step: dict[str, Any], name: str) -> list[Any]:
    value = step.get(name)
    return value if isinstance(value, list) else []


def _growth_bound(step: dict[str, Any], require: Any) -> float:
    """The largest factor by which a step can lengthen a text; `require` is that of `_check_content`."""
    kind, pattern = step.get("type"), step.get("pattern")
    content = step.get("content", step.get("prepend", ""))
    require(
        isinstance(content, str) and len(content) <= _MAX_CONTENT,
        f"a {quoted(kind)} inserts {quoted(content)}, not a string of at most {_MAX_CONTENT} characters",
    )
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        return _longest_replacement_length(charsmap, require)
    if kind != "Replace" or not isinstance(pattern, dict):
        return 1.0
    literal = pattern.get("String")
    min_match = len(literal) if isinstance(literal, str) else 0  # a regex may match the empty string
    return max(1.0, len(content) / min_match) if min_match else 1.0 + len(content)


def _longest_replacement_length(charsmap: str, require: Any) -> float:
    """The length in characters of the longest replacement in a compiled table; at least 1."""
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        table = b""
    size = int.from_bytes(table[:4], "little")
    is_valid = 4 <= len(table) <= _CHARSMAP_BYTES and size % 1024 == 0 and 0 < size <= len(table) - 4
    require(is_valid, f"its precompiled_charsmap, of {len(table)} bytes, is damaged or too large")
    # The table is a double-array trie (Darts-clone), then the replacements, each ended by a zero byte. The
    # children of a unit are at its index XOR an offset XOR a byte. A leaf has the start of its replacement.
    units, texts = np.frombuffer(table[4 : 4 + size], "<u4").astype(np.int64), table[4 + size :]
    children = np.arange(len(units)) ^ (units >> 10 << (units >> 6 & 8))
    is_leaf = units >> 31 == 1
    starts = units[is_leaf] & 0x7FFFFFFF
    is_valid = bool(np.all((children | 255)[~is_leaf] < len(units)) and np.all(starts < len(texts)))
    text_bytes = np.frombuffer(texts, np.uint8)
    is_valid = is_valid and bool(np.all(text_bytes[starts] & 0xC0 != 0x80))  # the first byte of a character
    require(is_valid, "its precompiled_charsmap points outside its own table")
    return max(1.0, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))
