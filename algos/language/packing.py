"""Packing: several short sequences in one row, told apart by segment numbers, so that little is padding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fdg.errors import FdgError


class Packed(NamedTuple):
    """Rows of sequences.

    Attributes:
      tokens: [rows, T] int32.
      segments: [rows, T] int32: 1, 2, ... in each row, 0 for padding.
      row, start: where each sequence is [count] int32.
    """

    tokens: np.ndarray
    segments: np.ndarray
    row: np.ndarray
    start: np.ndarray


def pack(sequences: Sequence[Sequence[int]], length: int, rows: int | None = None, pad: int = 0) -> Packed:
    """Sequences in as few rows as first-fit decreasing finds.

    Args:
      sequences: of tokens, none longer than a row.
      length: T of each row.
      rows: how many rows; None for as many as it takes.
      pad: what stands where nothing is.

    Raises:
      FdgError: a sequence that is empty or too long; more than fit into `rows`.

    >>> packed = pack([[5, 6], [7, 8, 9], [1]], length=4)
    >>> packed.tokens.tolist(), packed.segments.tolist()
    ([[7, 8, 9, 1], [5, 6, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]])
    >>> packed.row.tolist(), packed.start.tolist()
    ([1, 0, 0], [0, 0, 3])
    """
    used: list[int] = []  # tokens in each row
    numbers: list[int] = []  # and sequences
    tokens: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    row, start = np.zeros(len(sequences), np.int32), np.zeros(len(sequences), np.int32)
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        size = len(sequences[i])
        if not 0 < size <= length:
            raise FdgError(f"pack: sequence {i} has {size} tokens: rows hold 1 to length={length}")
        at = next((at for at, there in enumerate(used) if there + size <= length), len(used))
        if at == len(used):
            used.append(0)
            numbers.append(0)
            tokens.append(np.full(length, pad, np.int32))
            segments.append(np.zeros(length, np.int32))
        place = slice(used[at], used[at] + size)
        row[i], start[i] = at, used[at]
        used[at] += size
        numbers[at] += 1
        tokens[at][place], segments[at][place] = sequences[i], numbers[at]
    count = len(used) if rows is None else rows
    if count < len(used):
        raise FdgError(f"pack: {len(sequences)} sequences take {len(used)} rows of {length}, and rows={rows}")
    for _ in range(count - len(used)):
        tokens.append(np.full(length, pad, np.int32))
        segments.append(np.zeros(length, np.int32))
    shape = (count, length)
    return Packed(np.reshape(tokens, shape), np.reshape(segments, shape), row, start)
