"""Encodes and decodes text in traced code, one row at a time, with a tokenizer's tables."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.text.characters import Text

_UNREADABLE_CODE = 0x7F


def encode(
    tokenizer: Any,
    text: Text,
    width: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    left_padded: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Encodes a text with one token per character, between the tokens `before` and `after`.

    Tokens beyond `width` are dropped from the end (from the start, if left-padded). Returns tokens `[width]
    int32` and a mask `[width] bool`.
    """
    ids = jnp.take(jnp.asarray(_token_of_code(tokenizer)), jnp.clip(text.codes, 0, 127))
    before_ids, after_ids = (jnp.asarray(list(part), jnp.int32) for part in (before, after))
    num_tokens = len(before) + text.length + len(after)
    position = jnp.arange(width) - (width - num_tokens if left_padded else 0)  # counted from the first token
    tokens, offset = jnp.zeros(width, jnp.int32), jnp.int32(0)
    for piece_tokens, length in ((before_ids, len(before)), (ids, text.length), (after_ids, len(after))):
        if piece_tokens.shape[0]:
            piece_ids = jnp.take(piece_tokens, jnp.clip(position - offset, 0, piece_tokens.shape[0] - 1))
            tokens = jnp.where((position >= offset) & (position < offset + length), piece_ids, tokens)
        offset = offset + length
    mask = (position >= 0) & (position < num_tokens)
    return jnp.where(mask, tokens, tokenizer.pad), mask


def decode(
    tokenizer: Any, tokens: jax.Array, mask: jax.Array, max_bytes: int | None = None
) -> tuple[Text, jax.Array]:
    """Decodes tokens `[R] int32` with mask `[R] bool` up to the first stop token, as `tokenizer.decode` does.

    Returns a text of at most `max_bytes` bytes (None: 16 per token), and whether there was a stop token, `[]
    bool`. A longer text decodes as DEL characters, which match no answer.
    """
    tables = _tables(tokenizer)
    codes, starts, counts, blanks = (jnp.asarray(table) for table in tables)
    stop = functools.reduce(jnp.logical_or, [tokens == s for s in tokenizer.stops]) & mask
    is_read = mask & (jnp.cumsum(stop) == 0)
    tokens = jnp.clip(tokens, 0, counts.shape[0] - 1)  # a model may have more rows than the tokenizer
    starts, sizes = starts[tokens], jnp.where(is_read, counts[tokens], 0)
    is_first = (jnp.cumsum(sizes) == sizes) & (sizes > 0)
    num_dropped = jnp.where(is_first, blanks[tokens], 0)
    starts, sizes = starts + num_dropped, sizes - num_dropped
    ends = jnp.cumsum(sizes)
    longest = int(tables[2].max(initial=1))
    width = tokens.shape[0] * min(longest, 16)
    width = width if max_bytes is None else min(tokens.shape[0] * longest, max(width, max_bytes))
    position = jnp.arange(width)
    # token index by position in the text
    token = jnp.searchsorted(ends, position, side="right", method="scan_unrolled")
    token = jnp.clip(token, 0, tokens.shape[0] - 1)
    index = starts[token] + position - (ends - sizes)[token]
    decoded = codes[jnp.clip(index, 0, codes.shape[0] - 1)].astype(jnp.int32)
    decoded = jnp.where(ends[-1] > width, _UNREADABLE_CODE, jnp.where(position < ends[-1], decoded, 0))
    return Text(decoded, jnp.minimum(ends[-1], width).astype(jnp.int32)), jnp.any(stop)


@functools.cache
def _tables(tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All tokens' bytes, concatenated; per token the offset, the length, and the blanks dropped at the
    start.
    """
    codes, counts = tokenizer.codes_of_tokens()
    values = codes[np.arange(codes.shape[1]) < counts[:, None]]
    return values, np.cumsum(counts) - counts, counts, tokenizer.opening_blanks()


@functools.cache
def _token_of_code(tokenizer: Any) -> np.ndarray:
    return np.maximum(tokenizer.token_of_code(), 0)
