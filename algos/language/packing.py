"""Packing: several short sequences in one row, separated by segment numbers, to reduce padding.

`pack` runs on the host and minimises the number of rows; `pack_rows` is traceable, with a given number of
rows. `without_padding` applies a function to packed rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError


class Packed(NamedTuple):
    """Packed sequences.

    Attributes:
      tokens, segments: [rows, T] int32; segments are 1, 2, ... in each row, 0 for padding.
      row, start: position of each sequence, [count] int32.
    """

    tokens: np.ndarray
    segments: np.ndarray
    row: np.ndarray
    start: np.ndarray


def pack(sequences: Sequence[Sequence[int]], length: int, rows: int | None = None, pad: int = 0) -> Packed:
    """Packs sequences into rows of `length` tokens by first-fit decreasing: `rows` rows, or as few as it can.

    `pad` fills the rest.

    Raises:
      FdgError: an empty or too long sequence; too many for `rows`.

    >>> packed = pack([[5, 6], [7, 8, 9], [1]], length=4)
    >>> packed.tokens.tolist(), packed.segments.tolist()
    ([[7, 8, 9, 1], [5, 6, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]])
    >>> packed.row.tolist(), packed.start.tolist()
    ([1, 0, 0], [0, 0, 3])
    """
    count = len(sequences)
    used, counts = [0] * (rows or 0), [0] * (rows or 0)  # numbers of tokens and of sequences in each row
    row, start, segment = np.zeros((3, count), np.int32)
    for i in sorted(range(count), key=lambda i: -len(sequences[i])):
        size = len(sequences[i])
        if not 0 < size <= length:
            raise FdgError(f"pack: sequence {i} has {size} tokens: rows hold 1 to length={length}")
        target = next((r for r, used_tokens in enumerate(used) if used_tokens + size <= length), len(used))
        if target == len(used):
            used.append(0)
            counts.append(0)
        counts[target] += 1
        row[i], start[i], segment[i] = target, used[target], counts[target]
        used[target] += size
    if rows is not None and rows < len(used):
        raise FdgError(f"pack: {count} sequences take {len(used)} rows of {length}, and rows={rows}")
    tokens, segments = np.full((len(used), length), pad, np.int32), np.zeros((len(used), length), np.int32)
    for i, sequence in enumerate(sequences):
        place = row[i], slice(start[i], start[i] + len(sequence))
        tokens[place], segments[place] = sequence, segment[i]
    return Packed(tokens, segments, row, start)


class Rows(NamedTuple):
    """`N` sequences, packed in traced code into `M` rows of `L` tokens."""

    tokens: jax.Array  # [M, L] int32
    segments: jax.Array  # [M, L] int32: 1, 2, ... in each row, 0 for padding.
    source: jax.Array  # [M, L] int32, index of each token in the input [N, T]; N * T for padding
    place: jax.Array  # [N, T] int32, the inverse: index of each token in [M, L]; M * L for padding
    fits: jax.Array  # [N] bool: False for sequences that no row had room for

    def gather(self, x: jax.Array) -> jax.Array:
        """Moves values of tokens from [N, T] to [M, L]; zero in padding."""
        return jnp.append(x.reshape(-1), jnp.zeros(1, x.dtype))[self.source]


def pack_rows(tokens: jax.Array, mask: jax.Array, rows: int, length: int, pad: int = 0) -> Rows:
    """Packs sequences into `rows` (M) rows of `length` (L) tokens, by first-fit decreasing; traceable.

    `tokens` [N, T] int32; `mask` [N, T] bool, False for padding, which may be anywhere. `pad` fills the rest.

    >>> tokens = jnp.array([[5, 6, 0], [7, 8, 9], [0, 0, 1]])
    >>> packed = pack_rows(tokens, tokens > 0, rows=2, length=4)
    >>> packed.tokens.tolist(), packed.segments.tolist(), packed.fits.tolist()
    ([[7, 8, 9, 1], [5, 6, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]], [True, True, True])
    """
    count, width = tokens.shape
    sizes = jnp.sum(mask, axis=1, dtype=jnp.int32)
    order = jnp.argsort(-sizes, stable=True)

    def place(carry: tuple[jax.Array, jax.Array], size: jax.Array) -> tuple[Any, Any]:
        used, numbers = carry
        has_room = used + size <= length
        fits = jnp.any(has_room) & (size > 0)
        row = jnp.argmax(has_room)
        placement = fits, row, used[row], numbers[row] + 1
        is_row = (jnp.arange(rows) == row) & fits
        return (used + is_row * size, numbers + is_row), placement

    zeros = jnp.zeros(rows, jnp.int32)
    _, (fits, row, start, number) = jax.lax.scan(place, (zeros, zeros), sizes[order])
    original_order = jnp.argsort(order)
    fits, row, start, number = (x[original_order] for x in (fits, row, start, number))
    offset = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    target = (row * length + start)[:, None] + offset
    target = jnp.where(mask & fits[:, None], target, rows * length)  # out of range for all other tokens
    index = jnp.arange(count * width, dtype=jnp.int32)
    source = jnp.full(rows * length, count * width, jnp.int32).at[target.reshape(-1)].set(index, mode="drop")
    source = source.reshape(rows, length)
    packed = Rows(tokens, tokens, source, target, fits)
    numbers = jnp.broadcast_to(number[:, None].astype(jnp.int32), mask.shape)
    return packed._replace(
        tokens=jnp.where(source < count * width, packed.gather(tokens), pad), segments=packed.gather(numbers)
    )


def without_padding(
    function: Callable[[jax.Array, jax.Array], Any], tokens: jax.Array, segments: jax.Array, rows: int
) -> Any:
    """Calls a function of padded sequences on as few packed rows as needed.

    The N sequences are divided into K blocks of equal size. Each block packs its own sequences, so blocks may
    be split over devices. One iteration of a loop computes one packed row of each block; rows that no block
    needs are skipped. The gradient recomputes each iteration.

    `function` maps tokens and segments [K, T] int32 to a pytree of [K, T, ...]; the result for a token may
    depend on tokens of the same segment only. `segments` [N, T] are 1 (or True) for tokens; padding may be
    anywhere. K is the greatest common divisor of `rows` and N. The result [N, T, ...] is zero in padding.

    >>> tokens = jnp.array([[5, 6, 0, 0], [7, 0, 0, 0]])
    >>> without_padding(lambda tokens, segments: 10 * tokens + segments, tokens, tokens > 0, rows=1).tolist()
    [[51, 61, 0, 0], [72, 0, 0, 0]]
    """
    count, width = tokens.shape
    blocks = math.gcd(rows, count)
    block_size = count // blocks

    def pack_block(tokens: jax.Array, mask: jax.Array) -> Rows:
        return pack_rows(tokens, mask, block_size, width)

    def in_blocks(x: jax.Array) -> jax.Array:
        return x.reshape(blocks, block_size, *x.shape[1:])

    packed = jax.vmap(pack_block)(in_blocks(tokens), in_blocks(segments > 0))

    @jax.checkpoint
    def compute_row(_: tuple[()], row: tuple[jax.Array, jax.Array]) -> tuple[tuple[()], Any]:
        shapes = jax.eval_shape(function, *row)
        zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        return (), jax.lax.cond(jnp.any(row[1] > 0), function, zeros, *row)

    packed_rows = jnp.moveaxis(packed.tokens, 1, 0), jnp.moveaxis(packed.segments, 1, 0)
    results = jax.lax.scan(compute_row, (), packed_rows)[1]

    def unpack(x: jax.Array) -> jax.Array:  # [block_size, K, T, ...] to [N, T, ...]
        x = jnp.moveaxis(x, 0, 1).reshape(blocks, block_size * width, *x.shape[3:])
        take = lambda x, place: x.at[place].get(mode="fill", fill_value=0)  # noqa: E731
        return jax.vmap(take)(x, packed.place.reshape(blocks, -1)).reshape(count, width, *x.shape[2:])

    return jax.tree.map(unpack, results)
