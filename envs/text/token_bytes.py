"""The bytes of each token of a vocabulary; a character may be split over several tokens."""

import collections
import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.text import tokenizer_files

_MAX_TOKEN_BYTES = 128  # longer tokens become `_UNREADABLE`
_UNREADABLE = b"\x7f"  # no answer contains it
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a single-byte token, in vocabularies with byte fallback


def pad_bytes(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Pads byte strings to `[V, C] uint8`; also returns their lengths `[V] int32`."""
    texts = [text if len(text) <= _MAX_TOKEN_BYTES else _UNREADABLE for text in texts]
    counts = np.array([len(text) for text in texts], np.int32)
    codes = np.zeros((len(texts), max(1, int(counts.max(initial=0)))), np.uint8)
    codes[np.arange(codes.shape[1]) < counts[:, None]] = np.frombuffer(b"".join(texts), np.uint8)
    return codes, counts


def decode_each_token(loaded: Any) -> tuple[list[bytes], np.ndarray, bytes]:
    """For each token of a `tokenizers.Tokenizer`, its bytes between other tokens, and `[V] int32` the number
    of bytes that it loses as the first token of a text; negative if it begins there with the mark, the last
    result (WordPiece's `##`).
    """
    size = tokenizer_files.vocab_size(loaded)
    special = tokenizer_files.special_numbers(loaded)
    # Some decoders strip blanks at the ends of a text, so each token is decoded between two anchors.
    anchor = loaded.encode("a", add_special_tokens=False).ids
    tokens = sorted(loaded.get_vocab(with_added_tokens=True).values())  # numbers may have gaps
    between_anchors = [[*anchor, token, *anchor] for token in tokens]
    texts = loaded.decode_batch(between_anchors, skip_special_tokens=False)
    firsts = loaded.decode_batch([ids[len(anchor) :] for ids in between_anchors], skip_special_tokens=False)
    # A blank that the decoder puts before each token is the token's own; one after each, the anchor's.
    end = len(os.path.commonprefix([text[::-1] for text in texts]))  # noqa: RUF071 -- these are no paths
    start = max(0, len(loaded.decode([*anchor, *anchor], skip_special_tokens=False)) - end)
    pieces, lost_bytes = [b""] * size, np.zeros(size, np.int32)
    marked: dict[str, list[int]] = collections.defaultdict(list)  # tokens by what each gains as the first
    for token, text, first in zip(tokens, texts, firsts, strict=True):
        if token in special:
            continue
        text, first = text[start : len(text) - end], first[: len(first) - end]
        pieces[token] = text.encode()
        if "\ufffd" in text:  # only part of a character: take the bytes from its spelling
            pieces[token] = _spelled_bytes(loaded.id_to_token(token), text)
        elif text.endswith(first):
            lost_bytes[token] = len(pieces[token]) - len(first.encode())
        elif first.endswith(text):
            marked[first.removesuffix(text)].append(token)
    mark = max(marked, key=lambda text: len(marked[text]), default="")
    lost_bytes[marked[mark]] = -len(mark.encode())
    return pieces, lost_bytes, mark.encode()


def _spelled_bytes(word: str, text: str) -> bytes:
    """The bytes for which a token's spelling stands: `<0xE4>`, or the alphabet of byte-level vocabularies."""
    byte, alphabet = _BYTE.fullmatch(word), _byte_alphabet()
    if byte:
        return bytes.fromhex(byte[1])
    return bytes(alphabet[c] for c in word) if all(c in alphabet for c in word) else text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level vocabularies (Radford et al. 2019): visible Latin-1 characters
    stand for themselves, characters from U+0100 on for the other bytes, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {**{chr(b): b for b in visible}, **{chr(256 + i): b for i, b in enumerate(others)}}
