"""Text as arrays of a fixed width, and traceable functions that build or compare one text (`vmap` for many).

A `Text` has `W` bytes, of which those beyond its length are zeros. The bytes are UTF-8, so that a problem
does not depend on a model's tokenizer. An ASCII character is one byte.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError


class Text(NamedTuple):
    """A text of limited length."""

    codes: jax.Array  # [W] int32, UTF-8 bytes; 0 from `length` on
    length: jax.Array  # [] int32, bytes in use


def literal(text: str) -> Text:
    """A constant ASCII text; its width `W` is its length.

    >>> literal("ab").codes.tolist()
    [97, 98]
    """
    if not text.isascii():
        raise FdgError(f"text {text!r:.60}: give ASCII characters only")
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Text(jnp.asarray(codes), jnp.int32(len(text)))


def number(value: jax.Array, digits: int) -> Text:
    """An integer in decimal, with `-` if it is negative; its width is `digits` (at most 9) plus one.

    >>> to_string(number(jnp.int32(-305), 4)), to_string(number(jnp.int32(0), 2))
    ('-305', '0')
    """
    if not 1 <= digits <= 9:
        raise FdgError(f"a number of {digits} digits: 1 to 9 fit an int32")
    magnitude = jnp.abs(value)
    powers = np.array([10**i for i in range(digits)], np.int32)
    num_digits = jnp.maximum(jnp.sum(magnitude >= powers, dtype=jnp.int32), 1)
    places = jnp.arange(digits)
    power = jnp.take(jnp.asarray(powers), jnp.clip(num_digits - 1 - places, 0, digits - 1))
    codes = jnp.where(places < num_digits, magnitude // power % 10 + ord("0"), 0)
    sign = Text(jnp.full(1, ord("-"), jnp.int32), (value < 0).astype(jnp.int32))
    return concatenate(sign, Text(codes.astype(jnp.int32), num_digits))


def zero_padded(value: jax.Array, digits: int) -> Text:
    """A non-negative integer in decimal, zero-padded to `digits`, at most 9.

    >>> to_string(zero_padded(jnp.int32(7), 3))
    '007'
    """
    powers = np.array([10**i for i in reversed(range(digits))], np.int32)
    return Text((value // powers % 10 + ord("0")).astype(jnp.int32), jnp.int32(digits))


def character(code: jax.Array) -> Text:
    """A text of one character, from its code `[] int32`."""
    return Text(jnp.asarray(code, jnp.int32)[None], jnp.int32(1))


def when(condition: jax.Array, text: Text) -> Text:
    """The text if the condition holds, else an empty text of the same width.

    >>> to_string(when(jnp.bool_(False), literal("ab")))
    ''
    """
    return Text(jnp.where(condition, text.codes, 0), jnp.where(condition, text.length, 0))


def concatenate(*texts: Text) -> Text:
    """Concatenates texts; the width is their total width.

    >>> to_string(concatenate(literal("a"), when(jnp.bool_(False), literal("b")), literal("c")))
    'ac'
    """
    places = jnp.arange(sum(text.codes.shape[0] for text in texts))
    codes, offset = jnp.zeros(places.shape, jnp.int32), jnp.int32(0)
    for text in texts:
        text_width = text.codes.shape[0]
        if not text_width:
            continue
        own_codes = jnp.take(text.codes, jnp.clip(places - offset, 0, text_width - 1))
        codes = jnp.where((places >= offset) & (places < offset + text.length), own_codes, codes)
        offset = offset + text.length
    return Text(codes, offset)


def join(texts: Sequence[Text], separator: str) -> Text:
    """Joins texts with a separator.

    >>> to_string(join([literal("1"), literal("23")], ", "))
    '1, 23'
    """
    separators = [literal(separator)] * len(texts)
    return concatenate(*[part for pair in zip(texts, separators, strict=True) for part in pair][:-1])


def numbers(values: jax.Array, digits: int, separator: str = ",") -> Text:
    """Joins the integers of an array `[K]`, K static, with a separator.

    >>> to_string(numbers(jnp.array([3, 12]), 2))
    '3,12'
    """
    return join([number(values[i], digits) for i in range(values.shape[0])], separator)


def backwards(text: Text) -> Text:
    """Reverses a text.

    >>> to_string(backwards(number(jnp.int32(-305), 5)))
    '503-'
    """
    places = jnp.arange(text.codes.shape[0])
    reversed_codes = jnp.take(text.codes, jnp.clip(text.length - 1 - places, 0, max(len(places) - 1, 0)))
    return Text(jnp.where(places < text.length, reversed_codes, 0), text.length)


def equal(a: Text, b: Text) -> jax.Array:
    """True if two texts of any width are equal, `[] bool`."""
    width = max(a.codes.shape[0], b.codes.shape[0])
    return (a.length == b.length) & jnp.all(_padded_codes(a, width) == _padded_codes(b, width))


def _padded_codes(text: Text, width: int) -> jax.Array:
    return jnp.pad(text.codes, (0, width - text.codes.shape[0]))


def stripped(text: Text) -> Text:
    """`str.strip`: without leading and trailing whitespace.

    >>> to_string(stripped(literal("  a b ")))
    'a b'
    """
    width = text.codes.shape[0]
    places = jnp.arange(width)
    blank = (text.codes == ord(" ")) | ((text.codes >= ord("\t")) & (text.codes <= ord("\r")))
    visible = (places < text.length) & ~blank
    first = jnp.min(jnp.where(visible, places, width))
    end = jnp.max(jnp.where(visible, places + 1, 0))
    length = jnp.maximum(end - first, 0).astype(jnp.int32)
    shifted = jnp.take(text.codes, jnp.clip(places + first, 0, max(width - 1, 0)))
    return Text(jnp.where(places < length, shifted, 0), length)


def to_string(text: Text) -> str:
    """Converts a concrete text to a Python string."""
    return bytes(np.asarray(text.codes)[: int(text.length)].astype(np.uint8)).decode(errors="replace")
