"""The bytes of each token of a vocabulary; a character may be split over several tokens."""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.text import tokenizer_files
from fdg.arguments import quoted
from fdg.errors import FdgError

_MAX_TOKEN_BYTES = 128  # longer tokens become `_UNREADABLE`
_UNREADABLE = b"\x7f"  # no answer contains it
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a single-byte token, in vocabularies with byte fallback


def pad_bytes(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Zero-pads V byte strings to the longest, `[V, C] uint8`; also returns their lengths `[V] int32`."""
    texts = [text if len(text) <= _MAX_TOKEN_BYTES else _UNREADABLE for text in texts]
    counts = np.array([len(text) for text in texts], np.int32)
    codes = np.zeros((len(texts), max(1, int(counts.max(initial=0)))), np.uint8)
    codes[np.arange(codes.shape[1]) < counts[:, None]] = np.frombuffer(b"".join(texts), np.uint8)
    return codes, counts


def decode_each_token(loaded: Any, name: str) -> list[list[bytes]]:
    """The bytes of each token of a `tokenizers.Tokenizer`, for four places in a text.

    The places are: between other tokens, the first, the last, alone. If no token has other bytes in another
    place, the result is only the first of the four lists. `name` is for errors.

    Raises:
      FdgError: a token's text depends on the tokens before and after it.
    """
    decode = functools.partial(loaded.decode_batch, skip_special_tokens=False)
    special = tokenizer_files.special_numbers(loaded)
    tokens = sorted(loaded.get_vocab(with_added_tokens=True).values())  # numbers may have gaps
    anchor = loaded.encode("a", add_special_tokens=False).ids or tokens[-1:]
    around = [(before, after) for after in (anchor, []) for before in (anchor, [])]
    texts = [decode([[*before, token, *after] for token in tokens]) for before, after in around]
    # A blank that the decoder puts before each token is the token's own; one after each, the anchor's.
    end = len(os.path.commonprefix([text[::-1] for text in texts[0]]))  # noqa: RUF071 -- these are no paths
    start = max(0, len(*decode([[*anchor, *anchor]])) - end)
    places = []
    for (before, after), decoded in zip(around, texts, strict=True):
        pieces = [b""] * tokenizer_files.vocab_size(loaded)
        for token, text in zip(tokens, decoded, strict=True):
            if token not in special:
                own = text[start if before else 0 : len(text) - (end if after else 0)]
                pieces[token] = own.encode()
                if "\ufffd" in own:  # only part of a character: take the bytes from its spelling
                    pieces[token] = _spelled_bytes(loaded.id_to_token(token), own)
        places.append(pieces)
    _check_neighbours(loaded, places, name)
    return places if any(pieces != places[0] for pieces in places) else places[:1]


def _check_neighbours(loaded: Any, places: list[list[bytes]], name: str) -> None:
    """Raises an `FdgError` if some pairs of tokens do not decode to the bytes of one and the other."""
    between, first, last, _ = places
    ordered = sorted((i for i, text in enumerate(between) if text), key=lambda i: len(between[i]))
    at_ends = [i for i in ordered if len({pieces[i] for pieces in places}) > 1]
    chosen = [*at_ends[:64], *ordered[:: len(ordered) // 64 + 1]]
    pairs = [[i, j] for i in chosen for j in chosen]
    for (i, j), text in zip(pairs, loaded.decode_batch(pairs, skip_special_tokens=False), strict=True):
        if "\ufffd" not in text and text.encode() != first[i] + last[j]:
            words = [loaded.id_to_token(token) for token in (i, j)]
            raise FdgError(
                f"tokenizer of '{name}': its decoder reads {quoted(words)} together as {quoted(text)},"
                " which is not the text of each, so programs cannot score responses: give a Python function"
                " (reward=)"
            )


def _spelled_bytes(word: str, text: str) -> bytes:
    """The bytes for which a token's spelling stands: `<0xE4>`, or the alphabet of byte-level vocabularies."""
    byte, alphabet = _BYTE.fullmatch(word), _byte_alphabet()
    if byte:
        return bytes.fromhex(byte[1])
    return bytes(alphabet[c] for c in word) if all(c in alphabet for c in word) else text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level vocabularies (Radford et al. 2019).

    Visible Latin-1 characters stand for themselves, characters from U+0100 on for the other bytes, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {**{chr(b): b for b in visible}, **{chr(256 + i): b for i, b in enumerate(others)}}
