"""The bytes of each token of a vocabulary; a character may be split over several tokens."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.text import tokenizer_files

_MAX_TOKEN_BYTES = 128  # bytes of a token that programs read
_UNREADABLE = b"\x7f"  # replaces longer tokens; no answer contains it
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a single-byte token, in vocabularies with byte fallback


def padded(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Pads byte strings to `[V, C] uint8`; also returns their lengths `[V] int32`."""
    texts = [text if len(text) <= _MAX_TOKEN_BYTES else _UNREADABLE for text in texts]
    counts = np.array([len(text) for text in texts], np.int32)
    codes = np.zeros((len(texts), max(1, int(counts.max(initial=0)))), np.uint8)
    codes[np.arange(codes.shape[1]) < counts[:, None]] = np.frombuffer(b"".join(texts), np.uint8)
    return codes, counts


def read(loaded: Any) -> tuple[list[bytes], np.ndarray]:
    """The bytes of each token of a `tokenizers.Tokenizer` between other tokens, and the number of bytes that
    it loses as the first token, `[V] int32`.
    """
    size = tokenizer_files.size_of(loaded)
    special = {i for i, added in loaded.get_added_tokens_decoder().items() if added.special}
    # Between two others, a token keeps the blanks that some decoders strip at the ends.
    anchor = loaded.encode("a", add_special_tokens=False).ids
    tokens = sorted(loaded.get_vocab(with_added_tokens=True).values())  # numbers may have gaps
    between_anchors = [[*anchor, token, *anchor] for token in tokens]
    texts = loaded.decode_batch(between_anchors, skip_special_tokens=False)
    firsts = loaded.decode_batch([one[len(anchor) :] for one in between_anchors], skip_special_tokens=False)
    # If all tokens are separated by a blank, the blank is common too, and belongs to the later token.
    start = min(_common_prefix_length(texts), len(loaded.decode(anchor, skip_special_tokens=False)))
    end = _common_prefix_length([text[::-1] for text in texts])
    pieces, lost = [b""] * size, np.zeros(size, np.int32)
    for token, text, first in zip(tokens, texts, firsts, strict=True):
        if token in special:
            continue
        text, first = text[start : len(text) - end], first[: len(first) - end]
        pieces[token] = text.encode()
        if "\ufffd" in text:  # part of a character: its spelling gives the bytes
            pieces[token] = _spelled_bytes(loaded.id_to_token(token), text)
        elif text.endswith(first):
            lost[token] = len(pieces[token]) - len(first.encode())
    return pieces, lost


def _common_prefix_length(texts: Sequence[str]) -> int:
    """Length of the common prefix of all texts."""
    low, high = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))


def _spelled_bytes(word: str, text: str) -> bytes:
    """The bytes of a token that is not a whole text: `<0xE4>`, or in the alphabet of byte-level
    vocabularies."""
    byte, alphabet = _BYTE.fullmatch(word), _byte_alphabet()
    if byte:
        return bytes.fromhex(byte[1])
    return bytes(alphabet[c] for c in word) if all(c in alphabet for c in word) else text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The bytes of characters in byte-level vocabularies (Radford et al. 2019): visible Latin-1 characters
    are themselves; characters from U+0100 on are the others, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {**{chr(b): b for b in visible}, **{chr(256 + i): b for i, b in enumerate(others)}}
