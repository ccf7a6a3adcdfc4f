"""Encodes and decodes text in traced code, one row at a time, with a tokenizer's tables."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.text.characters import Text, concatenate
from envs.text.token_bytes import pad_bytes

_UNREADABLE = 0x7F  # a character that no answer contains


def encode(
    tokenizer: Any,
    text: Text,
    width: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    left_padded: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Encodes a text with one token for each character, between the tokens `before` and `after`.

    Tokens beyond `width` are dropped from the end (from the start, if left-padded). Returns tokens `[width]
    int32` and a mask `[width] bool`.
    """
    table = jnp.asarray(np.maximum(token_of_code(tokenizer), 0))  # token 0 for a character without one
    ids = jnp.take(table, jnp.clip(text.codes, 0, 127))
    front, back = (Text(jnp.asarray(list(part), jnp.int32), jnp.int32(len(part))) for part in (before, after))
    tokens, count = concatenate(front, text._replace(codes=ids), back)
    return fit(tokens, 0, count, width, tokenizer.pad, left_padded)


def fit(
    values: jax.Array, start: Any, count: jax.Array, width: int, filler: int, left_padded: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`count` values from `start` on, padded to `[width]`, and their mask `[width] bool`.

    Values beyond `width` are dropped from the end (from the start, if left-padded).
    """
    position = jnp.arange(width) - (width - count if left_padded else 0)
    mask = (position >= 0) & (position < count)
    return jnp.where(mask, values[jnp.clip(start + position, 0, len(values) - 1)], filler), mask


def decode(
    tokenizer: Any, tokens: jax.Array, mask: jax.Array, room: int | None = None
) -> tuple[Text, jax.Array]:
    """Decodes tokens `[R] int32` with mask `[R] bool` up to the first stop token, as `tokenizer.decode` does.

    Returns a text of at most 16 bytes for each token, or `room` bytes if that is more, and whether there was
    a stop token, `[] bool`. A longer text decodes as unreadable characters, which match no answer. Bytes that
    are not UTF-8 stay as they are.
    """
    tables = _byte_tables(tokenizer)
    codes, starts, counts = map(jnp.asarray, tables)
    vocab_size, max_bytes = tokenizer.vocab_size, int(tables[2].max(initial=1))
    is_text = jnp.asarray(tables[2].reshape(-1, vocab_size).any(axis=0))
    stop = functools.reduce(jnp.logical_or, [tokens == token for token in tokenizer.stops]) & mask
    is_used = mask & (tokens < vocab_size) & (jnp.cumsum(stop) == 0)  # a model's vocabulary may be larger
    tokens = jnp.clip(tokens, 0, vocab_size - 1)
    is_used &= is_text[tokens]
    rank = jnp.cumsum(is_used)
    # 0 to 3, in the order of `_byte_tables`
    place = (rank == 1) + 2 * (rank == rank[-1]) if len(counts) > vocab_size else 0
    rows = place * vocab_size + tokens
    starts, sizes = starts[rows], jnp.where(is_used, counts[rows], 0)
    ends = jnp.cumsum(sizes)
    width = tokens.shape[0] * min(max_bytes, 16)
    width = width if room is None else min(tokens.shape[0] * max_bytes, max(width, room))
    position = jnp.arange(width)
    token = jnp.searchsorted(ends, position, side="right", method="scan_unrolled")  # the token of each byte
    token = jnp.clip(token, 0, tokens.shape[0] - 1)
    source = starts[token] + position - (ends - sizes)[token]
    characters = codes[jnp.clip(source, 0, codes.shape[0] - 1)].astype(jnp.int32)
    characters = jnp.where(ends[-1] > width, _UNREADABLE, jnp.where(position < ends[-1], characters, 0))
    return Text(characters, jnp.minimum(ends[-1], width).astype(jnp.int32)), jnp.any(stop)


@functools.cache
def _byte_tables(tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All tokens' bytes, concatenated; the offset and the length of each token, `[places * V]`.

    A token's bytes may depend on its place: between other tokens, the first of a text, the last, both. If
    they do not, there is one place.
    """
    if hasattr(tokenizer, "codes_of_tokens"):
        tables = [tokenizer.codes_of_tokens(), *getattr(tokenizer, "codes_at_ends", tuple)()]
    else:
        tables = [pad_bytes([tokenizer.decode([i]).encode() for i in range(tokenizer.vocab_size)])]
    counts = np.concatenate([counts for _, counts in tables])
    all_bytes = [codes[np.arange(codes.shape[1]) < lengths[:, None]] for codes, lengths in tables]
    return np.concatenate(all_bytes), np.cumsum(counts) - counts, counts


def token_of_code(tokenizer: Any) -> np.ndarray:
    """The token of each ASCII character, `[128] int32`; -1 for a character without one."""
    table = np.full(128, -1, np.int32)
    for code, character in enumerate(map(chr, range(128))):
        with contextlib.suppress(ValueError, LookupError):  # a tokenizer may have no tokens for it
            ids = tokenizer.encode(character)
            if ids and tokenizer.decode(ids[-1:]) == character:
                table[code] = ids[-1]
    return table
