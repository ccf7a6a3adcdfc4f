"""Measures the limits of a group's devices: matrix products by shape, and memory by size.

All devices work at once; on a CPU with more cores than devices, one copy per core runs if that is faster. A
product is timed with its operands in each layout of `LAYOUTS`, and the fastest counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg.cores import usable_cores
from fdg.jaxprs.count import Product
from fdg.lowering.mesh import make_mesh
from fdg.profiling.repeating import Repeated, compile_all

LAYOUTS = {"x @ w": "bmk,bkn->bmn", "x @ w.T": "bmk,bnk->bmn", "x.T @ w": "bkm,bkn->bmn"}
_MIN_BYTES, _MAX_BYTES = 2**14, 2**26  # of the arrays that measure memory
_AXIS = "device"


def lanes(devices: Sequence[jax.Device]) -> int:
    """Concurrent copies of a program per device that the host's cores allow."""
    if devices[0].platform != "cpu":
        return 1
    return max(1, usable_cores() // len(jax.local_devices(backend="cpu")))


class Rates:
    """The rates of some devices of this process, prepared and then measured in rounds."""

    def __init__(self, devices: Sequence[jax.Device]):
        self._mesh = make_mesh([d for d in devices if d.process_index == jax.process_index()], _AXIS)
        self._lanes = lanes(list(self._mesh.devices.flat))
        self._product_benchmarks: dict[Product, dict[str, Repeated]] = {}
        self._memory: dict[int, Repeated] = {}

    def prepare(self, products: Sequence[Product], sizes: Sequence[int]) -> None:
        """Compiles benchmarks of these products, and of memory for these numbers of bytes."""
        self._product_benchmarks = {
            product: {layout: _product(product, layout, self._mesh) for layout in LAYOUTS}
            for product in products
        }
        self._memory = {
            size: _memory(size, self._mesh) for size in {_MAX_BYTES, *map(_benchmark_bytes, sizes)}
        }
        compile_all(self._benchmarks())
        for benchmark in self._benchmarks():
            benchmark.choose_copies(self._lanes)

    def measure(self) -> None:
        """Runs one round."""
        for benchmark in self._benchmarks():
            benchmark.measure()

    def _benchmarks(self) -> list[Repeated]:
        return [
            *(
                benchmark
                for by_layout in self._product_benchmarks.values()
                for benchmark in by_layout.values()
            ),
            *self._memory.values(),
        ]

    @property
    def products(self) -> Mapping[Product, tuple[float, str]]:
        """Seconds per product while all devices work, and the fastest layout."""
        return {
            product: min((benchmark.seconds, layout) for layout, benchmark in by_layout.items())
            for product, by_layout in self._product_benchmarks.items()
        }

    def seconds(self, products: Mapping[Product, int]) -> float:
        """Seconds of products on each device; unmeasured products count at the best measured rate."""
        measured = {product: seconds for product, (seconds, _) in self.products.items()}
        best_rate = max((product.flops / seconds for product, seconds in measured.items()), default=0.0)
        return sum(
            count * measured.get(product, product.flops / best_rate if best_rate else 0.0)
            for product, count in products.items()
        )

    @property
    def memory_rate(self) -> float:
        """Bytes per second that all devices together read and write in the largest arrays."""
        size = max(self._memory, default=0)
        return self._mesh.size * size / self._memory[size].seconds if size else 0.0

    def memory_seconds(self, size: int) -> float:
        """Seconds to read and write `size` bytes on each device; 0 if `prepare` did not get this size."""
        rounded = _benchmark_bytes(size)
        return self._memory[rounded].seconds * size / rounded if rounded in self._memory else 0.0


def _benchmark_bytes(size: int) -> int:
    """The size of the benchmark array for some bytes: a power of two within bounds.

    >>> [_benchmark_bytes(size) // 1024 for size in (0, 1, 2**14, 2**14 + 1, 40_000, 2**30)]
    [16, 16, 16, 32, 64, 65536]
    """
    return min(_MAX_BYTES, max(_MIN_BYTES, 2 ** (size - 1).bit_length()))


def _on_each_device(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of ones with this shape on each device."""
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    return jax.device_put(jnp.ones((mesh.size, *shape), dtype), sharding)


def _product(product: Product, layout: str, mesh: Mesh) -> Repeated:
    sizes = {"b": product.batch, "m": product.m, "k": product.k, "n": product.n}
    subscripts = LAYOUTS[layout] if product.batch > 1 else LAYOUTS[layout].replace("b", "")
    left, right = subscripts.partition("->")[0].split(",")

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x[0], w[0])[None]

    spec = PartitionSpec(_AXIS)
    function = jax.shard_map(
        lambda x, w: [multiply(x, w)], mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    shapes = [tuple(sizes[axis] for axis in side) for side in (left, right)]
    return Repeated(function, [_on_each_device(mesh, shape, product.dtype) for shape in shapes])


def _memory(size: int, mesh: Mesh) -> Repeated:
    """A benchmark that reads and writes `size / 2` bytes each, in place."""
    spec = PartitionSpec(_AXIS)
    function = jax.shard_map(
        lambda x: [x * 0.5 + 0.5], mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False
    )
    return Repeated(function, [_on_each_device(mesh, (size // 8,), jnp.float32)], {0: 0})
