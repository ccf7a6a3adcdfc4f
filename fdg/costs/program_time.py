"""Seconds of a program's run on one device, by class of operation: work divided by rates.

Without fusion, each operation would take its bytes divided by the rate of its class, plus a start-up time.
XLA's fusion removes a part of this time. `SHARES_AFTER_FUSION` has the share that remains, by class of
operation. A share above 1 means that the class is slower within programs than in its microbenchmark. The
shares differ between machines, so a calibration fits them (`fitting`).
"""

import collections
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from fdg.costs.hardware import BY_BYTES, DeviceKind
from fdg.jaxprs.count import Product
from fdg.profiling.work import SizedOperation, Work

# Classes of work. A "batched product" is one of several matrices, such as attention's. "operation" is the
# start-up of any operation except products, "trip" that of a loop's trip.
CLASSES = ("product", "batched product", "convolution", *BY_BYTES, "operation", "trip")

_NO_FUSION: Mapping[str, float] = dict.fromkeys(CLASSES, 1.0)
# Assumed, because no device was available for a fit: ten operations become one kernel, and elementwise
# operations are fused into products.
_ACCELERATOR_SHARES: Mapping[str, float] = {
    **_NO_FUSION,
    "elementwise": 0.15,
    "special": 0.15,
    "reduction": 0.5,
    "movement": 0.5,
    "copy": 0.5,
    "operation": 0.1,
}
SHARES_AFTER_FUSION: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # Fitted together with `overheads.OVERHEADS` to one half of the cells of `bench.costs`, on two
        # machines (docs/scale.md). A machine's calibration replaces these values.
        "cpu": {
            **_NO_FUSION,
            "product": 0.57,
            "batched product": 5.0,
            "elementwise": 0.72,
            "transcendental": 1.5,
            "special": 2.6,
            "reduction": 0.78,
            "random": 0.25,
            "movement": 0.88,
            "copy": 3.8,
            "operation": 0.18,
        },
        "gpu": _ACCELERATOR_SHARES,
        "tpu": _ACCELERATOR_SHARES,
    }
)
"""The share of each class's time that remains after fusion, by platform."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of a program on one device."""

    by_class: Mapping[str, float]  # seconds of each class of operations, on the cores that the device can use
    cores: float = 1.0  # mean number of busy cores; 1 for a device that shares no cores


def seconds_of(work: Work, kind: DeviceKind, cores: float = 1.0) -> Seconds:
    """Seconds that a device of this kind takes for `work` (`profiling.work.work_of`).

    `cores` is the number of the host's cores that the device can use; 1 for an accelerator.
    """
    remaining = kind.shares_after_fusion or SHARES_AFTER_FUSION[kind.platform]
    parallel, sequential = seconds_without_fusion(work, kind)
    speedup = 1 + kind.rate("parallel") * (max(1.0, cores) - 1)
    by_class = {
        name: remaining.get(name, 1.0) * (parallel.get(name, 0.0) / speedup + sequential.get(name, 0.0))
        for name in CLASSES
        if parallel.get(name) or sequential.get(name)
    }
    # Parallel operations keep all cores busy, sequential ones only one.
    parallel_total = sum(remaining.get(name, 1.0) * parallel.get(name, 0.0) for name in CLASSES)
    parallel_share = parallel_total / speedup / (sum(by_class.values()) or 1.0)
    return Seconds(by_class, 1 + (max(1.0, cores) - 1) * parallel_share)


def seconds_without_fusion(work: Work, kind: DeviceKind) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Seconds by class on one core without fusion: of parallel operations, and of sequential ones."""
    parallel: dict[str, float] = collections.defaultdict(float)
    sequential: dict[str, float] = collections.defaultdict(float)
    parallel_bytes = kind.rate("parallel_bytes")
    for product, count in work.products.items():
        name = "batched product" if product.batch > 1 else "product"
        name = "convolution" if product.convolution else name
        # Products of small matrices with many FLOPs are divided among several cores, too.
        is_parallel = product.bytes >= parallel_bytes or product.flops >= 8 * parallel_bytes
        (parallel if is_parallel else sequential)[name] += count * product_seconds(product, kind)
    for operation, count in work.operations.items():
        seconds = operation_seconds(operation, kind)
        (parallel if operation.bytes >= parallel_bytes else sequential)[operation.kind] += count * seconds
        sequential["operation"] += count * kind.rate("operation")
    sequential["trip"] += work.trips * kind.rate("trip")
    return parallel, sequential


def product_seconds(product: Product, kind: DeviceKind) -> float:
    """Seconds of a product: start-up, FLOPs, and bytes."""
    rate = kind.rate(f"product/{product.dtype}")
    if product.convolution:
        rate *= kind.rate("convolution")
    return kind.rate("product_call") + product.flops / rate + product.bytes / kind.rate("product_bytes")


def operation_seconds(operation: SizedOperation, kind: DeviceKind) -> float:
    """Seconds of an operation without its start-up time.

    Divides the operation's bytes by the rate of its class, or by the rate of memory if that is lower and the
    bytes do not fit into the cache.
    """
    name = operation.kind if operation.kind in CLASSES else "elementwise"
    seconds = operation.bytes / kind.rate(name)
    if operation.bytes > kind.rate("cache_bytes"):
        seconds = max(seconds, operation.bytes / kind.rate("memory"))
    return seconds + (kind.rate("host_call") if name == "host" else 0.0)
