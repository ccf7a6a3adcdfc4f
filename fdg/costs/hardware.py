"""Hardware as plain data: kinds of devices, links, hosts and clusters.

Every rate is a `Figure`: a number with its source and spread. A kind of device is a name, a platform and
figures by name, so published tables, calibrations and cluster files all have the same form.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from fdg.costs.loads import Target
from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.errors import FdgError, unknown_name


class Figure(NamedTuple):
    """A rate, its relative spread (0.1: 10% up or down; 0: unknown), and its source."""

    value: float
    spread: float = 0.0
    source: str = ""


RATES: Mapping[str, str] = {
    "product/float32": "FLOP/s of large products of float32 matrices",
    "product/bfloat16": "FLOP/s of large products of bfloat16 matrices",
    "product/float16": "FLOP/s of large products of float16 matrices",
    "product/float64": "FLOP/s of large products of float64 matrices",
    "product_bytes": "B/s at which a product reads and writes its matrices",
    "product_call": "s that a product takes besides",
    "convolution": "share of the rate of products that convolutions reach",
    "memory": "B/s read and written, arrays larger than the cache",
    "cache": "B/s read and written, arrays that fit the cache",
    "cache_bytes": "B that an operation may read and write at the rate of a cache",
    "elementwise": "B/s of additions and the like",
    "transcendental": "B/s of tanh and the like",
    "special": "B/s of sine, powers, remainders and the like",
    "reduction": "B/s of sums and the like",
    "random": "B/s of random bits",
    "sort": "B/s of sorts",
    "movement": "B/s of look-ups, with all of each cache line",
    "copy": "B/s of slices, transpositions and the like",
    "linear algebra": "B/s of factorisations and the like",
    "host": "B/s to and from functions on the host",
    "host_call": "s of a call of a function on the host",
    "operation": "s to start an operation within a program",
    "trip": "s of a trip of a loop within a program, besides what it does",
    "dispatch": "s of the host to start a program",
    "argument": "s of the host for each array that it gives to a program, or gets",
    "transfer": "s of the host to start moving an array between groups",
    "parallel": "share of an operation's work that several cores divide",
    "parallel_bytes": "B from which an operation is divided over several cores",
    "memory_bytes": "B of memory on a device",
}
"""The figures that a kind of device may have, with their units."""

SHARES = frozenset({"convolution", "parallel"})
SIZES = frozenset({"cache_bytes", "parallel_bytes", "memory_bytes"})
TIMES = frozenset({"product_call", "host_call", "operation", "trip", "dispatch", "argument", "transfer"})
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device."""

    name: str  # such as "H100"
    platform: str  # as in JAX: "cpu", "gpu" or "tpu"
    # figures by their names in `RATES`; missing ones are derived from others (`rate`)
    figures: Mapping[str, Figure]
    # the share of a class's time that fusion leaves, if fitted; None for the platform's
    # (`program_time.JOINED`)
    joined: Mapping[str, float] | None = None
    # overheads of programs and transfers; None for the platform's (`lost`)
    overheads: Overheads | None = None

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise FdgError(
                f"device kind {self.name}: platform {self.platform!r} must be one of {', '.join(PLATFORMS)}"
            )
        for name, figure in self.figures.items():
            if name not in RATES:
                raise unknown_name(f"rate of device kind {self.name}", name, RATES)
            least = 0 if name in TIMES | SHARES else 1e-30
            if not (
                isinstance(figure.value, int | float)
                and math.isfinite(figure.value)
                and figure.value >= least
            ):
                raise FdgError(
                    f"device kind {self.name}: {name} = {figure.value}: give {RATES[name]}, a number"
                    f" {'of at least' if least == 0 else 'above'} 0"
                )
        if not any(name.startswith("product/") for name in self.figures) or "memory" not in self.figures:
            raise FdgError(
                f"device kind {self.name} needs 'memory' ({RATES['memory']}) and one of 'product/float32',"
                f" 'product/bfloat16' at least"
            )

    @property
    def lost(self) -> Overheads:
        """Its overheads, or its platform's."""
        return self.overheads or OVERHEADS[self.platform]

    def rate(self, name: str) -> float:
        """The value of a figure, possibly derived from others."""
        if name in self.figures:
            return self.figures[name].value
        if name.startswith("product/"):
            return self._product_rate(name.removeprefix("product/"))
        if name not in RATES:
            raise unknown_name("rate", name, RATES)
        if name in ("cache", "product_bytes", *BY_BYTES):
            return self.figures["memory"].value
        return _DEFAULTS[self.platform].get(name, _COMMON[name])

    def _product_rate(self, dtype: str) -> float:
        """For a dtype without a figure: the next wider one's, else the widest one's."""
        width = _WIDTHS.get(dtype, 4)
        known = {
            _WIDTHS[name.removeprefix("product/")]: figure.value
            for name, figure in self.figures.items()
            if name.startswith("product/")
        }
        wider = [w for w in known if w >= width]
        return known[min(wider)] if wider else known[max(known)] * max(known) / width


