"""Published figures of devices and links, for predictions about other hardware. Each has a source.

Data sheets give peaks, which no program reaches. The figures here are peaks multiplied by `REACHED`, the
fraction that large matrix products and copies usually reach, so their spread is large. The pages on TPUs and
the figures of the H100's NVLink were checked in 2026; the others were not checked. A calibration
(`fdg.costs.calibration`) replaces these figures.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fdg.costs.hardware import DeviceKind, Figure, Link
from fdg.errors import unknown_name

REACHED = {"product": 0.7, "memory": 0.85, "bandwidth": 0.8}  # the fractions of the peaks that are reached
_SPREAD = 0.3  # of the figures below


def _kind(
    name: str, platform: str, source: str, memory: float, memory_bytes: float, **products: float
) -> DeviceKind:
    """A device kind from published peaks: memory in TB/s and GB, `products` in TFLOP/s by dtype."""
    figures = {
        f"product/{dtype}": Figure(REACHED["product"] * teraflops * 1e12, _SPREAD, source)
        for dtype, teraflops in products.items()
    }
    figures["memory"] = Figure(REACHED["memory"] * memory * 1e12, _SPREAD, source)
    figures["memory_bytes"] = Figure(memory_bytes * 1e9, 0.0, source)
    return DeviceKind(name, platform, figures)


# Sources, with the device's name in place of {}.
_SHEET = "NVIDIA's data sheet of the {}, dense; float32 without TF32, which is off by default"
_CLOUD = "Google Cloud's page 'TPU {}'; float32 products as six passes of bfloat16 (precision highest: XLA)"

# Each kind of device, with its usual links within a host and between hosts.
_KINDS_AND_LINKS: Sequence[tuple[DeviceKind, str, str]] = (
    (_kind("P100", "gpu", _SHEET.format("Tesla P100 for NVLink servers (10.6 TFLOP/s, 732 GB/s)"),
           0.732, 16, float32=10.6, float16=21.2, float64=5.3), "PCIe 3", "Ethernet 10"),
    (_kind("V100", "gpu", _SHEET.format("V100 SXM2 (15.7 TFLOP/s, 900 GB/s)"),
           0.9, 32, float32=15.7, float16=125, float64=7.8), "NVLink 2", "InfiniBand EDR"),
    (_kind("V100 16GB", "gpu", _SHEET.format("V100 SXM2 (15.7 TFLOP/s, 900 GB/s)"),
           0.9, 16, float32=15.7, float16=125, float64=7.8), "NVLink 2", "InfiniBand EDR"),
    (_kind("A100", "gpu", _SHEET.format("A100 80GB SXM (19.5 TFLOP/s, 2,039 GB/s)"),
           2.039, 80, float32=19.5, bfloat16=312, float16=312, float64=9.7), "NVLink 3", "InfiniBand HDR"),
    (_kind("A100 40GB", "gpu", _SHEET.format("A100 40GB SXM (19.5 TFLOP/s, 1,555 GB/s)"),
           1.555, 40, float32=19.5, bfloat16=312, float16=312, float64=9.7), "NVLink 3", "InfiniBand HDR"),
    (_kind("H100", "gpu", _SHEET.format("H100 SXM5 (67 TFLOP/s, 3.35 TB/s)"),
           3.35, 80, float32=67, bfloat16=989, float16=989, float64=34), "NVLink 4", "InfiniBand NDR"),
    (_kind("H200", "gpu", _SHEET.format("H200 SXM (67 TFLOP/s, 4.8 TB/s, 141 GB)"),
           4.8, 141, float32=67, bfloat16=989, float16=989, float64=34), "NVLink 4", "InfiniBand NDR"),
    (_kind("B200", "gpu", _SHEET.format("B200 of an HGX (75 TFLOP/s, 8 TB/s, 180 GB)"),
           8.0, 180, float32=75, bfloat16=2250, float16=2250, float64=37), "NVLink 5", "InfiniBand NDR"),
    (_kind("TPU v5e", "tpu", _CLOUD.format("v5e") + " (197 TFLOP/s, 819 GB/s, 16 GB)",
           0.819, 16, bfloat16=197, float32=197 / 6), "ICI v5e", "ICI v5e"),
    (_kind("TPU v5p", "tpu", _CLOUD.format("v5p") + " (459 TFLOP/s, 2,765 GB/s, 95 GB)",
           2.765, 95, bfloat16=459, float32=459 / 6), "ICI v5p", "ICI v5p"),
    (_kind("TPU v6e", "tpu", _CLOUD.format("v6e") + " (918 TFLOP/s, 1,638 GB/s, 32 GB)",
           1.638, 32, bfloat16=918, float32=918 / 6), "ICI v6e", "ICI v6e"),
)  # fmt: skip

KINDS: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind, *_ in _KINDS_AND_LINKS})
"""Device kinds by name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA B200": "B200",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA A100-SXM4-40GB": "A100 40GB",
        "Tesla V100-SXM2-32GB": "V100",
        "Tesla V100-SXM2-16GB": "V100 16GB",
        "Tesla P100-SXM2-16GB": "P100",
        "Tesla P100-PCIE-16GB": "P100",
        "TPU v5 lite": "TPU v5e",
        "TPU v5": "TPU v5p",
        "TPU v6 lite": "TPU v6e",
    }
)
"""JAX's names (`jax.Device.device_kind`) -> names in `KINDS`."""


