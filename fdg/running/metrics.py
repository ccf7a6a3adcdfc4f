"""Metrics of asynchronous iterations: buffers of fixed size, sliced on the host.

A compiled program has results of fixed shapes. So it returns the metrics of any number of iterations in
buffers with a fixed number of rows, of which the first `count` are valid. Slicing on the device would compile
a program per number of rows; instead the host slices the buffers when `result()` is called.

    chunks       [([loss [1024], return [1024]], 1024), ([loss [1024], return [1024]], 176)]
    result()     {"loss": [1200], "return": [1200]}
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from fdg import jaxprs, keys

ROWS = 1024  # the maximum number of rows of a buffer
_MIN_ROWS = 16  # even if rows are large
_MAX_BYTES = 4 * 2**20  # of all buffers together, since the host copies invalid rows too

Chunk = tuple[Sequence[Any], int]  # a buffer [rows, ...] per metric, and the number of valid rows


def rows_per_buffer(metrics: Iterable[Any]) -> int:
    """The number of rows of each buffer: `ROWS`, or fewer if rows are large, such as with many agents.

    `metrics` are the shapes and dtypes of the metrics of one iteration.
    """
    row_bytes = sum(jaxprs.bytes_of(metric) for metric in metrics)
    return max(min(ROWS, _MIN_ROWS), min(ROWS, _MAX_BYTES // max(1, row_bytes)))


class PendingMetrics:
    """Metrics of iterations that may still run; `result()` waits for them."""

    def __init__(
        self, metrics: Any, chunks: Sequence[Chunk], share: Callable[[Sequence[Any]], Sequence[Any]] | None
    ):
        """`chunks` are in the iterations' order, with random keys as their key data.

        `share` broadcasts a chunk's buffers to all processes; None if every process already has them.
        """
        self._row_shapes, self._structure = jax.tree.flatten(metrics)
        self._chunks, self._share = list(chunks), share
        self.iterations = sum(count for _, count in chunks)
        self._result: Any = None

    def is_ready(self) -> bool:
        """Whether the iterations have run; always False if this process has no metrics."""
        buffers = [buffer for chunk, _ in self._chunks for buffer in chunk if buffer is not None]
        return bool(buffers) and all(buffer.is_ready() for buffer in buffers)

    def result(self) -> dict[str, jax.Array]:
        """The metrics, `[iterations]` or `[iterations, agents]`; compiles nothing.

        Waits until the iterations have run. In one process the arrays are uncommitted, on JAX's default
        device. With several processes the arrays are global, and all processes have to call this, in the same
        order.

        Raises:
          Exception: an error of an iteration, such as one raised by a host callback.
        """
        if self._result is None:
            chunks = [
                (buffers if self._share is None else self._share(buffers), n) for buffers, n in self._chunks
            ]
            arrays = _join_chunks(chunks)
            self._result = jax.tree.unflatten(
                self._structure,
                [keys.from_data(x, row) for x, row in zip(arrays, self._row_shapes, strict=True)],
            )
            self._chunks, self._share = [], None
        return self._result


def _join_chunks(chunks: Sequence[Chunk]) -> list[jax.Array]:
    """Joins the valid rows of all chunks; returns one array per metric."""
    counts = [count for _, count in chunks]
    columns = list(zip(*(buffers for buffers, _ in chunks), strict=True))
    for column in columns:
        for buffer in column:
            buffer.copy_to_host_async()
    is_here = [column[0].is_fully_addressable for column in columns]
    on_host = [_valid_rows(column, counts) for column, here in zip(columns, is_here, strict=True) if here]
    arrays = iter(jax.device_put(on_host))  # one call for all arrays
    return [
        next(arrays) if here else _join_shards(column, counts)
        for column, here in zip(columns, is_here, strict=True)
    ]


def _join_shards(column: Sequence[jax.Array], counts: Sequence[int]) -> jax.Array:
    """Joins the valid rows of buffers that span processes."""
    shards_by_device = zip(*(buffer.addressable_shards for buffer in column), strict=True)
    local_shards = [
        jax.device_put(_valid_rows([shard.data for shard in shards], counts), shards[0].device)
        for shards in shards_by_device
    ]
    example = column[0]
    return jax.make_array_from_single_device_arrays(
        (sum(counts), *example.shape[1:]), example.sharding, local_shards, dtype=example.dtype
    )


def _valid_rows(buffers: Sequence[jax.Array], counts: Sequence[int]) -> np.ndarray:
    """The valid rows of the buffers, copied so that the buffers can be freed."""
    return np.concatenate([np.asarray(buffer)[:n] for buffer, n in zip(buffers, counts, strict=True)])