_WIDTHS = {"float8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "float64": 8}
_NAMES = tuple(RATES)
BY_BYTES = _NAMES[_NAMES.index("elementwise") : _NAMES.index("host") + 1]  # classes of operations
_COMMON: Mapping[str, float] = {
    "product_call": 0.0,
    "convolution": 0.5,
    "cache_bytes": 1.0,
    "host_call": 2e-5,
    "operation": 1e-7,
    "trip": 1e-6,
    "dispatch": 5e-5,
    "argument": 1e-6,
    "transfer": 2e-5,
    "parallel": 0.0,
    "parallel_bytes": 1e5,
    "memory_bytes": 1e18,
}
_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    # About 4 us to start a kernel; each trip of a loop without command buffer waits for the host's decision
    # to continue: measured times of XLA's loops on a GPU.
    "gpu": {"operation": 4e-6, "trip": 1.2e-5, "dispatch": 5e-5},
    "tpu": {"operation": 1e-6, "trip": 2e-6, "dispatch": 1e-4},
    "cpu": {},
}


_NONE = Figure(0.0)


@dataclasses.dataclass(frozen=True)
class Link:
    """A network link."""

    name: str  # such as "NVLink 4"
    latency: Figure  # seconds for the first byte of a message
    bandwidth: Figure  # bytes per second, one way, of a device (within a host) or of a host (between hosts)
    call: Figure = _NONE  # overhead of a collective in seconds, apart from its messages

    def __post_init__(self) -> None:
        for word, figure, least in (
            ("latency", self.latency, 0.0),
            ("bandwidth", self.bandwidth, 1e-30),
            ("call", self.call, 0.0),
        ):
            if not (math.isfinite(figure.value) and figure.value >= least):
                raise FdgError(
                    f"link {self.name}: {word} = {figure.value}: give a number"
                    f" {'above' if least else 'of at least'} 0"
                )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts with devices of one kind on one network."""

    kind: DeviceKind  # the kind of all devices
    devices_per_host: int
    hosts: int
    inside: Link  # the link between devices of a host
    between: Link  # the link between hosts
    cores: int | None = None  # cores that a machine's CPU devices share; None if each has its own
    hosts_per_machine: int = 1  # processes that share a machine's cores, each counted as a host
    price: float = 0.0  # of a device for an hour, in any currency
    straggling: float = 0.0  # relative standard deviation of a device's time for equal work
    failures: float = 0.0  # failures of a device per hour
    restart: float = 300.0  # seconds from a failure until the last checkpoint is loaded
    storage: float = 1e9  # bytes per second to the checkpoint storage, of all hosts together
    note: str = ""  # further information on these figures

    def __post_init__(self) -> None:
        for name in ("devices_per_host", "hosts", "hosts_per_machine"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FdgError(f"cluster: {name} = {value!r}: give a whole number of at least 1")
        for name in ("price", "straggling", "failures", "restart"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise FdgError(f"cluster: {name} = {value!r}: give a number of at least 0")
        if self.straggling > 1:
            raise FdgError(
                f"cluster: straggling = {self.straggling!r}: give a fraction, from 0 to 1; for"
                f" {self.straggling:g}% write {self.straggling / 100:g}"
            )
        if not (isinstance(self.storage, int | float) and self.storage > 0):
            raise FdgError(f"cluster: storage = {self.storage!r}: give bytes a second above 0")
        if self.cores is not None and (not isinstance(self.cores, int) or self.cores < 1):
            raise FdgError(f"cluster: cores = {self.cores!r}: give a whole number of at least 1")

    @property
    def devices_per_machine(self) -> int:
        """Devices that share cores."""
        return self.devices_per_host * min(self.hosts, self.hosts_per_machine)

    @property
    def machines(self) -> int:
        """Number of machines."""
        return -(-self.hosts // self.hosts_per_machine)

    @property
    def target(self) -> Target:
        """The devices as lowering needs to know them."""
        return Target(self.kind.platform, self.cores, self.devices_per_machine)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    def of(self, devices: int) -> "Cluster":
        """A part of the cluster with this many devices, in whole hosts."""
        if devices < 1 or devices > self.devices:
            raise FdgError(f"{devices} devices of a cluster that has {self.devices}: use 1 to {self.devices}")
        if devices <= self.devices_per_host:
            return dataclasses.replace(self, hosts=1, devices_per_host=devices)
        hosts, rest = divmod(devices, self.devices_per_host)
        if rest:
            each = self.devices_per_host
            raise FdgError(
                f"{devices} devices are no whole number of hosts of {each}: use {hosts * each}"
                + (f" or {(hosts + 1) * each}" if hosts < self.hosts else "")
            )
        return dataclasses.replace(self, hosts=hosts)

    def platforms(self, devices: int) -> list[str]:
        """The platform of each device, for policies."""
        return [self.kind.platform] * devices