def _link(
    name: str,
    source: str,
    gigabytes: float,
    latency: float,
    call: float = 0.0,
    reached: float = REACHED["bandwidth"],
) -> Link:
    """A link, from its published bandwidth (GB/s one way), and latency and call overhead (us)."""
    return Link(
        name,
        Figure(latency * 1e-6, 0.5, source),
        Figure(reached * gigabytes * 1e9, _SPREAD, source),
        Figure(call * 1e-6, 0.5, source),
    )


# The end of the source of links whose latencies are NCCL's.
_NCCL = "; latencies from NCCL's cost model (src/graph/tuning.cc: base 6.6 us, NVLink 0.6, network 5.0)"
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            _link("NVLink 1", "P100: 160 GB/s in both directions" + _NCCL, 80, 0.6, 6.6),
            _link("NVLink 2", "V100: 300 GB/s in both directions" + _NCCL, 150, 0.6, 6.6),
            _link("NVLink 3", "A100: 600 GB/s in both directions" + _NCCL, 300, 0.6, 6.6),
            _link("NVLink 4", "H100, H200: 900 GB/s in both directions; 380 of 450 GB/s one way measured"
                  " (NVIDIA/nccl issue 1264)" + _NCCL, 450, 0.6, 6.6, 380 / 450),
            _link("NVLink 5", "B200: 1,800 GB/s in both directions" + _NCCL, 900, 0.6, 6.6),
            _link("PCIe 3", "PCI Express 3.0, 16 lanes: 15.75 GB/s one way" + _NCCL, 15.75, 1.0, 6.6),
            _link("PCIe 4", "PCI Express 4.0, 16 lanes: 31.5 GB/s one way" + _NCCL, 31.5, 1.0, 6.6),
            _link("PCIe 5", "PCI Express 5.0, 16 lanes: 63 GB/s one way" + _NCCL, 63, 1.0, 6.6),
            _link("InfiniBand EDR", "100 Gb/s a port, one port a host" + _NCCL, 12.5, 5.0, 6.6),
            _link("InfiniBand HDR", "200 Gb/s a port, eight ports a host" + _NCCL, 8 * 25.0, 5.0, 6.6),
            _link("InfiniBand NDR", "400 Gb/s a port, eight a host (HGX H100)" + _NCCL, 8 * 50.0, 5.0, 6.6),
            _link("Ethernet 10", "10 Gb/s a host; TCP takes some tens of microseconds", 1.25, 50, 20),
            _link("Ethernet 25", "25 Gb/s a host; likewise", 3.125, 50, 20),
            _link("Ethernet 100", "100 Gb/s a host; likewise", 12.5, 50, 20),
            _link("ICI v5e", "Google Cloud, TPU v5e: 400 GB/s in both directions, a chip", 200, 1.0, 2.0),
            _link("ICI v5p", "Google Cloud, TPU v5p: 4,800 Gb/s a chip", 300, 1.0, 2.0),
            _link("ICI v6e", "Google Cloud, TPU v6e: 800 GB/s in both directions, a chip", 400, 1.0, 2.0),
            _link("DCN", "Google Cloud, TPU v5e: two cards of 100 Gb/s a host", 25.0, 50, 20),
        )
    }
)  # fmt: skip
"""Links by name. For links between hosts, the bandwidth is that of one host."""


def kind(name: str) -> DeviceKind:
    """A device kind by its name in `KINDS` or by JAX's name.

    >>> kind("NVIDIA H100 80GB HBM3").name
    'H100'
    """
    device_kind = KINDS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if device_kind is None:
        raise unknown_name("device kind", name, KINDS)
    return device_kind


def usual_links(name: str) -> tuple[Link, Link]:
    """The usual links of a device kind: within a host, and between hosts."""
    device_kind = kind(name)
    inside, between = next(links for known, *links in _KINDS_AND_LINKS if known is device_kind)
    return LINKS[inside], LINKS[between]
