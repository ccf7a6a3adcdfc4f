"""Seconds of a program's run on one device, by class of operation: work divided by rates.

Without fusion, each operation would take its bytes divided by the rate of its class, and a start-up time.
Fusion removes most of that: `JOINED` has the remaining share by class on machines without a calibration; a
calibration fits the shares (`fitting`), since they differ between machines.
"""

import collections
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from fdg.costs.hardware import BY_BYTES, DeviceKind
from fdg.jaxprs.count import Product
from fdg.profiling.work import SizedOperation, Work

CLASSES = ("product", "convolution", *BY_BYTES, "operation", "trip")

_AS_IT_STANDS: Mapping[str, float] = dict.fromkeys(CLASSES, 1.0)
# Not fitted, since no device was available: ten operations become one kernel, and elementwise ones are fused
# into products.
_OF_KERNELS: Mapping[str, float] = {
    **_AS_IT_STANDS,
    "elementwise": 0.15,
    "special": 0.15,
    "reduction": 0.5,
    "movement": 0.5,
    "copy": 0.5,
    "operation": 0.1,
}
JOINED: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # Fitted with `overheads.OVERHEADS` to one half of the cells of `bench.costs`, on two machines; a
        # machine's calibration has its own. See docs/scale.md.
        "cpu": {
            **_AS_IT_STANDS,
            "product": 0.57,
            "elementwise": 0.72,
            "transcendental": 1.5,
            "special": 2.6,
            "reduction": 0.78,
            "random": 0.25,
            "movement": 0.88,
            "copy": 3.8,
            "operation": 0.18,
        },
        "gpu": _OF_KERNELS,
        "tpu": _OF_KERNELS,
    }
)
"""What remains of a class's time when operations are joined, by platform."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of a program on one device."""

    by_class: Mapping[str, float]  # seconds of each class, on the cores that it may use
    cores: float = 1.0  # mean number of busy cores; 1 for a device that shares none


def seconds_of(work: Work, kind: DeviceKind, cores: float = 1.0) -> Seconds:
    """Seconds of a program's work.

    `work` is of one device (`profiling.work.work_of`), and `cores` are those of the host that it can use
    alone.
    """
    keep = kind.joined or JOINED[kind.platform]
    wide, narrow = raw_seconds(work, kind)
    gain = 1 + kind.rate("parallel") * (max(1.0, cores) - 1)
    by_class = {
        name: keep.get(name, 1.0) * (wide.get(name, 0.0) / gain + narrow.get(name, 0.0))
        for name in CLASSES
        if wide.get(name) or narrow.get(name)
    }
    total = sum(by_class.values())
    alone = sum(keep.get(name, 1.0) * wide.get(name, 0.0) for name in CLASSES)
    # An operation that is divided over cores keeps all of them busy.
    busy = 1 + (max(1.0, cores) - 1) * (alone / gain / total if total else 0.0)
    return Seconds(by_class, busy)


def raw_seconds(work: Work, kind: DeviceKind) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Seconds by class on one core without fusion, of parallel and of sequential operations."""
    wide: dict[str, float] = collections.defaultdict(float)
    narrow: dict[str, float] = collections.defaultdict(float)
    least = kind.rate("parallel_bytes")
    for product, count in work.products.items():
        name = "convolution" if product.convolution else "product"
        large = product.bytes >= least or product.flops >= 8 * least
        (wide if large else narrow)[name] += count * product_seconds(product, kind)
    for operation, count in work.operations.items():
        seconds = operation_seconds(operation, kind)
        (wide if operation.bytes >= least else narrow)[operation.kind] += count * seconds
        narrow["operation"] += count * kind.rate("operation")
    narrow["trip"] += work.trips * kind.rate("trip")
    return wide, narrow


def product_seconds(product: Product, kind: DeviceKind) -> float:
    """Seconds of a product: start-up, operations, and bytes."""
    rate = kind.rate(f"product/{product.dtype}")
    if product.convolution:
        rate *= kind.rate("convolution")
    return kind.rate("product_call") + product.flops / rate + product.bytes / kind.rate("product_bytes")


def operation_seconds(operation: SizedOperation, kind: DeviceKind) -> float:
    """Seconds of an operation without start-up: bytes by its class's rate, or memory's if it is large."""
    name = operation.kind if operation.kind in CLASSES else "elementwise"
    seconds = operation.bytes / kind.rate(name)
    if operation.bytes > kind.rate("cache_bytes"):
        seconds = max(seconds, operation.bytes / kind.rate("memory"))
    return seconds + (kind.rate("host_call") if name == "host" else 0.0)
