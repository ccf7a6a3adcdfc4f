"""Metrics on their way from the devices: rows of fixed buffers, cut to length on the host.

A program's results have the shapes that it was compiled for, so metrics of any number of iterations come in
buffers of a fixed number of rows, of which the first few count. Cut on the device, each number of rows would
be a program of its own; the host cuts for nothing, but has to wait for the numbers.

    chunks       [([loss [1024], return [1024]], 1024), ([loss [1024], return [1024]], 176)]
    result()     {"loss": [1200], "return": [1200]}
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from fdg import jaxprs, keys

ROWS = 1024  # of a buffer, at most
_FEWEST = 16  # rows, however long they are
_BYTES = 4 * 2**20  # of all buffers together: what is fetched from the devices even for a single iteration

Chunk = tuple[Sequence[Any], int]  # a buffer [rows, ...] of each metric, and how many rows count


def capacity(metrics: Iterable[Any]) -> int:
    """How many rows buffers get: `ROWS`, but fewer where rows are long, as those of many agents are.

    Args:
      metrics: shape and dtype of one row of each.
    """
    row = sum(jaxprs.bytes_of(metric) for metric in metrics)
    return max(min(ROWS, _FEWEST), min(ROWS, _BYTES // max(1, row)))


class PendingMetrics:
    """Metrics of iterations that may still run; `result()` waits for them.

    Attributes:
      iterations: how many they are of.
    """

    def __init__(
        self, metrics: Any, chunks: Sequence[Chunk], share: Callable[[Sequence[Any]], Sequence[Any]] | None
    ):
        """For executions.

        Args:
          metrics: the pytree, with a value of each one's dtype.
          chunks: buffers, in the iterations' order; keys as their words.
          share: gives all processes a chunk's buffers; None where each has them.
        """
        self._rows, self._structure = jax.tree.flatten(metrics)
        self._chunks, self._share = list(chunks), share
        self.iterations = sum(count for _, count in chunks)
        self._result: Any = None

    def result(self) -> dict[str, jax.Array]:
        """The metrics, `[iterations]` or `[iterations, agents]`; compiles nothing.

        Waits until the iterations have run. In one process the arrays are on JAX's default device, and can be
        used with arrays of any device. Of several processes all have to call it, in the same order as each
        other; their arrays are global.

        Raises:
          Exception: what an iteration raised, such as a host callback.
        """
        if self._result is None:
            chunks = [
                (buffers if self._share is None else self._share(buffers), n) for buffers, n in self._chunks
            ]
            arrays = _joined(chunks)
            self._result = jax.tree.unflatten(
                self._structure,
                [keys.from_words(x, row) for x, row in zip(arrays, self._rows, strict=True)],
            )
            self._chunks, self._share = [], None
        return self._result


def _joined(chunks: Sequence[Chunk]) -> list[jax.Array]:
    """The rows that count, as one array of each metric."""
    counts = [count for _, count in chunks]
    columns = list(zip(*(buffers for buffers, _ in chunks), strict=True))
    for column in columns:
        for buffer in column:
            buffer.copy_to_host_async()
    found: list[Any] = [None] * len(columns)
    whole = [i for i, column in enumerate(columns) if column[0].is_fully_addressable]
    on_host = [_cut(columns[i], counts) for i in whole]
    for i, array in zip(whole, jax.device_put(on_host), strict=True):
        found[i] = array
    return [
        _joined_parts(column, counts) if x is None else x for x, column in zip(found, columns, strict=True)
    ]


def _joined_parts(column: Sequence[jax.Array], counts: Sequence[int]) -> jax.Array:
    """The same for buffers of which other processes have parts, or copies."""
    parts = zip(*(buffer.addressable_shards for buffer in column), strict=True)
    local = [jax.device_put(_cut([shard.data for shard in part], counts), part[0].device) for part in parts]
    first = column[0]
    return jax.make_array_from_single_device_arrays(
        (sum(counts), *first.shape[1:]), first.sharding, local, dtype=first.dtype
    )


def _cut(buffers: Sequence[jax.Array], counts: Sequence[int]) -> np.ndarray:
    """A copy: the buffers can go."""
    return np.concatenate([np.asarray(buffer)[:n] for buffer, n in zip(buffers, counts, strict=True)])
