"""Between texts and tokens within programs, one row at a time, by the tables of a tokenizer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.text.characters import Text


def written(
    tokenizer: Any,
    text: Text,
    width: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    left_padded: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The tokens of a text, a token a character, and others around it.

    Args:
      width: of the result; what does not fit is cut off behind (in front, if left-padded).

    Returns:
      Tokens `[width] int32` and their mask `[width] bool`.
    """
    ids = jnp.take(jnp.asarray(_token_of_code(tokenizer)), jnp.clip(text.codes, 0, 127))
    front, back = (jnp.asarray(list(part), jnp.int32) for part in (before, after))
    total = len(before) + text.length + len(after)
    place = jnp.arange(width) - (width - total if left_padded else 0)  # from the first token on
    tokens, offset = jnp.zeros(width, jnp.int32), jnp.int32(0)
    for piece, length in ((front, len(before)), (ids, text.length), (back, len(after))):
        if piece.shape[0]:
            own = jnp.take(piece, jnp.clip(place - offset, 0, piece.shape[0] - 1))
            tokens = jnp.where((place >= offset) & (place < offset + length), own, tokens)
        offset = offset + length
    mask = (place >= 0) & (place < total)
    return jnp.where(mask, tokens, tokenizer.pad), mask


def read(tokenizer: Any, tokens: jax.Array, mask: jax.Array) -> tuple[Text, jax.Array]:
    """The text of tokens `[R]` up to the first that ends an answer, and whether there is one, `[] bool`."""
    codes, counts = (jnp.asarray(table) for table in _tables(tokenizer))
    stop = functools.reduce(jnp.logical_or, [tokens == s for s in tokenizer.stops]) & mask
    said = mask & (jnp.cumsum(stop) == 0)
    tokens = jnp.clip(tokens, 0, codes.shape[0] - 1)  # a model may have more rows than the tokenizer
    sizes = jnp.where(said, counts[tokens], 0)
    ends = jnp.cumsum(sizes)
    place = jnp.arange(tokens.shape[0] * codes.shape[1])
    token = jnp.sum(place[:, None] >= ends[None, :], axis=1)  # the first whose text ends behind the place
    token = jnp.clip(token, 0, tokens.shape[0] - 1)
    within = jnp.clip(place - (ends - sizes)[token], 0, codes.shape[1] - 1)
    found = codes[tokens[token], within].astype(jnp.int32)
    return Text(jnp.where(place < ends[-1], found, 0), ends[-1].astype(jnp.int32)), jnp.any(stop)


@functools.cache
def _tables(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    return tokenizer.codes_of_tokens()


@functools.cache
def _token_of_code(tokenizer: Any) -> np.ndarray:
    return np.maximum(tokenizer.token_of_code(), 0)
