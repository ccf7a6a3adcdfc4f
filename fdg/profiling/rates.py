"""Measures the limits of a group's devices: matrix products by shape, and memory by size.

All devices work at once; on a CPU with more cores than devices, one copy per core if that is faster. A
product is timed with its operands in both layouts, and the best counts.
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
_SMALLEST, _LARGEST = 2**14, 2**26  # bytes of the arrays for measuring memory
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
        self._tried: dict[Product, dict[str, Repeated]] = {}
        self._memory: dict[int, Repeated] = {}

    def prepare(self, products: Sequence[Product], sizes: Sequence[int]) -> None:
        """Compiles benchmarks of products and of arrays of some sizes."""
        self._tried = {
            product: {layout: _product(product, layout, self._mesh) for layout in LAYOUTS}
            for product in products
        }
        self._memory = {size: _memory(size, self._mesh) for size in {_LARGEST, *map(_rounded, sizes)}}
        compile_all(self._all())
        for one in self._all():
            one.also_in(self._lanes)

    def measure(self) -> None:
        """Runs one round."""
        for one in self._all():
            one.measure()

    def _all(self) -> list[Repeated]:
        return [*(one for tried in self._tried.values() for one in tried.values()), *self._memory.values()]

    @property
    def products(self) -> Mapping[Product, tuple[float, str]]:
        """Seconds of a product on each device with all at work, and the best layout."""
        return {
            product: min((one.seconds, layout) for layout, one in tried.items())
            for product, tried in self._tried.items()
        }

    def seconds(self, products: Mapping[Product, int]) -> float:
        """Seconds of products on each device; products that were not measured count at the best rate."""
        known = {product: seconds for product, (seconds, _) in self.products.items()}
        best = max((product.flops / seconds for product, seconds in known.items()), default=0.0)
        return sum(
            count * known.get(product, product.flops / best if best else 0.0)
            for product, count in products.items()
        )

    @property
    def memory_rate(self) -> float:
        """Bytes per second that all devices read and write of the largest arrays."""
        size = max(self._memory, default=0)
        return self._mesh.size * size / self._memory[size].seconds if size else 0.0

    def memory_seconds(self, size: int) -> float:
        """Seconds to read and write this many prepared bytes on each device."""
        rounded = _rounded(size)
        return self._memory[rounded].seconds * size / rounded if rounded in self._memory else 0.0


def _rounded(size: int) -> int:
    """The size of the benchmark array for some bytes: a power of two within bounds.

    >>> [_rounded(size) // 1024 for size in (0, 1, 2**14, 2**14 + 1, 40_000, 2**30)]
    [16, 16, 16, 32, 64, 65536]
    """
    return min(_LARGEST, max(_SMALLEST, 2 ** (size - 1).bit_length()))


def _each(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array on each device."""
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
    return Repeated(function, [_each(mesh, shape, product.dtype) for shape in shapes])


def _memory(size: int, mesh: Mesh) -> Repeated:
    """Reads and writes `size / 2` bytes each, in place."""
    spec = PartitionSpec(_AXIS)
    function = jax.shard_map(
        lambda x: [x * 0.5 + 0.5], mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False
    )
    return Repeated(function, [_each(mesh, (size // 8,), jnp.float32)], {0: 0})
