"""Metrics of asynchronous iterations: buffers of fixed size, sliced on the host.

A compiled program has results of fixed shapes, so metrics of any number of iterations are returned in buffers
of a fixed number of rows, of which the first ones are valid. Slicing on the device would compile a program
for each number of rows; the host slices when the results are read.

    chunks       [([loss [1024], return [1024]], 1024), ([loss [1024], return [1024]], 176)]
    result()     {"loss": [1200], "return": [1200]}
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from fdg import jaxprs, keys

ROWS = 1024  # the most rows of a buffer
_FEWEST = 16  # the fewest
_BYTES = 4 * 2**20  # the limit of all buffers together: even one iteration copies them whole to the host

Chunk = tuple[Sequence[Any], int]  # a buffer [rows, ...] for each metric, and the number of valid rows


def capacity(metrics: Iterable[Any]) -> int:
    """The rows of each buffer: `ROWS`, or fewer if rows are long, such as those of many agents.

    `metrics` are shapes and dtypes of a row.
    """
    row = sum(jaxprs.bytes_of(metric) for metric in metrics)
    return max(min(ROWS, _FEWEST), min(ROWS, _BYTES // max(1, row)))


class PendingMetrics:
    """Metrics of iterations that may still run; `result()` waits for them."""

    def __init__(
        self, metrics: Any, chunks: Sequence[Chunk], share: Callable[[Sequence[Any]], Sequence[Any]] | None
    ):
        """Called by executions.

        `chunks` are buffers in the iterations' order, with random keys as their words. `share` broadcasts a
        chunk's buffers to all processes; None if every process has them.
        """
        self._rows, self._structure = jax.tree.flatten(metrics)
        self._chunks, self._share = list(chunks), share
        self.iterations = sum(count for _, count in chunks)
        self._result: Any = None

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
            arrays = _joined(chunks)
            self._result = jax.tree.unflatten(
                self._structure,
                [keys.from_words(x, row) for x, row in zip(arrays, self._rows, strict=True)],
            )
            self._chunks, self._share = [], None
        return self._result


def _joined(chunks: Sequence[Chunk]) -> list[jax.Array]:
    """The valid rows, as one array for each metric."""
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
    """Joins the valid rows of buffers that span processes."""
    parts = zip(*(buffer.addressable_shards for buffer in column), strict=True)
    local = [jax.device_put(_cut([shard.data for shard in part], counts), part[0].device) for part in parts]
    first = column[0]
    return jax.make_array_from_single_device_arrays(
        (sum(counts), *first.shape[1:]), first.sharding, local, dtype=first.dtype
    )


def _cut(buffers: Sequence[jax.Array], counts: Sequence[int]) -> np.ndarray:
    """Copies the valid rows, so that the buffers can be freed."""
    return np.concatenate([np.asarray(buffer)[:n] for buffer, n in zip(buffers, counts, strict=True)])
