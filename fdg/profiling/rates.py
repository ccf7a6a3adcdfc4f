"""Measures the best rates of a group's devices for a profile: matrix products by shape, and memory by size.

All devices work at once; on a CPU with more cores than devices, one copy per core runs if that is faster. A
product is timed with its operands in each layout of `LAYOUTS`, and the fastest counts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg.cores import usable_cores
from fdg.jaxprs.count import Product
from fdg.lowering.mesh import make_mesh
from fdg.profiling.repeating import Repeated, compile_all

# How operands are stored -> subscripts of `jnp.einsum`.
LAYOUTS = {"x @ w": "bmk,bkn->bmn", "x @ w.T": "bmk,bnk->bmn", "x.T @ w": "bkm,bkn->bmn"}
_MIN_BYTES, _MAX_BYTES = 2**14, 2**26  # sizes of the arrays with which memory is measured
_AXIS = "device"


def _copies_per_device(device: jax.Device) -> int:
    """The number of copies of a program per device of this kind that the host's cores can run at once."""
    if device.platform != "cpu":
        return 1
    return max(1, usable_cores() // len(jax.local_devices(backend="cpu")))


class Rates:
    """The rates of some devices of this process, which `measure` measures in rounds."""

    def __init__(self, devices: Sequence[jax.Device], products: Sequence[Product], sizes: Sequence[int]):
        """Compiles benchmarks of these products, and of memory for these numbers of bytes."""
        self._mesh = mesh = make_mesh(devices, _AXIS)
        self._product_benchmarks = {
            product: {layout: _product_benchmark(product, layout, mesh) for layout in LAYOUTS}
            for product in products
        }
        memory_sizes = {_MAX_BYTES, *map(_benchmark_bytes, sizes)}
        self._memory_benchmarks = {size: _memory_benchmark(size, mesh) for size in memory_sizes}
        benchmarks = [x for by_layout in self._product_benchmarks.values() for x in by_layout.values()]
        self._benchmarks = [*benchmarks, *self._memory_benchmarks.values()]
        compile_all(self._benchmarks)
        for benchmark in self._benchmarks:
            benchmark.choose_copies(_copies_per_device(devices[0]))

    def measure(self) -> None:
        """Times each benchmark once more."""
        for benchmark in self._benchmarks:
            benchmark.measure()

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
        return self._mesh.size * _MAX_BYTES / self._memory_benchmarks[_MAX_BYTES].seconds

    def memory_seconds(self, size: int) -> float:
        """Seconds to read and write `size` bytes, one of the constructor's `sizes`, on each device."""
        benchmark_bytes = _benchmark_bytes(size)
        return self._memory_benchmarks[benchmark_bytes].seconds * size / benchmark_bytes


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


def _per_device(function: Callable, mesh: Mesh) -> Callable:
    """A function that applies `function` on each device to the device's parts of the arguments."""
    spec = PartitionSpec(_AXIS)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _product_benchmark(product: Product, layout: str, mesh: Mesh) -> Repeated:
    """A benchmark of a product on each device, with operands in a layout, which is a key of `LAYOUTS`."""
    sizes = {"b": product.batch, "m": product.m, "k": product.k, "n": product.n}
    subscripts = LAYOUTS[layout] if product.batch > 1 else LAYOUTS[layout].replace("b", "")
    left, right = subscripts.partition("->")[0].split(",")

    def multiply(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [jnp.einsum(subscripts, x[0], w[0])[None]]

    function = _per_device(multiply, mesh)
    shapes = [tuple(sizes[axis] for axis in side) for side in (left, right)]
    return Repeated(function, [_on_each_device(mesh, shape, product.dtype) for shape in shapes])


def _memory_benchmark(size: int, mesh: Mesh) -> Repeated:
    """A benchmark that reads `size / 2` bytes, and writes as many in place."""
    function = _per_device(lambda x: [x * 0.5 + 0.5], mesh)
    return Repeated(function, [_on_each_device(mesh, (size // 8,), jnp.float32)], {0: 0})
